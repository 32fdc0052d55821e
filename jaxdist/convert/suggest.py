"""Earlier path of `mappings.suggest`, for scripts."""

from jaxdist.convert.mappings.suggest import suggest

__all__ = ["suggest"]
