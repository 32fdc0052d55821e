"""`python -m MODULE ...` in processes of their own, forked from one in which what they import is imported already.

Importing torch and what is built on it takes longer than a short run. Each side's imports are in one process,
which has computed nothing: a fork of it begins as a new process would.
"""

import atexit
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from runpy import run_module
from subprocess import PIPE, CompletedProcess, Popen
from tempfile import TemporaryDirectory

from jaxdist.config import TrainingError

NOTHING = "parity_tests"
TRAIN = {  # side -> the module of its train command
    "jaxdist": "jaxdist.train",
    "torch_ref": "torch_ref.train",
    "transformers": "parity_tests.runs.transformers_train",
}
OUTPUTS = {1: "stdout", 2: "stderr"}  # by file descriptor


def run(module: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> CompletedProcess[str]:
    """A command to its end: its exit code and output. Raises TrainingError where it could not be begun."""
    about = (t for w in (module, *arguments) for side, t in TRAIN.items() if w == t or w.partition(".")[0] == side)
    imported = next(about, NOTHING)
    with TemporaryDirectory() as folder:
        origin = _origin(imported, frozenset(environment.items()))
        assert origin.stdin and origin.stdout
        origin.stdin.write(json.dumps([folder, module, *arguments]) + "\n")
        origin.stdin.flush()
        answer = origin.stdout.readline()
        if not answer:
            raise TrainingError(f"python -m {module}: the process to fork from has ended; start again")
        code = int(answer)
        outputs = (Path(folder, name).read_text(encoding="utf-8") for name in OUTPUTS.values())
        return CompletedProcess([module, *arguments], code, *outputs)


@cache
def _origin(imported: str, environment: frozenset[tuple[str, str]]) -> Popen[str]:
    """The process to fork from; it ends with this one."""
    line = [sys.executable, "-m", "parity_tests.runs.forkserver", imported]
    origin = Popen(line, stdin=PIPE, stdout=PIPE, text=True, env=dict(environment))
    atexit.register(origin.communicate)  # closes its input, and waits until it has ended
    return origin


def main(imported: str) -> None:
    """Fork for each line of the input, and answer with the exit code."""
    with suppress(ImportError):  # the command will say what is missing
        import_module(imported)
    sys.modules.pop(imported, None)  # for runpy, which runs modules that nothing has imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        folder, module, *arguments = json.loads(line)
        if not (child := os.fork()):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor, name in OUTPUTS.items():
                os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
            sys.argv = [module, *arguments]
            run_module(module, run_name="__main__", alter_sys=True)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
