"""Split of tensors, tokens, experts and stages over ranks.

Imports `runtime`, the rows of `families`, and `jaxdist.config`.
"""
