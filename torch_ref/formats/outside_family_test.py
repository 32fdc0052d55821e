"""torch_ref reads a plugin family's weights by the tables of its row in jaxdist."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jaxdist.convert.convert_test import draw, saved
from jaxdist.convert.outside_family_test import HUGGINGFACE, TABLES, TOY, registered
from jaxdist.formats.hf import read_model
from torch_ref import Family, register_family
from torch_ref.families.registry import FAMILIES
from torch_ref.formats.hf import Weights

__all__ = ["registered"]  # a fixture


def test_weights_under_names_of_its_own(
    registered: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "llama" in FAMILIES  # loads the built-in families before the copy
    for name in ("_rows", "_owners"):
        monkeypatch.setattr(FAMILIES, name, dict(getattr(FAMILIES, name)))
    registered(tables=TABLES, huggingface=HUGGINGFACE)
    register_family(Family("toy", "torch_ref.families.gpt2:GPT2"))
    folder, ours = saved(tmp_path / "hf", TOY), draw(TOY)
    weights = Weights(folder, read_model(folder))
    weights.check()
    for parameter in ("q_proj", "v_proj"):
        found = weights.read(f"layers.1.attention.{parameter}.weight")
        assert torch.equal(found, torch.from_numpy(ours[f"layers.attention.{parameter}.kernel"][1].T))
    assert torch.equal(weights.read("positions.weight"), torch.from_numpy(ours["positions.embedding"]))
