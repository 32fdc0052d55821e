"""Run folders on disk: checkpoints, metrics, locks, signals, and the display of a run.

Imports `config`. Neutral: both sides read it, so it imports neither jax nor torch.
"""
