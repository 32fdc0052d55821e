"""The command as a user calls it: both sides trained, judged and searched."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from parity_tests.__main__ import main
from parity_tests.proof.levels import FEWEST
from parity_tests.proof.proof import Proof
from parity_tests.report.report_test import WIDTHS, seen
from parity_tests.runs.run import SIDES

pytestmark = pytest.mark.long

SMALL = "--model.layers 2 --model.dim 32 --model.heads 2 --model.kv_heads 1 --model.head_dim 16 --model.hidden 48"
RUN = f"{SMALL} --data.sequence 16 --train.batch 8 --optimizer.warmup 2 --device cpu".split()


def verdict(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_a_run_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config alone is given: seven runs, and two with reordered sums."""
    main([*RUN, "--mesh", "2x1", "--precision", "bf16", "--first", "4", "--output", str(tmp_path / "proof")])
    output, found = capsys.readouterr().out, verdict(tmp_path / "proof")
    assert found["verdict"] == "equivalent" and f"run 9 of 9: {SIDES[1]}, reordered" in output
    assert {check["level"] for check in found["checks"]} == {
        "mathematics", "distribution", "precision", "memory", "traffic",
    }  # fmt: skip
    assert "Steps 1 to 4 of 300 were run" in found["notes"][0]
    assert "reordering sums changes the loss: jaxdist's by" in found["notes"][1]
    assert "<strong>Equivalent</strong>" in (tmp_path / "proof" / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Proof of a run whose clip in torch is 0.1 % wider: its folder, exit code and output."""
    folder, right = tmp_path_factory.mktemp("planted") / "proof", Proof.entry

    def entry(self: Proof, side: str) -> tuple[str, ...]:
        return (
            ("parity_tests.validation.mistakes", "torch_ref.clip_a_thousandth_wider")
            if side == SIDES[1]
            else right(self, side)
        )

    options = ["--mesh", "1x1", "--precision", "fp64", "--steps", "4", "--optimizer.clip", "0.1", "--bisect"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        patch.setattr(Proof, "entry", entry)
        with pytest.raises(SystemExit) as raised:
            main([*RUN, *options, "--output", str(folder)])
    assert isinstance(raised.value.code, int)
    return folder, raised.value.code, output.getvalue()


def test_a_mistake_is_found(planted: tuple[Path, int, str]) -> None:
    folder, code, output = planted
    found = verdict(folder)
    assert code == 3 and found["verdict"] == "not_equivalent"
    assert found["parting"]["where"] == "embed.weight, clipped gradient, step 1"
    assert found["sentence"] in output


def test_a_browser_draws_the_report_of_a_proof(planted: tuple[Path, int, str], tmp_path: Path) -> None:
    """Curves of loss and gradient norm, errors of layers, and memory; on one device there is no traffic."""
    page = (planted[0] / "report.html").read_text(encoding="utf-8")
    assert seen(page, tmp_path) == ["4 figures"] * len(WIDTHS)


def test_the_output_must_be_new(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output DIR is missing"):
        main(["--mesh", "1x1"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a proof always starts again"):
        main(["--mesh", "1x1", "--output", str(tmp_path / "new"), "--resume"])
    with pytest.raises(ConfigError, match="is not empty"):
        main(["--mesh", "1x1", "--output", str(tmp_path)])


def test_an_impossible_mesh_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.batch = 8 sequences cannot be divided over data × fsdp = 3"):
        main([*RUN, "--mesh", "3x1", "--output", str(tmp_path / "proof")])
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("steps", [0, FEWEST - 1])
def test_too_few_steps(steps: int, tmp_path: Path) -> None:
    line = ["--mesh", "1x1", "--output", str(tmp_path / "new")]
    with pytest.raises(ConfigError, match=rf"train\.steps = {steps}: a proof needs {FEWEST}"):
        main([*line, "--steps", str(steps)])
    with pytest.raises(ConfigError, match=rf"--first {steps}: a proof needs {FEWEST} steps"):
        main([*line, "--first", str(steps)])


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-that-name/run", ""])
def test_an_impossible_reference(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        main(["--against", name, "--output", str(tmp_path / "new")])
