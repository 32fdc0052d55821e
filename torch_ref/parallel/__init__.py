"""How tensors, tokens, experts and stages are split over ranks.

Imports `jaxdist.config`.
"""
