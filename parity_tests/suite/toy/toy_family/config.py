"""The model section of the family."""

from typing import Literal

from jaxdist.config import Rotary
from jaxdist.config.section import Count


class Wide(Rotary):
    """A decoder whose blocks are x + attention(norm(x)) + mlp(norm(x)), with one norm."""

    family: Literal["wide"] = "wide"
    rotated: Count = 4
    """How many numbers of each head are rotated."""
