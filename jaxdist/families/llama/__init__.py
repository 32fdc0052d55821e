"""Llama (arXiv:2302.13971), and by config Llama 3, Mistral, Qwen2 and Qwen3."""
