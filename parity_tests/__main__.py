"""Prove that JAX and torch train the same run: `python -m parity_tests --config X --mesh 2x4 --output DIR`."""

from collections.abc import Sequence
from importlib.util import find_spec

from jaxdist.config import ConfigError, exit_codes
from jaxdist.config.errors import writes_to


def main(argv: Sequence[str] | None = None) -> None:
    """The command (`command.py`), which imports all that it needs. Raises ConfigError where some of that is missing."""
    if missing := [name for name in ("torch", "matplotlib", "jinja2") if find_spec(name) is None]:
        raise ConfigError(f"{', '.join(missing)} missing: pip install 'jaxdist[torch,report]'")
    from parity_tests.command import prove

    with writes_to("--output"):
        prove(argv)


if __name__ == "__main__":
    exit_codes(main)
