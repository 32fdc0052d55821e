"""A plugin's family converts from and to its own names, by the tables and config.json of its row."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdist import Family, register_family
from jaxdist.config import ConfigError, Decoder
from jaxdist.config.registry import FAMILIES
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import draw, run_of, same
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.stream import Conversion
from jaxdist.families.llama.config import Llama
from jaxdist.formats.hf import model_types, read_model, to_settings
from jaxdist.formats.hf_decisions import DECODER, HuggingFace, ModelType, read
from jaxdist.formats.hf_keys import COUNT, FLAG, Key, Settings, values
from jaxdist.formats.naming import family_of
from jaxdist.formats.tables import OWN, Table, embedding, linear, norm

pytest.importorskip("torch")


class Toy(Decoder):
    """GPT-2's model under other names and keys."""

    family: Literal["toy"]
    gelu: ClassVar[str] = "tanh"
    bias: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = True
    mlp_bias: ClassVar[bool] = True

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kv_heads(self) -> int:
        return self.heads


PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
TABLES = {
    "toy": Table(
        [
            *embedding("embed", "tokens"),
            *embedding("positions", "places"),
            *norm("layers.attention_norm", "blocks.{layer}.first"),
            *[row for a, b in PROJECTIONS.items() for row in linear(f"layers.attention.{a}", f"blocks.{{layer}}.{b}")],
            *norm("layers.mlp_norm", "blocks.{layer}.second"),
            *linear("layers.mlp.up_proj", "blocks.{layer}.wide"),
            *linear("layers.mlp.down_proj", "blocks.{layer}.narrow"),
            *norm("norm", "last"),
            *linear("lm_head", "scores"),
        ],
        head="scores.weight",
    )
}
KEYS = {
    "layers": Key("depth", COUNT), "dim": Key("width", COUNT), "heads": Key("heads", COUNT),
    "hidden": Key("inner", COUNT), "vocab": Key("tokens", COUNT), "positions": Key("places", COUNT),
    "tied": Key("tied", FLAG, False),
}  # fmt: skip


def written(model: Any) -> Settings:
    return {"model_type": "toy", **{key.name: getattr(model, field) for field, key in KEYS.items()}}


