"""Mixtral (arXiv:2401.04088) and, by config, Qwen3-MoE."""
