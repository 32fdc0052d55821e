"""Checkpoints of other programs, opened by torch."""
