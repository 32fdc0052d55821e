"""Weights and optimizer state with NaN or infinity are refused by name where they are read, by both sides and convert;
the advice of each message works."""

import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxdist.config import ConfigError
from jaxdist.conftest import often, slow
from jaxdist.convert.__main__ import main as convert
from jaxdist.convert.finite import BLOCK, bad_values
from jaxdist.formats.finite import BadValues, check_counts, nonfinite_weights_error
from jaxdist.formats.foreign import SINGLE
from parity_tests.runs import forkserver
from torch_ref.formats import finite

pytestmark = pytest.mark.long

FIELDS = [
    "--model.layers=2", "--model.dim=16", "--model.heads=2", "--model.kv_heads=1", "--model.head_dim=8",
    "--model.hidden=24", "--model.vocab=300", "--data.sequence=16", "--train.batch=4", "--train.validation_batches=0",
    "--precision=fp32", "--device=cpu", "--optimizer.decay_steps=4",
]  # fmt: skip
SIDES = ["jaxdist", "torch_ref"]
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def train() -> Train:
    """train(side, arguments): a finished command."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    environment = inherited | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    return lambda side, *arguments: forkserver.run(f"{side}.train", (*FIELDS, *map(str, arguments)), environment)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    """A run of two steps."""
    folder: Path = tmp_path_factory.mktemp("run") / "run"
    done = train("torch_ref", "--mesh=1x1", "--steps=2", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def bad(run: Path) -> Path:
    """Weights of the run, some not finite, in rows that no batch reads and elsewhere."""
    folder = run.parent / "bad"
    convert([str(run), str(folder), "--to", "hf"])
    tensors = load_file(folder / SINGLE)
    tensors["model.embed_tokens.weight"][290, 3] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"][1, 2:5] = -float("inf")
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


WHAT = (
    r"tensor model\.embed_tokens\.weight has 1 of 4,800 values that are NaN or infinite, the first nan at \[290, 3\]; "
    r"so have model\.layers\.1\.mlp\.up_proj\.weight\. "
)


@pytest.mark.parametrize("side", often(SIDES, ["torch_ref"]))
def test_starting_weights_are_refused_and_the_advice_works(
    side: str, bad: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = train(side, "--mesh=1x1", "--steps=1", "--init", bad, "--output", tmp_path / "run")
    assert refused.returncode == 2 and re.search(WHAT, refused.stderr), refused.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    advised = re.search(r"`python -m jaxdist\.convert (.*)`", refused.stderr)
    assert advised
    monkeypatch.chdir(tmp_path)
    convert(shlex.split(advised[1]))
    copy = load_file(tmp_path / "COPY" / SINGLE)
    assert copy["model.embed_tokens.weight"][290, 3] == 0 and all(bool(t.isfinite().all()) for t in copy.values())
    done = train(side, "--mesh=1x1", "--steps=1", "--init", tmp_path / "COPY")
    assert done.returncode == 0, done.stderr


def test_values_on_several_ranks_are_reported_by_whole_tensors(bad: Path, train: Train, tmp_path: Path) -> None:
    """Ranks hold rows 0 to 149 and 150 to 299 of the embedding, and replicas of them."""
    convert([str(bad), str(tmp_path / "kept"), "--to", "dcp", "--nonfinite", "keep"])
    refused = train("torch_ref", "--mesh=data=2,fsdp=2", "--steps=1", "--init", tmp_path / "kept")
    message = r"tensor embed\.weight has 1 of 4,800 .* nan at \[290, 3\]; so have layers\.1\.mlp\.up_proj\.weight\."
    assert refused.returncode == 2 and re.search(message, refused.stderr), refused.stderr


def test_a_bad_weight_of_one_stage_is_reported_by_all_ranks(bad: Path, train: Train, tmp_path: Path) -> None:
    """A pipeline's last stage alone reads a bad weight: no rank waits for the others."""
    tensors = load_file(bad / SINGLE)
    tensors["model.embed_tokens.weight"][290, 3] = 0
    folder = tmp_path / "last"
    shutil.copytree(bad, folder)
    save_file(tensors, folder / SINGLE)
    started = time.monotonic()
    refused = train("torch_ref", "--mesh=pipeline=2", "--train.accumulation=2", "--steps=1", "--init", folder)
    message = r"tensor model\.layers\.1\.mlp\.up_proj\.weight has 3 of 384 values that are NaN or infinite"
    assert refused.returncode == 2 and len(re.findall(message, refused.stderr)) == 1, refused.stderr
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("kind", slow(["orbax", "dcp", "hf", "torch"]))
def test_all_name_a_layers_tensor_alike(kind: str, bad: Path, train: Train, tmp_path: Path) -> None:
    """The name is the source's, with the layer's index where an array holds all layers."""
    own = {"orbax": "layers.mlp.up_proj.kernel[1]", "dcp": "layers.1.mlp.up_proj.weight"}
    name = own.get(kind, "model.layers.1.mlp.up_proj.weight")
    tensors = load_file(bad / SINGLE)
    tensors["model.embed_tokens.weight"][290, 3] = 0
    source = shutil.copytree(bad, tmp_path / "source")
    save_file(tensors, source / SINGLE, {"format": "pt"})
    path = tmp_path / ("copy.pt" if kind == "torch" else "copy")
    convert([str(source), str(path), "--to", kind, "--nonfinite", "keep"])
    with pytest.raises(ConfigError) as error:
        convert([str(path), str(tmp_path / "other"), "--to", "hf"])
    at = "[2, 1]" if kind == "orbax" else "[1, 2]"
    message = f": tensor {name} has 3 of 384 values that are NaN or infinite, the first -inf at {at}. "
    assert message in str(error.value)
    for side in SIDES:
        refused = train(side, "--mesh=1x1", "--steps=1", "--init", path)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr


@pytest.mark.parametrize(
    ("side", "kind", "name"),
    [pytest.param("jaxdist", "orbax", "embedding", marks=pytest.mark.slow), ("torch_ref", "dcp", "weight")],
)
def test_moments_are_refused_and_the_advice_works(
    side: str, kind: str, name: str, run: Path, train: Train, tmp_path: Path
) -> None:
    """Refused by convert and on a resume, also under `skip`."""
    file = tmp_path / "run.pt"
    convert([str(run), str(file)])
    content = torch.load(file, weights_only=True)
    content["optimizer"]["state"][0]["exp_avg"][7, 1] = float("inf")
    content["optimizer"]["state"][1]["exp_avg_sq"][0, 2:4] = -1e-9
    torch.save(content, file)
    message = r"weight \(exp_avg\) has 1 of 4,800 .* inf at \[7, 1\]; so have \S+ \(exp_avg_sq\)\. .*--nonfinite keep"
    with pytest.raises(ConfigError, match=message):
        convert([str(file), str(tmp_path / "bad"), "--to", kind])
    convert([str(file), str(tmp_path / "bad"), "--to", kind, "--nonfinite", "keep"])
    given = "--mesh=1x1", "--steps=3", "--train.nonfinite=skip"
    refused = train(side, *given, "--output", tmp_path / "bad", "--resume")
    assert refused.returncode == 2, refused.stderr
    message = rf"embed\.{name} \(exp_avg\) has 1 of 4,800 .* inf at \[7, 1\]; so have layers\.\S+ \(exp_avg_sq\)\."
    assert re.search(message, refused.stderr), refused.stderr
    advised = re.search(r"(--init \S+) with another --output", refused.stderr)
    assert advised
    done = train(side, *given, *advised[1].split(), "--output", tmp_path / "other")
    assert done.returncode == 0, done.stderr


def test_second_moments_below_zero_are_refused_and_the_advice_works(run: Path, tmp_path: Path) -> None:
    """`zero` refuses them too, as first moments would be divided by them; -0 is accepted."""
    file = tmp_path / "run.pt"
    convert([str(run), str(file)])
    content = torch.load(file, weights_only=True)
    content["optimizer"]["state"][1]["exp_avg_sq"][0, 1:4] = torch.tensor([-0.0, -1e-9, -2.0])
    torch.save(content, file)
    message = r"\(exp_avg_sq\) has 2 of \d+ values that are below zero, .* the first -\S+e-10 at \[0, 2\]\. .*--to hf"
    for asked in "refuse", "zero":
        with pytest.raises(ConfigError, match=message):
            convert([str(file), str(tmp_path / "bad"), "--to", "dcp", "--nonfinite", asked])
    assert [*tmp_path.iterdir()] == [file]
    convert([str(file), str(tmp_path / "weights"), "--to", "hf"])
    convert([str(file), str(tmp_path / "bad"), "--to", "dcp", "--nonfinite", "keep"])


@pytest.mark.parametrize(
    "name", ["w (exp_avg_sq)", "w (row_var)", "w (variance)", "norm.running_var", "w (exp_avg)", "w"]
)
def test_which_tensors_are_squares(name: str) -> None:
    """The two readers agree."""
    array = np.array([0.0, -0.0, 3.0, -1.5, -np.float64(5e-324)])
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        found = bad_values(array.astype(dtype), name)
        assert (found and found.index) == ((3,) if name not in ("w (exp_avg)", "w") else None)
    assert finite.bad_values(name, torch.from_numpy(array)) == bad_values(array, name)


