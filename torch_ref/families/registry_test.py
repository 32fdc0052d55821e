"""A row of torch's registry gives tensor parallel styles and blocks; wrong rows are refused."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from jaxdist.config import ConfigError, Model
from jaxdist.config.registry import Owner
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.families.mixtral.config import Mixture
from torch_ref.families.models import blocks, build
from torch_ref.families.registry import FAMILIES, STYLES, Family
from torch_ref.training.parallelize import tensor_parallel

SMALL: dict[str, Any] = {"layers": 2, "dim": 8, "heads": 2, "hidden": 8, "vocab": 8, "positions": 8}


class Odd(nn.Module):
    """A model whose blocks have module names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(family="odd")
        self.layers = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}) for _ in range(2))


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Any:
    """odd(**fields): the model of a plugin's family `odd`, registered with these fields."""
    len(FAMILIES)  # loads the built-in families

    def built(**pieces: Any) -> nn.Module:
        monkeypatch.setitem(FAMILIES._rows, "odd", Family("odd", Odd, **pieces))
        monkeypatch.setitem(FAMILIES._owners, "odd", Owner("one"))
        return Odd()

    return built


@pytest.mark.parametrize(
    "model",
    [
        Llama(**SMALL, kv_heads=2, qk_norm=True),
        GPT2(**SMALL, family="gpt2"),
        Mixture(**SMALL, kv_heads=2, family="mixtral"),
    ],
    ids=lambda model: model.family,
)
def test_each_matrix_of_our_families_has_a_style(model: Model) -> None:
    with torch.device("meta"):
        modules = build(model).named_modules()
    matrices = [name for name, module in modules if any(p.ndim > 1 for p in module.parameters(recurse=False))]
    assert len(matrices) > 10 and FAMILIES[model.family].unplanned(matrices) == []


def test_matrices_without_a_style_are_refused_before_they_are_left_whole(odd: Any) -> None:
    mesh = cast(Any, SimpleNamespace(size=lambda: 4))
    with pytest.raises(ConfigError, match=r"^the family of torch_ref 'odd' of plugin 'one': tensor has no style for l"):
        tensor_parallel(odd(tensor={"layers.*.norm": "norm"}), mesh, False)
    for tensor in ({"layers.*.mix": "column"}, {"layers.*.mix": ""}, {"layers.*": ""}):
        assert odd(tensor=tensor) and FAMILIES["odd"].unplanned(["layers.0.mix", "layers.11.mix"]) == []


def test_styles() -> None:
    with pytest.raises(ConfigError, match=r"^family 'odd' of torch_ref: tensor\['mix'\] = 'columns' is no style; ch"):
        Family("odd", Odd, tensor={"mix": "columns"})
    assert set(FAMILIES["llama"].plan.values()) <= set(STYLES)


def test_blocks_that_no_module_is_named_as(odd: Any) -> None:
    assert len(blocks(odd())) == 2
    with pytest.raises(ConfigError, match=r"^the family of torch_ref 'odd' of plugin 'one': no module has a name as b"):
        blocks(odd(blocks="h.*"))
