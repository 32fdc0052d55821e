"""Requested dtypes, and dtypes that differ within one array."""

import importlib
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.stream import cast

torch = pytest.importorskip("torch")
importlib.import_module("jaxdist.convert.kinds.torch_files")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def nearest(number: float) -> float:
    """Nearest bfloat16 to a number, ties to even, by exact arithmetic."""
    bits = int(np.asarray(abs(number), BFLOAT16).view(np.uint16))
    around = [(float(np.asarray(b, np.uint16).view(BFLOAT16)), b & 1) for b in range(max(0, bits - 1), bits + 2)]
    return math.copysign(min((abs(value - abs(number)), odd, value) for value, odd in around)[2], number)


def test_float64_is_rounded_to_bfloat16_once() -> None:
    """1 + 2^-8 + 2^-40 is above the middle of 1 and 1 + 2^-7; by way of float32 it would be that middle and round down
    to even."""
    above, below = 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40
    random = np.random.default_rng(0)
    middles = 1 + (2 * random.integers(0, 64, 1000) + 1) * 2**-8
    numbers = np.concatenate([[above, -above, below, -below], middles, middles + 2**-40, middles - 2**-40])
    numbers = np.concatenate([numbers, random.normal(size=1000), numbers * 2.0**-130, numbers * 2.0**100])
    found = cast("a", numbers, BFLOAT16).astype(np.float64)
    assert (found[0], found[2]) == (1 + 2**-7, 1 + 2**-7)
    assert np.array_equal(found, [nearest(number) for number in numbers])


def test_values_that_are_not_finite_stay_so() -> None:
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, -5e-324])
    found = cast("a", special, BFLOAT16).astype(np.float64)
    assert np.array_equal(found, [np.nan, np.nan, np.inf, -np.inf, 0, 0, 0, 0], equal_nan=True)
    assert np.array_equal(np.signbit(found[2:]), np.signbit(special[2:]))
    with pytest.raises(ConfigError, match="has values beyond its range"):
        cast("a", np.array([1e39]), BFLOAT16)


def test_layers_whose_moments_differ(tmp_path: Path) -> None:
    """--dtype applies to weights alone; the message's fix works."""
    file = written(tmp_path / "a.pt", "torch", content_of(MODELS["Qwen2ForCausalLM"]))
    tree = torch.load(file, weights_only=True)
    names = [name for group in tree["optimizer"]["param_groups"] for name in group["param_names"]]
    entry = tree["optimizer"]["state"][names.index("model.layers.0.mlp.up_proj.weight")]
    entry["exp_avg"] = entry["exp_avg"].bfloat16()
    torch.save(tree, file)
    for more in ([], ["--dtype", "float32"]):
        with pytest.raises(
            ConfigError, match=r"exp_avg layers.mlp.up_proj.kernel.*; --dtype is of weights alone: --to hf"
        ):
            main([str(file), str(tmp_path / "run"), *more])
    main([str(file), str(tmp_path / "hf"), "--to", "hf"])
