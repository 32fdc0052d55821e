"""Suggested mappings are right or marked as unsure; arrays and files survive; errors name the fix."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.entries import shapes_of
from jaxdist.convert.mappings import atoms
from jaxdist.convert.mappings.mapping import KeyMapping, Module, Row, Shape, Shapes
from jaxdist.convert.mappings.suggest import Suggestion, suggest
from jaxdist.convert.mappings.transforms import TRANSFORMS, as_ours, fitting, result
from jaxdist.families.mixtral.config import Mixture
from jaxdist.formats.hf import to_settings
from jaxdist.formats.tables import HUGGINGFACE, table_of

D, H, C, F, L = 12, 3, 4, 20, 3


def vit(names: Mapping[str, str], layer: str, stacked: bool = False) -> dict[str, Shape]:
    """A Flax ViT's parameters, sorted as a pytree is. `names` are the parts that differ between codebases."""
    attention, mlp, first, second, position = (names[k] for k in ("attention", "mlp", "first", "second", "position"))
    dense: dict[str, tuple[Shape, Shape]] = {f"{attention}.{q}": ((D, H, C), (H, C)) for q in ("query", "key", "value")}
    dense |= {f"{attention}.out": ((H, C, D), (D,)), f"{mlp}.Dense_0": ((D, F), (F,))}
    dense |= {f"{mlp}.Dense_1": ((F, D), (D,))}
    block: dict[str, Shape] = {f"{n}.{kind}": (D,) for n in (first, second) for kind in ("scale", "bias")}
    for name, (kernel, bias) in dense.items():
        block |= {f"{name}.kernel": kernel, f"{name}.bias": bias}
    if stacked:
        found = {f"{layer}.{name}": (L, *shape) for name, shape in block.items()}
    else:
        found = {f"{layer}_{i}.{name}": shape for i in range(L) for name, shape in block.items()}
    found |= {"cls": (1, 1, D), position: (1, 5, D), "embedding.kernel": (4, 4, 3, D), "embedding.bias": (D,)}
    found |= {"Transformer.encoder_norm.scale": (D,), "Transformer.encoder_norm.bias": (D,)}
    return dict(sorted((found | {"head.kernel": (D, 5), "head.bias": (5,)}).items()))


BIG_VISION = {
    "attention": "MultiHeadDotProductAttention_0", "mlp": "MlpBlock_0", "first": "LayerNorm_0",
    "second": "LayerNorm_1", "position": "pos_embedding",
}  # fmt: skip
ORIGINAL = {
    "attention": "MultiHeadDotProductAttention_1", "mlp": "MlpBlock_3", "first": "LayerNorm_0",
    "second": "LayerNorm_2", "position": "Transformer.posembed_input.pos_embedding",
}  # fmt: skip
VITS = {
    "big_vision": (BIG_VISION, vit(BIG_VISION, "Transformer.encoderblock")),
    "big_vision, scanned": (BIG_VISION, vit(BIG_VISION, "Transformer.encoderblock", stacked=True)),
    "vision_transformer": (ORIGINAL, vit(ORIGINAL, "Transformer.encoderblock")),
}


def truth(names: Mapping[str, str], block: str) -> dict[str, tuple[str, str]]:
    """Theirs -> (ours, transform), for every tensor of transformers' ViT."""
    rows = {
        "vit.embeddings.cls_token": ("cls", "same"),
        "vit.embeddings.position_embeddings": (names["position"], "same"),
        "vit.embeddings.patch_embeddings.projection.weight": ("embedding.kernel", "conv2d"),
        "vit.embeddings.patch_embeddings.projection.bias": ("embedding.bias", "same"),
        "vit.layernorm.weight": ("Transformer.encoder_norm.scale", "same"),
        "vit.layernorm.bias": ("Transformer.encoder_norm.bias", "same"),
        "classifier.weight": ("head.kernel", "transpose"),
        "classifier.bias": ("head.bias", "same"),
    }
    for i in range(L):
        ours, theirs = block.format(i), f"vit.layers.{i}"
        for q, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            there, here = f"{theirs}.attention.{q}_proj", f"{ours}.{names['attention']}.{name}"
            rows[f"{there}.weight"] = (f"{here}.kernel", "heads_in" if q == "o" else "heads_out")
            rows[f"{there}.bias"] = (f"{here}.bias", "same" if q == "o" else "heads_bias")
        for j, fc in enumerate(("fc1", "fc2")):
            rows[f"{theirs}.mlp.{fc}.weight"] = (f"{ours}.{names['mlp']}.Dense_{j}.kernel", "transpose")
            rows[f"{theirs}.mlp.{fc}.bias"] = (f"{ours}.{names['mlp']}.Dense_{j}.bias", "same")
        for norm, name in (("layernorm_before", "first"), ("layernorm_after", "second")):
            rows[f"{theirs}.{norm}.weight"] = (f"{ours}.{names[name]}.scale", "same")
            rows[f"{theirs}.{norm}.bias"] = (f"{ours}.{names[name]}.bias", "same")
    return rows


