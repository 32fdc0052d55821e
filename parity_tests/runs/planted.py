"""A command with a mistake planted: `python -m parity_tests.runs.planted CODE MODULE ...` executes CODE ahead of it."""

import sys
from importlib import import_module

from jaxdist.config import exit_codes


def main(code: str, module: str) -> None:
    """Execute `code`, then the command of `module`, imported anew, with the arguments that follow."""
    del sys.argv[1:3]
    package, _, name = module.rpartition(".")
    vars(import_module(package)).pop(name, None)  # a fork server has imported it
    exec(compile(code, "planted", "exec"), {})
    exit_codes(import_module(module).main)


if __name__ == "__main__":
    main(*sys.argv[1:3])
