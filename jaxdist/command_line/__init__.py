"""The command line of both sides: options, overrides, and the configs that they name.

Imports `config`, `runs`, `formats`. Neutral: it imports neither jax nor torch.
"""
