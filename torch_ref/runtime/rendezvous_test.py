"""Wrong launcher variables on one rank or all give one message, and every rank ends with 2."""

import os
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

import pytest

from jaxdist.config import Parallel, exit_codes
from jaxdist.conftest import free_port
from torch_ref.runtime import launch, rendezvous

pytestmark = pytest.mark.long

ALL = (0, 1, 2)
FORKS = get_context("forkserver")  # its server imports torch but not JAX, whose threads make forks warn
FORKS.set_forkserver_preload([__name__])


def rank(environment: Mapping[str, str], output: Path) -> None:
    """Run one rank until it has met the others."""
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    os.environ |= environment
    rendezvous.LATER = 2

    def main() -> None:
        with launch.reported_once():
            plan = launch.plan(Parallel(mesh="3x1"), "cpu")
        launch.meet(plan)
        print("met")

    with launch.ended_at_once():
        exit_codes(main, quiet=launch.quiet())


def ended(changed: tuple[int, ...], variables: dict[str, str], folder: Path) -> tuple[list[int | None], list[str]]:
    """Exit codes and output lines of three ranks, `changed` of which have other variables, under a launcher that ends
    no rank."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    ranks = []
    for number in ALL:
        own = {"RANK": str(number), "LOCAL_RANK": str(number)} | (variables if number in changed else {})
        ranks.append(FORKS.Process(target=rank, args=(shared | own, folder / str(number))))
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
    return [process.exitcode for process in ranks], [n for i in ALL for n in (folder / str(i)).read_text().splitlines()]


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "TORCH_REF_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("changed", [(2,), (0,), ALL], ids=str)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LOCAL_RANK", "many", "LOCAL_RANK = 'many': must be a whole number; unset it, or let the launcher set it"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK = '-1': must be a whole number; unset it, or let the launcher set it"),
        ("LOCAL_RANK", "3", "LOCAL_RANK = 3: must be below WORLD_SIZE = 3; let the launcher set both"),
        ("WORLD_SIZE", "many", "WORLD_SIZE = 'many': must be a whole number; unset it, or let the launcher set it"),
    ],
)
def test_one_rank_reports_the_mistake(
    name: str, value: str, message: str, changed: tuple[int, ...], tmp_path: Path
) -> None:
    assert ended(changed, {name: value}, tmp_path) == ([2, 2, 2], [f"error: {message}"])


@pytest.mark.parametrize("value", ["many", "3"])
def test_a_rank_without_a_number_ends_the_others(value: str, tmp_path: Path) -> None:
    codes, (line,) = ended((1,), {"RANK": value}, tmp_path)
    assert codes == [2, 2, 2] and line.startswith("error: RANK = ")


def test_right_variables_let_the_ranks_meet(tmp_path: Path) -> None:
    assert ended((), {}, tmp_path) == ([0, 0, 0], ["met"] * 3)
