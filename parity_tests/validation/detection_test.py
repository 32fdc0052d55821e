"""The benchmark's table is complete, and mistakes of several kinds are detected by the same code."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity_tests.proof.verdict import LEVELS, Verdict
from parity_tests.validation.detection import CONFIGURATIONS, FOUND, NAMED_RIGHT, Benchmark, Finding, found_before
from parity_tests.validation.mistakes import NOTHING, TABLES, mistake, plant, table

QUICK = [
    "jaxdist.rope_of_neighbours",
    "jaxdist.second_moment_of_the_unclipped",
    "torch_ref.another_norm_eps",
    "torch_ref.clip_a_thousandth_wider",
    "torch_ref.norm_not_loaded",
    "torch_ref.master_weights_twice",
    "torch_ref.clip_of_each_shard",
    "torch_ref.blocks_not_wrapped",
]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    return Benchmark(tmp_path_factory.mktemp("detection"))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_is_detected_and_named(benchmark: Benchmark, name: str) -> None:
    found = benchmark.find(table()[name])
    assert found.detected and found.right, found


@pytest.mark.slow
def test_no_mistake_is_detected_where_none_is_planted(benchmark: Benchmark) -> None:
    """Runs by the same path: the same entry, a run of its own, the same judgement."""
    found = benchmark.find(NOTHING["torch_ref"])
    assert found.checks == () and found.named == ""


def test_the_table_has_all_kinds() -> None:
    rows = list(table().values())
    assert len(rows) >= 64
    assert min(Counter(row.side for row in rows).values()) >= 30
    assert {row.level for row in rows} == set(LEVELS)
    assert {row.configuration for row in rows} == set(CONFIGURATIONS)
    assert all(row.what and row.culprits for row in rows)


PLANT_EACH = """
import os, sys
from parity_tests.validation.mistakes import table

rows, processes = list(table().items()), 16
for first in range(processes):  # neighbors in the table, which often replace the same function, in different ones
    if not (child := os.fork()):
        for name, mistake in rows[first::processes]:
            try:
                mistake.plant()
            except BaseException as error:
                print(name, repr(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.long
def test_every_mistake_can_be_planted() -> None:
    """The function that it replaces exists; otherwise the run stays right and counts as not detected."""
    done = subprocess.run([sys.executable, "-c", PLANT_EACH], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize("wrong", [3, lambda first: first, lambda first, second, third, fourth: first])
def test_what_cannot_stand_for_a_function_is_not_planted(wrong: Any) -> None:
    owner = SimpleNamespace(right=lambda first, second, *, third=0: first)
    with pytest.raises(TypeError):
        plant(owner, "right", wrong)
    plant(owner, "right", lambda first, second: second)
    assert owner.right(1, 2) == 2


def test_every_mistake_was_measured() -> None:
    """The README's detection figures cover the current table."""
    measured = json.loads(Path(__file__).with_name("measured").joinpath("detection.json").read_text(encoding="utf-8"))
    assert [finding["mistake"] for finding in measured["findings"]] == [row.name for row in table().values()]
    assert measured["detected"] == 1.0 and measured["named_right"] >= NAMED_RIGHT


def test_earlier_results_are_reused(tmp_path: Path) -> None:
    """Results of the same code are reused; a line truncated by a kill is dropped."""
    finding = Finding.of(NOTHING["torch_ref"], Verdict([]))
    lines = [json.dumps({"code": stamp} | asdict(finding)) + "\n" for stamp in ("now", "before", "now")]
    (tmp_path / FOUND).write_text("".join(lines)[:-9], encoding="utf-8")
    assert list(found_before(tmp_path, "now")) == [finding]
    assert not list(found_before(tmp_path / "nowhere", "now"))


def test_names_are_unique_and_name_the_side() -> None:
    rows = table()
    assert all(name == row.name and name.startswith(f"{row.side}.") for name, row in rows.items())
    assert {row.side for row in rows.values()} == set(TABLES)

    def betas_swapped() -> None:
        """A second mistake of this name."""

    with pytest.raises(ValueError, match="two mistakes"):
        mistake("jaxdist", "llama", "mathematics", "exp_avg/*")(betas_swapped)


@pytest.mark.slow
def test_another_culprit_is_not_right(benchmark: Benchmark) -> None:
    """The named culprit is compared, not only that one is named."""
    from dataclasses import replace

    row = replace(table()["torch_ref.another_norm_eps"], culprits=("activation/layers.1.attention_norm",))
    assert not benchmark.find(row).right
