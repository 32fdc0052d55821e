"""Train with a mistake in the code: `python -m parity_tests.validation.mistakes jaxdist.betas_swapped --config ...`."""

import sys
from functools import partial
from importlib import import_module

from jaxdist.config import ConfigError, exit_codes
from jaxdist.config.errors import nearest
from parity_tests.validation.mistakes import NOTHING, TABLES, table


def main(name: str, *arguments: str) -> None:
    """Plant the mistake `name`, then run the train command of its side."""
    side = name.partition(".")[0]
    if side not in TABLES:
        raise ConfigError(f"{name}: a mistake is named by its side first; {nearest(side, TABLES)}")
    train = import_module(f"{side}.train")
    known = table(side) | {row.name: row for row in NOTHING.values()}
    if name not in known:
        raise ConfigError(f"{name}: no such mistake; {nearest(name, known)}")
    known[name].plant()
    train.main(arguments)


if __name__ == "__main__":
    exit_codes(partial(main, *(sys.argv[1:] or [""])))
