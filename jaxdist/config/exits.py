"""The end of a command: its exit code and one message."""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from jaxdist.config.errors import CODES, code_of, printable
from jaxdist.config.plugins import failure


def exit_codes(main: Callable[[], None], quiet: bool = False) -> NoReturn:
    """Run `main` and end the process: 0 done, or one of CODES and one message. `quiet`: another rank says why.

    An error of a plugin's code ends it as a ConfigError that names the plugin; any other by its traceback."""
    atexit.register(gc.freeze)  # to look for cycles among all that is imported takes a process seconds more to end
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # what reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except tuple(CODES) as error:
        _end(error, quiet)
    except Exception as error:
        if (explained := failure(error)) is None:
            raise
        _end(explained, quiet)
    sys.exit(0)


def _end(error: BaseException, quiet: bool) -> NoReturn:
    if not quiet:
        print(f"error: {printable(str(error), but=chr(10))}" if str(error) else "interrupted", file=sys.stderr)
    sys.exit(code_of(error))
