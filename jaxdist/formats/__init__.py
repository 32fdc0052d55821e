"""Files of other programs: names, shapes, headers and where numbers lie in them.

Imports `config`, `runs`, and the rows of `families`. Neutral: both sides read it, so it imports neither jax nor torch.
It computes nothing.
"""
