"""Environment variables that launchers set."""

import os

from jaxdist.config.errors import ConfigError


def environment_integer(name: str, default: int = 0) -> int:
    """The environment variable `name`, or `default` where it is not set. Raises ConfigError."""
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}: must be a whole number; unset it, or let the launcher set it")
    return default if text is None else int(text)
