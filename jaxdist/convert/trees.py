"""Earlier path of `mappings.trees`, for scripts."""

from jaxdist.convert.mappings.trees import shapes

__all__ = ["shapes"]
