"""The one error that means: the user's input is wrong, and here is how to mend it."""

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """Bad arguments or config. The message names the field, its value and the fix; the process ends with 2."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` when a valid name is close to `name`, else the list of valid names."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(valid)}"
