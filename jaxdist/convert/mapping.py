"""Earlier path of `mappings.mapping`, for scripts."""

from jaxdist.convert.mappings.mapping import KeyMapping, Row

__all__ = ["KeyMapping", "Row"]
