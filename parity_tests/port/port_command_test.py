"""A script that ends with a port, and parts that cannot be proved."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jaxdist.config import ConfigError
from jaxdist.convert.mappings.mapping import KeyMapping, Row
from parity_tests.port.port import Port
from parity_tests.port.port_test import AdamW, square, torch_adamw

pytestmark = pytest.mark.long


class TestCommand:
    """A script that ends with `.main()`."""

    def exit_code(self, port: Port, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        with pytest.raises(SystemExit) as raised:
            port.main()
        return raised.value.code

    def test_exit_codes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = square(torch_loss=lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean() * 1.001)
        assert self.exit_code(square(), monkeypatch, str(tmp_path / "right")) == 0
        assert self.exit_code(wrong, monkeypatch, str(tmp_path / "wrong")) == 3
        assert self.exit_code(wrong, monkeypatch, str(tmp_path / "wrong")) == 2
        assert self.exit_code(wrong, monkeypatch) == 2
        assert self.exit_code(wrong, monkeypatch, "--help") == 0
        diverged = square(torch_loss=lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean() * math.inf)
        assert self.exit_code(diverged, monkeypatch, str(tmp_path / "diverged")) == 2
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert "FOLDER gets runs" in out
        assert "is not empty; give another folder" in lines[0] and lines[1].startswith("error: give one argument")
        assert "torch-float64, step 1: loss = inf" in lines[2]

    @pytest.mark.parametrize(
        ("folder", "expected"),
        [
            pytest.param("wrong", "batches: give one mapping", marks=pytest.mark.slow),
            pytest.param("/proc/nowhere", "folder /proc/nowhere: ", marks=pytest.mark.slow),
        ],
    )
    def test_bad_input_of_a_script(self, folder: str, expected: str, tmp_path: Path) -> None:
        """`main` reports wrong fields and an impossible folder without a traceback."""
        script = tmp_path / "port.py"
        script.write_text(
            "import sys\nfrom parity_tests.port.port_test import square\n"
            "square(**({'batches': []} if sys.argv[1] == 'wrong' else {})).main()\n",
            encoding="utf-8",
        )
        done = subprocess.run([sys.executable, str(script), folder], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {expected}"), done.stderr


BATCH = {"x": np.ones((4, 6)), "y": np.ones((4, 6))}


def with_field(array: np.ndarray) -> dict[str, Any]:
    return {"batches": [BATCH | {"z": array}]}


class TestBadInput:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"torch_loss": None}, r"jax_loss and torch_loss are missing"),
            ({"torch_step": torch_adamw}, r"jax_step and torch_step belong together"),
            ({"batches": []}, r"batches: give one mapping"),
            ({"batches": [np.ones(3)]}, r"batches: give one mapping"),
            ({"batches": [{"x": np.ones((4, 6)), "y": np.full((4, 6), np.nan)}]}, r"batches: y of batch 1 has NaN"),
            (with_field(np.array(["a", "b"])), r"batches: z of batch 1 is of dtype <U1; give whole or floating-point"),
            (with_field(np.array([None, 1], object)), r"batches: z of batch 1 is of dtype object"),
            (with_field(np.ones(3, complex)), r"batches: z of batch 1 is of dtype complex128"),
            (with_field(np.array([2**31])), r"batches: z of batch 1 has whole numbers beyond 32 bits"),
            (
                {"batches": [BATCH, {0: 1, "x": 1}]},
                r"batches: batch 2 has 0, x, and batch 1 has x, y; give all the same",
            ),
            ({"mapping": KeyMapping((Row("Dense_0.kernel", "0.weight"),))}, r"ours: Dense_0.bias, .* in no row"),
            ({"torch_module": nn.Sequential(nn.Linear(6, 6))}, r"theirs = '2.weight': no such tensor"),
        ],
    )
    def test_named(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            square(**fields).check()

    @pytest.mark.parametrize("side", ["jax_loss", "torch_loss"])
    def test_a_loss_for_each_row(self, side: str, tmp_path: Path) -> None:
        def loss(m: Any, b: Any) -> Any:
            return (b["x"] ** 2).mean(-1)

        with pytest.raises(
            ConfigError, match=rf"{side} returns an array of shape \(\d+,\), not a scalar; give the mean"
        ):
            square(**{side: loss}).prove(tmp_path / "port")

    def test_a_loss_without_a_gradient(self, tmp_path: Path) -> None:
        port = square(torch_loss=lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean().detach())
        with pytest.raises(ConfigError, match="torch_loss returns a number without a gradient"):
            port.prove(tmp_path / "port")

    @pytest.mark.parametrize("own", [True, False])
    def test_random_numbers_are_refused(self, tmp_path: Path, own: bool) -> None:
        """Dropout in train mode, however rare, is refused: its result does not equal itself."""
        module = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Dropout(1e-6)), nn.Linear(6, 6))
        port = square(torch_module=module)
        steps: dict[str, Any] = {
            "jax_loss": None,
            "torch_loss": None,
            "jax_step": AdamW(port.jax_loss),
            "torch_step": torch_adamw,
        }
        port = replace(port, **steps) if own else port
        with pytest.raises(ConfigError, match=f"torch_{'step' if own else 'loss'} draws random numbers, as dropout"):
            port.prove(tmp_path / "port")
        module.eval()
        assert port.prove(tmp_path / "right").word == "equivalent"

    @pytest.mark.parametrize(("number", "where"), [(1, "batch 1"), (3, "batch 3, in the run jax-float64")])
    def test_an_error_of_the_users_code_names_its_batch(self, tmp_path: Path, number: int, where: str) -> None:
        batches = [BATCH | {"x": np.ones((4, 7 if i == number else 6))} for i in range(1, 5)]
        with pytest.raises(Exception, match="shape") as raised:
            square(batches=batches).prove(tmp_path / "port")
        assert f"This was raised at {where}." in raised.value.__notes__

    def test_a_file_that_the_users_code_lacks(self, tmp_path: Path) -> None:
        """A file missing from the user's code is not reported as a full disk."""
        port = square(torch_loss=lambda m, b: torch.from_numpy(np.load(tmp_path / "labels.npy")))
        with pytest.raises(ConfigError, match=r"batch 1: .*labels.npy.*; it is raised by the losses or steps"):
            port.prove(tmp_path / "port")

    def test_tied_on_one_side(self, tmp_path: Path) -> None:
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        module[2].weight = module[0].weight
        with pytest.raises(ConfigError, match=r"0.weight shares its memory with another tensor, but ours are two"):
            square(torch_module=module).prove(tmp_path)

    def test_a_folder_in_use(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("")
        with pytest.raises(ConfigError, match="is not empty"):
            square().prove(tmp_path)
