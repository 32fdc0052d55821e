"""Fixes of the proof's own checks work when followed literally, on its command line and for transformers."""

from pathlib import Path

import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.config_test import MIXED
from jaxdist.config.fixes_test import line_of, refusal, ways
from parity_tests.command import asked
from parity_tests.runs.transformers_train import on_batch_axes


def check(experiment: Experiment, _: dict[str, int]) -> None:
    on_batch_axes(experiment)


@pytest.mark.parametrize(
    "argv",
    [
        ["--strategy", "zero1", "--mesh", "2x1"],
        ["--strategy", "ddp", "--mesh", "2x1", "--precision", "bf16"],
        [*MIXED, "--model.capacity", "1.5"],
        ["--memory.loss_chunks", "4"],
    ],
    ids=" ".join,
)
def test_settings_that_transformers_is_not_run_with(argv: list[str]) -> None:
    """Each fix of the first message works, except the one that takes another reference."""
    line = line_of(argv)
    first = [way for way in ways(refusal(line, check)) if "against" not in way]
    assert first
    for way in first:
        now = {name: value for name, value in (line | way).items() if value}
        while message := refusal(now, check):
            assert message.startswith("parallel.mesh"), message  # the strategy names the axis of data
            now |= next(ways(message))


@pytest.mark.parametrize(
    ("wrong", "message", "right"),
    [
        ([], "--output DIR is missing", ["--output", "new"]),
        (["--output", "new", "--steps", "1"], "give --steps 4 or more", ["--output", "new", "--steps", "4"]),
        (["--output", "new", "--first", "1"], "give 4 or more", ["--output", "new", "--first", "4"]),
        (["--output", "full"], "is not empty; give another folder", ["--output", "new"]),
        (
            ["--output", "new", "--against", "nowhere"],
            "give torch, transformers, or a",
            ["--output", "new", "--against", "torch"],
        ),
        (["--output", "new", "--mesh", "tensor=3"], "use --mesh tensor=2", ["--output", "new", "--mesh", "tensor=2"]),
    ],
    ids=["no output", "steps", "first", "full", "against", "mesh"],
)
def test_the_command_line(
    wrong: list[str], message: str, right: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match=message):
        asked(wrong)
    asked(right)