@pytest.fixture(scope="module")
def torch_vit() -> dict[str, Shape]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=D, num_hidden_layers=L, num_attention_heads=H, intermediate_size=F, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    return shapes(transformers.ViTForImageClassification(config))


def shapes(module: Any) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def found_in(suggestion: Suggestion, ours: Shapes) -> dict[str, tuple[str, str]]:
    return {p.theirs: (p.ours, p.row.transform) for p in suggestion.mapping.pairs(ours)}


def wrong_and_sure(suggestion: Suggestion, ours: Shapes, right: Mapping[str, tuple[str, str]]) -> list[str]:
    """Tensors of theirs whose row is wrong but not marked as unsure."""
    sure = [p for p in suggestion.mapping.pairs(ours) if p.row not in suggestion.unsure]
    return [p.theirs for p in sure if right.get(p.theirs) != (p.ours, p.row.transform)]


class TestSuggestion:
    @pytest.mark.parametrize("name", VITS)
    def test_vit(self, name: str, torch_vit: Shapes, tmp_path: Path) -> None:
        """Three codebases' names of a Flax ViT: mapped completely, with nothing to edit or confirm."""
        names, ours = VITS[name]
        suggestion = suggest(ours, torch_vit)
        block = "Transformer.encoderblock" + ("" if "scanned" in name else "_{}")
        assert found_in(suggestion, ours) == truth(names, block)
        assert not suggestion.unsure and len(suggestion.mapping.rows) == 24
        suggestion.save(tmp_path / "mapping.toml")
        mapping = KeyMapping.load(tmp_path / "mapping.toml")
        assert mapping.rows == suggestion.mapping.rows
        mapping.check(ours, torch_vit)

    @pytest.mark.parametrize("name", [n for n, model in MODELS.items() if not isinstance(model, Mixture)])
    def test_our_families(self, name: str) -> None:
        """Wrong rows, such as GPT-2's fused projections, are marked as unsure."""
        transformers = pytest.importorskip("transformers")
        model, class_name = MODELS[name], name.split()[0]
        config_class = class_name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
        config = getattr(transformers, config_class)(**to_settings(model, "float32"))
        theirs, ours = shapes(getattr(transformers, class_name)(config)), shapes_of(model)
        right = {
            theirs_name: (row.ours[0], "transpose" if row.transpose else "same")
            for row in table_of(HUGGINGFACE, model).rows_of(ours)
            for theirs_name in row.names(model.layers)
            if len(row.ours) == 1
        }
        suggestion = suggest(ours, theirs)
        assert wrong_and_sure(suggestion, ours, right) == []
        joined = {name for name in theirs if "c_attn" in name} | ({"lm_head.weight"} if model.tied else set())
        mapped = found_in(suggestion, ours)
        assert {name: mapped.get(name) for name in right.keys() - joined if "c_proj.weight" not in name} == {
            name: right[name] for name in right.keys() - joined if "c_proj.weight" not in name
        }

    def test_square_matrices(self) -> None:
        """Dense kernels are transposed, embeddings are not, and a name that suggests neither is unsure."""
        ours = {"a.kernel": (6, 6), "embed.embedding": (6, 6), "b.w": (6, 6)}
        theirs = {"a.weight": (6, 6), "embed.weight": (6, 6), "b.weight": (6, 6)}
        suggestion = suggest(ours, theirs)
        transforms = {row.ours: row.transform for row in suggestion.mapping.rows}
        assert transforms == {"a.kernel": "transpose", "embed.embedding": "same", "b.w": "transpose"}
        assert {row.ours for row in suggestion.unsure} == {"b.w"}

    def test_square_matrices_follow_the_others(self) -> None:
        """A square kernel follows others that are (in, out) in torch too, like Conv1D's, marked as unsure."""
        ours = {"up.kernel": (4, 6), "out.kernel": (4, 4)}
        theirs = {"up.weight": (4, 6), "out.weight": (4, 4)}
        suggestion = suggest(ours, theirs)
        assert [row.transform for row in suggestion.mapping.rows] == ["same", "same"]
        assert [row.ours for row in suggestion.unsure] == ["out.kernel"]
        mixed = suggest(ours | {"head.kernel": (4, 9)}, theirs | {"head.weight": (9, 4)})
        assert [row.ours for row in mixed.unsure] == ["out.kernel"]

    def test_indistinguishable_tensors_are_unsure(self) -> None:
        suggestion = suggest({"x.bias": (3,), "y.bias": (3,)}, {"p.bias": (3,), "q.bias": (3,)})
        assert len(suggestion.unsure) == len(suggestion.mapping.rows) == 2
        assert "fits as well" in next(iter(suggestion.unsure.values()))

    def test_numbers_agree_in_order(self) -> None:
        """Equal shapes, counted from 0 here and from 1 there."""
        ours = {f"Dense_{i}.kernel": (6, 6) for i in range(3)}
        theirs = {f"fc{i}.weight": (6, 6) for i in (1, 2, 3)}
        assert {row.ours[6]: row.theirs[2] for row in suggest(ours, theirs).mapping.rows} == {
            "0": "1",
            "1": "2",
            "2": "3",
        }

    def test_tensors_without_a_counterpart(self, tmp_path: Path) -> None:
        suggestion = suggest({"a.kernel": (2, 3), "extra.kernel": (7, 5)}, {"a.weight": (3, 2), "pool.weight": (8, 8)})
        assert (suggestion.ours_left, suggestion.theirs_left) == (("extra.kernel",), ("pool.weight",))
        suggestion.save(tmp_path / "m.toml")
        text = (tmp_path / "m.toml").read_text()
        assert "# in no row, ours: extra.kernel\n" in text and "# in no row, theirs: pool.weight\n" in text
        with pytest.raises(ConfigError, match=r"ours: extra.kernel \(1 in all\) in no row"):
            KeyMapping.load(tmp_path / "m.toml").check(
                {"a.kernel": (2, 3), "extra.kernel": (7, 5)}, {"a.weight": (3, 2)}
            )


