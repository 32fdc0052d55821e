"""How tensors, tokens, experts and stages are split over ranks.

Imports `runtime`, the rows of `families`, and `jaxdist.config`.
"""