HUGGINGFACE = HuggingFace(
    {"toy": ModelType("ToyModel", {**DECODER, **read(KEYS)}, partial(values, keys=KEYS), {"heads": "heads"})}, written
)
TOY = Toy(family="toy", layers=2, dim=8, heads=2, hidden=12, vocab=11, positions=16)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers the family with some fields of its row, for one test."""
    assert "llama" in FAMILIES  # loads the built-in families before the copy
    for name in ("_rows", "_owners"):
        monkeypatch.setattr(FAMILIES, name, dict(getattr(FAMILIES, name)))
    return lambda **pieces: register_family(Family("toy", Toy, "jaxdist.families.gpt2.model:GPT2", **pieces))


def convert(*argv: object) -> None:
    main([*map(str, argv)])


def ours(path: Path, kind: str) -> dict[str, np.ndarray]:
    content = KINDS[kind].format.read_content(path)
    return {name: array for _, name, array in Conversion(content, OWN).stream("parameters")}


@pytest.mark.long
def test_it_converts_from_and_to_its_own_names(
    registered: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    registered(tables=TABLES, huggingface=HUGGINGFACE)
    run, weights = run_of(tmp_path / "run", TOY), draw(TOY)
    for kind in ("hf", "torch", "dcp"):
        there = tmp_path / (f"{kind}.pt" if kind == "torch" else kind)
        convert(run, there, "--to", kind, "--verify")
        convert(there, tmp_path / f"back from {kind}", "--to", "orbax", "--verify")
        assert same(ours(tmp_path / f"back from {kind}", "orbax"), weights), kind
    assert "transformers knows no model_type of" in capsys.readouterr().out
    tensors = load_file(tmp_path / "hf/model.safetensors")
    assert np.array_equal(tensors["blocks.1.query.weight"], weights["layers.attention.q_proj.kernel"][1].T)
    assert json.loads((tmp_path / "hf/config.json").read_text())["width"] == 8
    assert read_model(tmp_path / "hf") == TOY
    convert(tmp_path / "hf", "--inspect")
    assert "family toy" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"width = 'x'; give a whole number"):
        settings = json.loads((tmp_path / "hf/config.json").read_text()) | {"width": "x"}
        (tmp_path / "hf/config.json").write_text(json.dumps(settings))
        read_model(tmp_path / "hf")


@pytest.mark.parametrize(
    ("pieces", "kind", "expected"),
    [
        ({"tables": TABLES}, "hf", "registers it without huggingface, so there is no config.json for it; "),
        ({}, "torch", "registers it without tables, so its tensors have no names in other formats; "),
        ({}, "dcp", "registers it without tables, so its tensors have no names in other formats; "),
    ],
)
def test_a_piece_that_is_missing_is_named(
    pieces: dict[str, Any], kind: str, expected: str, registered: Callable[..., None], tmp_path: Path
) -> None:
    """One message names the family, who registered it, the field, and what works without it, which does."""
    registered(**pieces)
    run = run_of(tmp_path / "run", TOY)
    with pytest.raises(ConfigError) as error:
        convert(run, tmp_path / "a.pt" if kind == "torch" else tmp_path / "a", "--to", kind)
    message = str(error.value)
    assert message.startswith(f"model.family = toy: {__name__} ") and expected in message, message
    assert message.endswith("or keep its weights as an Orbax checkpoint")
    convert(run, tmp_path / "b", "--to", "orbax")
    assert same(ours(tmp_path / "b", "orbax"), draw(TOY))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({"tables": {"toy": [1]}}, r"tables = \{'toy': \[1\]\}; give a mapping of namings to \S+Table"),
        ({"tables": TABLES, "huggingface": "nowhere:HERE"}, "'nowhere:HERE': No module named 'nowhere'"),
        ({"tables": TABLES, "huggingface": written}, r"huggingface = <function .*; give an instance of \S+HuggingFace"),
    ],
)
def test_a_piece_of_another_kind_is_refused(
    pieces: dict[str, Any], message: str, registered: Callable[..., None], tmp_path: Path
) -> None:
    registered(**pieces)
    run = run_of(tmp_path / "run", TOY)
    with pytest.raises(ConfigError, match=message):
        convert(run, tmp_path / "hf", "--to", "hf")


def test_a_model_type_that_another_family_reads_is_refused(registered: Callable[..., None]) -> None:
    registered(tables=TABLES, huggingface=HuggingFace({"gpt2": HUGGINGFACE.types["toy"]}, written))
    message = (
        r"family 'toy' of plugin '.*' reads a config.json of model_type 'gpt2', which the family 'gpt2' reads; give"
    )
    with pytest.raises(ConfigError, match=message):
        to_settings(TOY, "float32")
    assert model_types()["gpt2"][0] == "gpt2"


def raising(*_: object) -> Settings:
    raise KeyError("width")


TYPE, made_of = HUGGINGFACE.types["toy"], cast(Any, HuggingFace)
BROKEN: dict[str, tuple[Any, str]] = {
    "absent": ("nowhere:HERE", "huggingface = 'nowhere:HERE': No module named 'nowhere'"),
    "a class": (HuggingFace, "huggingface = <class .*HuggingFace'>; give an .*HuggingFace"),
    "no table": (made_of([TYPE], written), r"huggingface.types = \[ModelType\(.*; give .*Mapping"),
    "no type": (
        made_of({"toy": "ToyModel"}, written),
        r"huggingface.types\['toy'\] = 'ToyModel'; give an .*ModelType",
    ),
    "a reader that fails": (
        HuggingFace({"toy": TYPE._replace(read=raising)}, raising),
        rf"the family 'toy' of plugin '{__name__}': its huggingface fails, KeyError: 'width' \(.*, line \d+\);",
    ),
}


@pytest.mark.parametrize("piece", BROKEN)
def test_a_broken_piece_breaks_its_own_family_alone(
    piece: str, registered: Callable[..., None], tmp_path: Path
) -> None:
    broken, message = BROKEN[piece]
    registered(tables=TABLES, huggingface=broken)
    ours = Llama(layers=1, dim=8, heads=2, kv_heads=1, head_dim=4, hidden=12, vocab=11, positions=16)
    (tmp_path / "config.json").write_text(json.dumps(to_settings(ours, "float32")))
    assert read_model(tmp_path) == ours
    with pytest.raises(ConfigError, match=message):
        to_settings(TOY, "float32")
    (tmp_path / "config.json").write_text(json.dumps(written(TOY)))
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)


def test_broken_tables_leave_other_families_recognized(registered: Callable[..., None]) -> None:
    registered(tables={"toy": [1]})
    assert family_of(["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"]) == "llama"


def test_inspection_names_a_family_with_broken_tables(
    registered: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message goes to standard error with --json; a family without tables is not reported."""
    registered(tables={"toy": [1]})
    run = run_of(tmp_path / "run", TOY)
    message = (
        rf"the names of family toy are not recognized: model\.family = toy: {__name__} registers it with tables = "
    )
    convert(run, "--inspect")
    assert re.search(message, capsys.readouterr().out.replace("\n", " "))
    convert(run, "--inspect", "--json")
    out, err = capsys.readouterr()
    assert json.loads(out)["family"] and re.search(message, err.replace("\n", " "))
    registered()
    convert(run, "--inspect")
    assert "not recognized" not in capsys.readouterr().out