EXAMPLES = {
    "same": (5, 4), "transpose": (5, 4), "conv1d": (3, 5, 4), "conv2d": (3, 2, 5, 4), "heads_out": (5, 2, 3),
    "heads_bias": (2, 3), "heads_in": (2, 3, 5), "heads_first": (2, 5, 3), "reshape": (1, 5, 4),
    "heads_out_pairs": (5, 2, 4), "outputs_first": (2, 3, 5), "outputs_grouped": (2, 2, 3, 5), "inputs_last": (5, 2, 3),
}  # fmt: skip


def to_theirs(name: str, array: np.ndarray) -> np.ndarray:
    return KeyMapping((Row("a", "b", name, (5, 4) if name == "reshape" else ()),)).to_theirs({"a": array})["b"]


class TestTransforms:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
    @pytest.mark.parametrize("name", TRANSFORMS)
    def test_there_and_back_to_the_bit(self, name: str, dtype: Any) -> None:
        shape = EXAMPLES[name]
        array = np.random.default_rng(0).normal(size=shape).astype(dtype)
        array.flat[0] = np.nan
        there = to_theirs(name, array)
        assert there.flags.c_contiguous and there.shape == ((5, 4) if name == "reshape" else result(name, shape))
        back = as_ours(name, there, shape)
        assert back.dtype == array.dtype and back.shape == TRANSFORMS[name].seen(shape)
        assert back.tobytes() == array.tobytes()
        if name not in ("same", "reshape", "heads_bias", "outputs_first", "outputs_grouped", "inputs_last"):
            assert there.tobytes() != array.tobytes()

    def test_transforms_agree_with_torch(self) -> None:
        """Each transform against torch's operation."""
        torch = pytest.importorskip("torch")
        random = np.random.default_rng(0)

        def there(name: str) -> Any:
            return torch.from_numpy(to_theirs(name, arrays[name]))

        arrays = {name: random.normal(size=shape) for name, shape in EXAMPLES.items()}
        x = random.normal(size=(2, 5))
        linear = torch.nn.functional.linear
        for name, spec in (("transpose", "bi,io->bo"), ("heads_out", "bd,dhc->bhc"), ("heads_first", "bd,hdc->bhc")):
            wanted = np.einsum(spec, x, arrays[name]).reshape(2, -1)
            np.testing.assert_allclose(linear(torch.from_numpy(x), there(name)), wanted, rtol=1e-12)
        y = random.normal(size=(2, 2, 3))
        wanted = np.einsum("bhc,hcd->bd", y, arrays["heads_in"])
        np.testing.assert_allclose(linear(torch.from_numpy(y.reshape(2, 6)), there("heads_in")), wanted, rtol=1e-12)
        signal, image = random.normal(size=(2, 3, 5)), random.normal(size=(2, 3, 2, 5))
        one = torch.nn.functional.conv1d(torch.from_numpy(np.moveaxis(signal, -1, 1).copy()), there("conv1d"))
        np.testing.assert_allclose(one[:, :, 0], np.einsum("bwi,wio->bo", signal, arrays["conv1d"]), rtol=1e-12)
        two = torch.nn.functional.conv2d(torch.from_numpy(np.moveaxis(image, -1, 1).copy()), there("conv2d"))
        np.testing.assert_allclose(two[:, :, 0, 0], np.einsum("bhwi,hwio->bo", image, arrays["conv2d"]), rtol=1e-12)

        assert np.array_equal(to_theirs("heads_bias", arrays["heads_bias"]), arrays["heads_bias"].flatten())

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex128])
    @pytest.mark.parametrize("turned", [False, True])
    def test_copies_in_blocks(self, turned: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A matrix of several blocks and a remainder, either side transposed."""
        monkeypatch.setattr(atoms, "BLOCK", 3 * np.dtype(dtype).itemsize)
        of = np.arange(7 * 11).astype(dtype).reshape(7, 11)
        to = np.zeros((11, 7), dtype)
        atoms.copy(to if turned else to.T, of.T if turned else of)
        assert np.array_equal(to, of.T)

    def test_fitting(self) -> None:
        assert fitting((3, 4), (4, 3)) == ["transpose"] and fitting((4, 4), (4, 4)) == ["same", "transpose"]
        assert fitting((5, 4), (1, 5, 4)) == ["reshape"] and fitting((5, 4), (5, 5)) == []


def draw(ours: Shapes) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in ours.items()}


class TestArrays:
    @pytest.mark.parametrize("name", VITS)
    def test_there_and_back(self, name: str, torch_vit: Shapes) -> None:
        ours = VITS[name][1]
        mapping, parameters = suggest(ours, torch_vit).mapping, draw(ours)
        tensors = mapping.to_theirs(parameters)
        assert {n: t.shape for n, t in tensors.items()} == torch_vit
        back = mapping.to_ours(tensors, ours)
        assert back.keys() == parameters.keys()
        assert all(back[n].tobytes() == parameters[n].tobytes() and back[n].shape == ours[n] for n in ours)

    def test_layers_keep_their_order(self) -> None:
        """Twelve layers: 10 comes after 9, not after 1; stacked and not."""
        mapping = KeyMapping((Row("b_{layer}.w", "l.{layer}.w"), Row("s.w", "s.{layer}.w", "transpose")))
        parameters = {f"b_{i}.w": np.full(2, i) for i in range(12)} | {"s.w": np.arange(12 * 6).reshape(12, 2, 3)}
        tensors = mapping.to_theirs(parameters)
        assert all(tensors[f"l.{i}.w"][0] == i and tensors[f"s.{i}.w"][0, 0] == 6 * i for i in range(12))
        back = mapping.to_ours(tensors, {name: array.shape for name, array in parameters.items()})
        assert all(np.array_equal(back[name], parameters[name]) for name in parameters)

    def test_their_shapes(self) -> None:
        mapping = KeyMapping((Row("q.bias", "q.bias", "heads_bias"), Row("n.scale", "n.{layer}.weight")))
        shapes = mapping.their_shapes({"q.bias": (3, 4), "n.scale": (2, 5)})
        assert shapes == {"q.bias": (12,), "n.0.weight": (5,), "n.1.weight": (5,)}
        with pytest.raises(ConfigError, match=r"q.bias \(3,\) has 1 axes, which transform = 'heads_bias' is not for"):
            mapping.their_shapes({"q.bias": (3,), "n.scale": (2, 5)})

    def test_modules(self, torch_vit: Shapes) -> None:
        ours = VITS["big_vision"][1]
        modules = suggest(ours, torch_vit).mapping.modules(ours)
        block = "Transformer.encoderblock_1"
        assert modules[block] == Module("vit.layers.1", "same", False)
        assert modules[f"{block}.MlpBlock_0"] == Module("vit.layers.1.mlp", "same", False)
        query = modules[f"{block}.MultiHeadDotProductAttention_0.query"]
        assert query == Module("vit.layers.1.attention.q_proj", "heads", False)
        assert modules["embedding"] == Module("vit.embeddings.patch_embeddings.projection", "channels", False)
        assert modules["head"].theirs == "classifier" and "Transformer" not in modules
        scanned = VITS["big_vision, scanned"][1]
        stacked = suggest(scanned, torch_vit).mapping.modules(scanned)
        assert stacked["Transformer.encoderblock.MlpBlock_0"] == Module("vit.layers.{layer}.mlp", "same", True)


GOOD: dict[str, Any] = {"ours": "a.kernel", "theirs": "a.weight", "transform": "transpose"}
OURS: Shapes = {"a.kernel": (2, 3), "b.bias": (4,)}
THEIRS: Shapes = {"a.weight": (3, 2), "b.bias": (4,)}


def file(path: Path, *rows: dict[str, Any], **fields: Any) -> Path:
    import tomli_w

    path.write_text(tomli_w.dumps({"rows": [GOOD | row for row in rows], **fields}))
    return path


FUSED = KeyMapping(
    (
        *(
            Row("layers.kv.w", f"blocks.{{layer}}.{name}_proj.weight", "heads_first", part=i)
            for i, name in enumerate("kv")
        ),
        *(
            Row(f"block_{{layer}}.{name}.kernel", "blocks.{layer}.in_proj_weight", "heads_out", chunk=(i, 3))
            for i, name in enumerate(("query", "key", "value"))
        ),
    )
)
FUSED_OURS = {"layers.kv.w": (L, 2, H, D, C)} | {
    f"block_{i}.{name}.kernel": (D, H, C) for i in range(L) for name in ("query", "key", "value")
}


class TestPieces:
    """One array on one side, several on the other: openpi's kv_einsum, torch's MultiheadAttention."""

    def test_there_and_back_to_the_bit(self, tmp_path: Path) -> None:
        random = np.random.default_rng(0)
        ours = {name: random.normal(size=shape) for name, shape in FUSED_OURS.items()}
        theirs = FUSED.to_theirs(ours)
        assert {name: tensor.shape for name, tensor in theirs.items()} == FUSED.their_shapes(FUSED_OURS)
        for i in range(L):
            k, v = (theirs[f"blocks.{i}.{name}_proj.weight"] for name in "kv")
            assert np.array_equal(v, to_theirs("heads_first", ours["layers.kv.w"][i, 1])) and not np.array_equal(k, v)
            query, key, _ = np.split(theirs[f"blocks.{i}.in_proj_weight"], 3)
            assert np.array_equal(key, to_theirs("heads_out", ours[f"block_{i}.key.kernel"]))
            assert not np.array_equal(query, key)
        FUSED.check(FUSED_OURS, FUSED.their_shapes(FUSED_OURS))
        FUSED.save(tmp_path / "mapping.toml")
        read = KeyMapping.load(tmp_path / "mapping.toml")
        assert read.rows == FUSED.rows
        back = read.to_ours(theirs, FUSED_OURS)
        assert back.keys() == ours.keys() and all(np.array_equal(back[name], ours[name]) for name in ours)

    def test_they_are_suggested(self) -> None:
        """Gemma's attention and MLP as in openpi, scanned, and torch's MultiheadAttention."""
        K = 2
        ours = {
            "layers.attn.attn_vec_einsum.w": (L, H, C, D), "layers.attn.kv_einsum.w": (L, 2, K, D, C),
            "layers.attn.q_einsum.w": (L, H, D, C), "layers.mlp.gating_einsum": (L, 2, D, F),
            "layers.mlp.linear": (L, F, D),
        }  # fmt: skip
        block = {
            "self_attn.q_proj.weight": (H * C, D), "self_attn.k_proj.weight": (K * C, D),
            "self_attn.v_proj.weight": (K * C, D), "self_attn.o_proj.weight": (D, H * C),
            "mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F),
        }  # fmt: skip
        theirs = {f"model.layers.{i}.{name}": shape for i in range(L) for name, shape in block.items()}
        found = suggest(ours, theirs)
        assert found.ours_left == found.theirs_left == ()
        rows = {row.theirs.removeprefix("model.layers.{layer}."): row for row in found.mapping.rows}
        for name, part, transform in (("k", 0, "heads_first"), ("v", 1, "heads_first")):
            row = rows[f"self_attn.{name}_proj.weight"]
            assert row[:4] == ("layers.attn.kv_einsum.w", row.theirs, transform, ()) and row.part == part
        gate, up = (rows[f"mlp.{name}_proj.weight"] for name in ("gate", "up"))
        assert (gate.ours, gate.part, up.part, up.transform) == ("layers.mlp.gating_einsum", 0, 1, "transpose")
        assert {row for row in found.mapping.rows if row.part is not None} <= found.unsure.keys()
        found.mapping.check(ours, theirs)

        split: dict[str, Shape] = {f"{name}.{leaf}": shape for name in ("key", "query", "value")  # sorted like a tree
                for leaf, shape in (("kernel", (D, H, C)), ("bias", (H, C)))}  # fmt: skip
        fused: dict[str, Shape] = {"in_proj_weight": (3 * H * C, D), "in_proj_bias": (3 * H * C,)}
        found = suggest(split, fused)
        assert found.ours_left == found.theirs_left == ()
        chunks = {row.ours: row.chunk for row in found.mapping.rows}
        assert chunks["query.kernel"] == (0, 3) and chunks["value.bias"] == (2, 3)
        found.mapping.check(split, fused)

    def test_an_axis_that_is_no_part_is_not_taken(self) -> None:
        """Three entries along the second axis are not pieces: rows split along the first alone."""
        found = suggest({"qkv": (16, 3, 8)}, {f"{name}.weight": (8, 16) for name in ("q", "k", "v")})
        assert found.ours_left == ("qkv",) and found.mapping.rows == ()

    @pytest.mark.parametrize(
        ("number", "change", "message"),
        [
            (1, {"part": 0}, r"row 2: ours = 'layers.kv.w' is in row 1 too"),
            (1, {"part": 2}, r"row 2: layers.kv.w .* has no part = 2"),
            (1, {"part": None}, r"row 2: ours = 'layers.kv.w' is in row 1 too"),
            (4, {"chunk": (0, 3)}, r"row 5: theirs = 'blocks.0.in_proj_weight' is in row 3 too"),
            (4, {"chunk": (1, 2)}, r"row 5: theirs = 'blocks.0.in_proj_weight' is cut into"),
            (4, {"chunk": (0, 0)}, r"row 5: chunk = \[0, 0\]"),
            (4, {"transform": "turned"}, r"row 5: transform = 'turned': unknown"),
            (4, {"chunk": None}, r"row 5: theirs = 'blocks.0.in_proj_weight' is in row 3 too"),
            (2, {"chunk": (0, 7)}, r"row 3: blocks.0.in_proj_weight .* is not 7 equal chunks"),
            (0, None, r"ours = 'layers.kv.w': part = 0 is in no row; give all of them"),
            (2, None, r"theirs = 'blocks.0.in_proj_weight': chunk = \[0, 3\] is in no row"),
        ],
    )
    def test_pieces_that_do_not_fit(self, number: int, change: dict[str, Any] | None, message: str) -> None:
        rows = list(FUSED.rows)
        rows[number : number + 1] = [] if change is None else [rows[number]._replace(**change)]
        with pytest.raises(ConfigError, match=message):
            KeyMapping(tuple(rows)).check(FUSED_OURS, FUSED.their_shapes(FUSED_OURS))


class TestFile:
    def test_a_good_one(self, tmp_path: Path) -> None:
        mapping = KeyMapping.load(file(tmp_path / "m.toml", {}, ours_only=["b.bias"], theirs_only=["b.bias"]))
        mapping.check(OURS, THEIRS)
        reshaped = Row("p", "q", "reshape", (1, 4))
        KeyMapping((*mapping.rows, reshaped), source="x").save(tmp_path / "again.toml")
        assert KeyMapping.load(tmp_path / "again.toml").rows == (*mapping.rows, reshaped)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"transform": "transposed"}, r"row 1: transform = 'transposed': unknown; did you mean 'transpose'"),
            ({"transform": 3}, r"row 1: transform = 3; give a text"),
            ({"transfrom": "same"}, r"row 1: transfrom: no such field; did you mean 'transform'"),
            ({"transform": "reshape"}, r"row 1: shape belongs to transform = 'reshape' alone"),
            ({"shape": [2, 3]}, r"row 1: shape belongs to transform = 'reshape' alone"),
            ({"transform": "reshape", "shape": "2"}, r"row 1: shape = '2'; give a list of sizes"),
            ({"ours": "a.{layer}"}, r"row 1: \{layer\} in ours alone"),
            ({"part": -1}, r"row 1: part = -1; give a whole number"),
            ({"part": True}, r"row 1: part = True; give a whole number"),
            ({"chunk": [False, True]}, r"row 1: chunk = \[False, True\]; give"),
            ({"chunk": [1]}, r"row 1: chunk = \[1\]; give \[which, of how many\]"),
            ({"chunk": [3, 3]}, r"row 1: chunk = \[3, 3\]: of 3 they are 0 to 2"),
            ({"theirs": "a.{layer}.{layer}"}, r"row 1: theirs = .* has \{layer\} twice"),
        ],
    )
    def test_bad_rows(self, row: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            KeyMapping.load(file(tmp_path / "m.toml", row))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("rows = 3", r"rows = 3; give a list"),
            ("rows = [3]", r"row 1: 3; give a table"),
            ("row = []", r"row: no such field; did you mean 'rows'"),
            ("ours_only = 'x'", r"ours_only = 'x'; give a list of names"),
            ("rows = [", r"give a readable TOML file"),
        ],
    )
    def test_bad_files(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "m.toml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            KeyMapping.load(tmp_path / "m.toml")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda r: [r[0]._replace(ours="a.kernle"), r[1]], r"row 1: ours = 'a.kernle': no such .*mean 'a.kernel'"),
            (lambda r: [r[0]._replace(theirs="a.wieght"), r[1]], r"row 1: theirs = 'a.wieght': .* mean 'a.weight'"),
            (lambda r: [*r, r[0]], r"row 3: ours = 'a.kernel' is in row 1 too"),
            (lambda r: [r[0], Row("b.bias", "a.weight")], r"row 2: theirs = 'a.weight' is in row 1 too"),
            (
                lambda r: [r[0]._replace(transform="same"), r[1]],
                r"row 1: .*'same' is not .*transform = 'transpose' fits",
            ),
            (lambda r: [r[0], Row("b.bias", "b.bias", "conv2d")], r"row 2: .* transform = 'same' fits"),
            (lambda r: r[:1], r"ours: b.bias \(1 in all\) in no row; add rows, or list them in ours_only"),
            (lambda r: [*r, Row("b.bias", "c.{layer}")], r"row 3: theirs = 'c.0': no such tensor"),
        ],
    )
    def test_mappings_that_do_not_fit_the_models(self, change: Callable[[list[Row]], list[Row]], message: str) -> None:
        rows = [Row(**GOOD), Row("b.bias", "b.bias")]
        KeyMapping(tuple(rows)).check(OURS, THEIRS)
        with pytest.raises(ConfigError, match=message):
            KeyMapping(tuple(change(rows))).check(OURS, THEIRS)

    def test_names_of_one_side(self) -> None:
        row = Row(**GOOD)
        with pytest.raises(ConfigError, match=r"theirs_only: 'b.bais': no such name; did you mean 'b.bias'"):
            KeyMapping((row,), ("b.bias",), ("b.bais",)).check(OURS, THEIRS)
        with pytest.raises(ConfigError, match=r"ours_only: 'a.kernel' is in a row too"):
            KeyMapping((row,), ("a.kernel", "b.bias"), ("b.bias",)).check(OURS, THEIRS)
        with pytest.raises(ConfigError, match=r"theirs = 'a.weight': no such tensor"):
            KeyMapping((row,)).to_ours({"b": np.ones(2)}, OURS)
        with pytest.raises(ConfigError, match=r"a \(2, 3\): the mapping has not all pieces of it"):
            KeyMapping((Row("a", "k", part=0),)).to_ours({"k": np.ones(3)}, {"a": (2, 3)})