@pytest.mark.parametrize("there", [None, "float32", "float16"])
def test_overflow_in_a_narrower_dtype_is_not_blamed_on_the_file(there: str | None) -> None:
    path, found = Path("folder"), {"w": BadValues(1, 16, np.inf, (5,)), "v": BadValues(2, 3, -np.inf, (0,))}
    error = str(nonfinite_weights_error(path, found, "float16", there))
    assert error.startswith("folder: tensor v has 2 of 3 values that are ")
    assert ("Choose a wider one, as --precision bf16" in error) == (there != "float16")
    nan = found | {"x": BadValues(1, 1, np.nan, ())}  # no cast makes NaN
    assert "--nonfinite zero" in str(nonfinite_weights_error(path, nan, "float16", "float32"))


def test_a_weight_beyond_float16_asks_for_a_wider_dtype(run: Path, tmp_path: Path, train: Train) -> None:
    convert([str(run), str(tmp_path / "large"), "--to", "hf"])
    tensors = load_file(tmp_path / "large" / SINGLE)
    tensors["model.norm.weight"][5] = 1e5
    save_file(tensors, tmp_path / "large" / SINGLE, {"format": "pt"})
    for side, name in zip(SIDES, ("norm.scale", "norm.weight"), strict=True):
        refused = train(side, "--mesh=1x1", "--steps=0", "--init", tmp_path / "large", "--precision=16-true")
        assert refused.returncode == 2 and f"tensor {name} has 1 of 16 values that are infinite" in refused.stderr
        assert "Choose a wider one, as --precision bf16" in refused.stderr and "Warning" not in refused.stderr
    done = train("torch_ref", "--mesh=1x1", "--steps=1", "--init", tmp_path / "large", "--precision=bf16")
    assert done.returncode == 0, done.stderr


COUNTS: list[tuple[tuple[float, float | None, float | None], str]] = [
    ((-1, None, None), "-1 updates after 2 steps"),
    ((3, None, None), "3 updates after 2 steps"),
    ((2, np.nan, 0), "a loss scale of nan"),
    ((2, 0.0, -4), "a loss scale of 0 and -4 steps in a row"),
]


@pytest.mark.parametrize(("counts", "message"), COUNTS)
def test_impossible_counts_are_refused(counts: tuple[float, float | None, float | None], message: str) -> None:
    check_counts(Path("run/2"), 2, 0, 1.0, 0)
    with pytest.raises(ConfigError, match=f"checkpoint run/2 has {message}"):
        check_counts(Path("run/2"), 2, *counts)


def test_convert_refuses_keeps_or_writes_zeros(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=WHAT):
        convert([str(bad), str(tmp_path / "a"), "--to", "hf"])
    assert not list(tmp_path.iterdir())
    convert([str(bad), str(tmp_path / "a"), "--to", "hf", "--nonfinite", "keep"])
    assert torch.equal(*(load_file(p / SINGLE)["model.embed_tokens.weight"].isnan() for p in (bad, tmp_path / "a")))
    convert([str(bad), str(tmp_path / "b"), "--to", "hf", "--nonfinite", "zero"])
    assert "up_proj.weight has 3 of 384 values that are NaN or infinite, the first -inf at [1, 2], written as 0" in (
        capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="--verify with --nonfinite zero"):
        convert([str(bad), str(tmp_path / "c"), "--nonfinite", "zero", "--verify"])


def test_a_narrower_dtype_that_overflows_names_the_dtypes_that_hold_all(run: Path, tmp_path: Path) -> None:
    source = tmp_path / "large"
    convert([str(run), str(source), "--to", "hf"])
    tensors = load_file(source / SINGLE)
    tensors["model.norm.weight"][5] = 1e5
    save_file(tensors, source / SINGLE, {"format": "pt"})
    message = r"model\.norm\.weight has values beyond its range, 1 of 16, the first 100000 at \[5\]; choose float32 or "
    with pytest.raises(ConfigError, match=f"--dtype float16: parameter {message}bfloat16 or float64"):
        convert([str(source), str(tmp_path / "narrow"), "--to", "hf", "--dtype", "float16"])
    convert([str(source), str(tmp_path / "narrow"), "--to", "hf", "--dtype", "bfloat16"])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_where_the_first_is(dtype: Any, value: float) -> None:
    """Includes the last block, a transposed array and a scalar; the largest finite number is accepted."""
    array = np.zeros((3, BLOCK // 2), dtype)
    array[0, 0] = ml_dtypes.finfo(dtype).max
    assert bad_values(array) is None and bad_values(np.ones((), dtype)) is None
    array[2, -1] = array[1, 7] = value
    found = bad_values(array)
    assert found and (found.count, found.size, found.index) == (2, array.size, (1, 7))
    assert np.array_equal(found.value, value, equal_nan=True)
    assert (found := bad_values(array.T)) and found.index == (7, 1)
    assert (found := bad_values(np.array(value, dtype))) and found.index == ()
    assert (found := finite.bad_values("w", torch.from_numpy(array.astype(np.float64)))) and found.index == (1, 7)
    assert bad_values(np.ones(3, np.int64)) is None
