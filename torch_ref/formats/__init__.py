"""Checkpoints of any program, opened by torch.

Imports `parallel`, `families`, and the neutral rooms of jaxdist.
"""
