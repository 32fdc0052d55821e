"""Forked commands exit and print as new processes do."""

from pathlib import Path

import pytest

from parity_tests.runs import forkserver
from parity_tests.runs.run import environment

pytestmark = pytest.mark.long

MODULES = {
    "says": "import sys; print(*sys.argv[1:]); print('bad', file=sys.stderr); sys.exit(3)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "lacks": "import nowhere_to_be_found",
    "keeps": "import json; print(hasattr(json, 'kept')); json.kept = True",
    "asks": "print(input())",
}


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """An environment whose path has MODULES."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return environment() | {"PYTHONPATH": str(tmp_path)}


def test_codes_and_words(elsewhere: dict[str, str]) -> None:
    done = forkserver.run("says", ("a b", "c"), elsewhere)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a b c\n", "bad\n")
    assert forkserver.run("killed", (), elsewhere).returncode == -9
    for module, error in (("lacks", "No module named 'nowhere"), ("nowhere", "nowhere"), ("asks", "EOFError")):
        done = forkserver.run(module, (), elsewhere)
        assert done.returncode == 1 and error in done.stderr


def test_nothing_is_left_for_the_next(elsewhere: dict[str, str]) -> None:
    for _ in range(2):
        assert forkserver.run("keeps", (), elsewhere).stdout.splitlines()[-1] == "False"


def test_imports_are_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests fork a side's commands from one process that has imported everything."""
    origins = set()
    for test in ("one_test.py::a (call)", "one_test.py::b (call)"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        forkserver.run("jaxdist.convert", ("--help",), environment())
        origins.add(forkserver._origin.cache_info().currsize)
    assert len(origins) == 1


def test_a_users_mistake() -> None:
    done = forkserver.run("jaxdist.convert", ("/nowhere/source", "target"), environment())
    assert done.returncode == 2 and done.stderr.startswith("error: /nowhere/source")
