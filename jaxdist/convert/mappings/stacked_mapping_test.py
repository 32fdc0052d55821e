"""Key mappings of models with layers stacked along some axis, and the shipped mappings for MaxText and Levanter."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.mappings.mapping import KeyMapping, Row
from jaxdist.convert.mappings.suggest import suggest

D, L, H, K, C, F, V = 32, 3, 4, 2, 8, 48, 96
Arrays = dict[str, np.ndarray]


def hf_tensors(seed: int = 0, biases: bool = False) -> Arrays:
    """A random Llama under Hugging Face's names."""
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for i in range(L):
        block = {"input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (H * C, D)}
        block |= {"self_attn.k_proj": (K * C, D), "self_attn.v_proj": (K * C, D), "self_attn.o_proj": (D, H * C)}
        block |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def neighbours(heads: np.ndarray) -> np.ndarray:
    """[D, H, C] with the halves of a head interleaved, as rotary embeddings of neighbouring pairs need them."""
    dealt = np.empty_like(heads)
    dealt[..., ::2], dealt[..., 1::2] = np.split(heads, 2, axis=-1)
    return dealt


def maxtext(tensors: Arrays, axis: int | None = 1, pairs: bool = False, tied: bool = False) -> Any:
    """The same weights in MaxText's layout, with layers along an axis, or separate."""
    deal = neighbours if pairs else np.asarray

    def block(i: int) -> Arrays:
        at = f"model.layers.{i}."

        def heads(name: str) -> np.ndarray:
            return tensors[f"{at}self_attn.{name}_proj.weight"].T.reshape(D, -1, C)

        return {
            "pre_self_attention_layer_norm.scale": tensors[at + "input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": tensors[at + "post_attention_layernorm.weight"],
            "self_attention.query.kernel": deal(heads("q")) / np.float32(np.sqrt(C)),
            "self_attention.key.kernel": deal(heads("k")),
            "self_attention.value.kernel": heads("v"),
            "self_attention.out.kernel": tensors[at + "self_attn.o_proj.weight"].T.reshape(H, C, D),
            "mlp.wi_0.kernel": tensors[at + "mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": tensors[at + "mlp.up_proj.weight"].T,
            "mlp.wo.kernel": tensors[at + "mlp.down_proj.weight"].T,
        }

    blocks = [block(i) for i in range(L)]
    if axis is None:
        layers = {f"layers_{i}": nested(block) for i, block in enumerate(blocks)}
    else:
        layers = {"layers": nested({name: np.stack([b[name] for b in blocks], axis) for name in blocks[0]})}
    decoder = layers | {"decoder_norm": {"scale": tensors["model.norm.weight"]}}
    if not tied:
        decoder["logits_dense"] = {"kernel": tensors["lm_head.weight"].T}
    return {"decoder": decoder, "token_embedder": {"embedding": tensors["model.embed_tokens.weight"]}}


def nested(flat: Arrays) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *parts, leaf = name.split(".")
        inner = tree
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[leaf] = array
    return tree


def saved(path: Path, tree: Any) -> str:
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(path, tree)
    return str(path)


def state(tree: Any) -> Any:
    """A training state around the weights, as MaxText saves it."""
    moments = {"mu": {"params": tree}, "nu": {"params": tree}, "count": np.int32(3)}
    return {"params": {"params": tree}, "opt_state": moments, "step": np.int32(3)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("maxtext", {}),
        ("maxtext", {"tied": True}),
        ("maxtext-unscanned", {"axis": None}),
        ("maxtext-llama3.1", {"pairs": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("around", [lambda tree: tree, lambda tree: {"params": {"params": tree}}, state])
def test_shipped_mappings(
    name: str, options: Any, around: Callable[[Any], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MaxText's weights become Hugging Face's, for any training state around them, and come back."""
    tensors = hf_tensors()
    if options.get("tied"):
        del tensors["lm_head.weight"]
    (tmp_path / "like").mkdir()
    save_file({n: hf_tensors(1)[n] for n in tensors}, tmp_path / "like" / "model.safetensors")
    (tmp_path / "like" / "config.json").write_text("{}")
    source = saved(tmp_path / "source", around(maxtext(tensors, **options)))
    main([source, str(tmp_path / "out"), "--mapping", name, "--like", str(tmp_path / "like"), "--verify"])
    output = capsys.readouterr().out
    assert "names and shapes are those of" in output and ("stays behind: opt_state" in output) == (around is state)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys() and (tmp_path / "out" / "config.json").exists()
    for key, tensor in tensors.items():
        np.testing.assert_allclose(found[key], tensor, rtol=2.0**-22 if "q_proj" in key else 0, err_msg=key)
    main([str(tmp_path / "out"), str(tmp_path / "back"), "--mapping", name, "--like", source])
    with ocp.PyTreeCheckpointer() as reader:
        back, first = reader.restore(tmp_path / "back"), reader.restore(source)
    assert leaves(back) and len(leaves(back)) == len(leaves(first))
    for a, b in zip(leaves(back), leaves(first), strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-21)


MISSING = r"row 9: ours = '{}decoder.layers.mlp.wi_1.kernel': no such parameter"


def lacking(*names: str) -> Any:
    """MaxText's tree without these kernels of mlp."""
    tree = maxtext(hf_tensors())
    for name in names:
        del tree["decoder"]["layers"]["mlp"][name]
    return tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (state(lacking("wi_1")), rf"{MISSING.format('params.params.')}; all that are there .*: give a checkpoint that"),
        (lacking("wi_1"), MISSING.format("")),
        (state(lacking("wi_1", "wo")), rf"{MISSING.format('params.params.')}, nor that of row 10; all that are there"),
        (state(lacking()) | {"params": {"params": lacking("wi_1")}}, MISSING.format("params.params.")),
        (state(lacking("wi_1") | {"wi_1": np.ones(3)}), rf"{MISSING.format('params.params.')}; .*'?params.params.wi_1"),
        (state(maxtext(hf_tensors()) | {"token_embedder": {}}), "row 1: ours = 'params.params.token_embedder.embedd"),
        (state(maxtext(hf_tensors(), axis=None)), "row 2: ours = 'params.params.decoder.layers.pre_s.*, nor that of"),
        ({"a": np.ones(3)}, "row 1: ours = 'token_embedder.embedding': no such parameter, nor that of row 2, row 3, "),
    ],
    ids=["state", "bare", "two", "whole moments", "another name", "the first", "unscanned", "none"],
)
def test_tensors_that_a_state_lacks_are_named(tree: Any, message: str, tmp_path: Path) -> None:
    """Named as in the file, and not found among the moments instead."""
    with pytest.raises(ConfigError, match=rf"maxtext.toml: {message}"):
        main([saved(tmp_path / "source", tree), str(tmp_path / "out"), "--mapping", "maxtext"])


def test_one_layer_lacks_a_tensor(tmp_path: Path) -> None:
    tree = maxtext(hf_tensors(), axis=None)
    del tree["decoder"]["layers_1"]["mlp"]["wi_1"]
    source = saved(tmp_path / "source", state(tree))
    with pytest.raises(ConfigError, match=r"2 in row 9.* has no params.params.decoder.layers_1.mlp.wi_1.kernel. Give"):
        main([source, str(tmp_path / "out"), "--mapping", "maxtext-unscanned"])


def test_tensors_of_levanter_and_of_like_that_are_missing(tmp_path: Path) -> None:
    """A model below an optimizer's state, and torch's side."""
    tensors = hf_tensors()
    name = "transformer.layers.stacked.mlp.up_proj.weight"
    ours = {n: array for n, array in levanter(tensors).items() if n != f"model.{name}"}
    tree = nested(ours | {n.replace("model.", "optimizer_state.mu.", 1): a for n, a in levanter(tensors).items()})
    with pytest.raises(
        ConfigError, match=rf"levanter.toml: row 11: ours = 'model.{name}': no such parameter; all that"
    ):
        main([saved(tmp_path / "source", tree), str(tmp_path / "out"), "--mapping", "levanter"])
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "like.safetensors")
    like = saved(tmp_path / "whole", maxtext(hf_tensors()))
    with pytest.raises(ConfigError, match=r"row 9: theirs = 'model.layers.1.mlp.up_proj.weight': .* give a checkpoint"):
        main([str(tmp_path / "like.safetensors"), str(tmp_path / "out"), "--mapping", "maxtext", "--like", like])


@pytest.mark.parametrize("beside", ["mu", "ema", "opt_state"])
def test_weights_are_taken_before_moments_and_averages(beside: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", {beside: maxtext(hf_tensors(1)), "params": maxtext(hf_tensors())})
    main([source, str(tmp_path / "out"), "--mapping", "maxtext"])
    found = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert np.array_equal(found, hf_tensors()["model.norm.weight"])


def leaves(tree: Any) -> list[np.ndarray]:
    return [leaf for key in sorted(tree) for leaf in leaves(tree[key])] if isinstance(tree, dict) else [tree]


def levanter(tensors: Arrays) -> Arrays:
    """The same weights in Levanter's layout: stacked, outputs first, queries by groups of kv heads."""

    def stack(name: str, *shape: int) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{i}.{name}.weight"].reshape(shape) for i in range(L)])

    layers = {
        "input_layernorm": stack("input_layernorm", D),
        "post_attention_layernorm": stack("post_attention_layernorm", D),
        "self_attn.q_proj": stack("self_attn.q_proj", K, H // K, C, D),
        "self_attn.k_proj": stack("self_attn.k_proj", K, C, D),
        "self_attn.v_proj": stack("self_attn.v_proj", K, C, D),
        "self_attn.o_proj": stack("self_attn.o_proj", D, H, C),
        "mlp.gate_proj": stack("mlp.gate_proj", F, D),
        "mlp.up_proj": stack("mlp.up_proj", F, D),
        "mlp.down_proj": stack("mlp.down_proj", D, F),
    }
    found = {f"model.transformer.layers.stacked.{name}.weight": array for name, array in layers.items()}
    found["model.embeddings.token_embeddings.weight"] = tensors["model.embed_tokens.weight"]
    found["model.transformer.norm.weight"] = tensors["model.norm.weight"]
    found["model.lm_head.weight"] = tensors["lm_head.weight"]
    return found | {"opt_state.count": np.array(3, np.int32), "step": np.array(3, np.int32)}


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("one_file", [False, True], ids=["folders", "ocdbt"])
def test_levanter(driver: str, one_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its arrays, in separate folders or in one database, become Hugging Face's."""
    source, tensors = tmp_path / "step-3", hf_tensors()
    base = {"driver": "file", "path": f"{source}/"}
    for name, array in levanter(tensors).items():
        path = name.replace(".", "/") + "/"
        place = {"driver": "ocdbt", "base": base, "path": path} if one_file else base | {"path": f"{source}/{path}"}
        store = ts.open(
            {"driver": driver, "kvstore": place}, create=True, shape=array.shape, dtype=array.dtype
        ).result()
        store.write(array).result()
    main([str(source), str(tmp_path / "out"), "--mapping", "levanter", "--verify"])
    assert "what stays behind: opt_state (1), step (1)" in capsys.readouterr().out
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(np.array_equal(found[name], tensors[name]) for name in tensors)
    main([str(source), "--inspect"])
    assert "model.transformer.layers.stacked.mlp.up_proj.weight" in capsys.readouterr().out


def test_a_shipped_mapping_of_the_wrong_rotation_gives_other_queries(tmp_path: Path) -> None:
    """Shows that the comparison above can fail."""
    source = saved(tmp_path / "source", maxtext(hf_tensors(), pairs=True))
    main([source, str(tmp_path / "out"), "--mapping", "maxtext"])
    query = "model.layers.1.self_attn.q_proj.weight"
    assert np.abs(load_file(tmp_path / "out" / "model.safetensors")[query] - hf_tensors()[query]).max() > 0.1


ROWS = [
    ("decoder.layers.self_attention.query.kernel", "model.layers.{layer}.self_attn.q_proj.weight", "heads_out"),
    ("decoder.layers.self_attention.out.kernel", "model.layers.{layer}.self_attn.o_proj.weight", "heads_in"),
    ("decoder.layers.mlp.wi_0.kernel", "model.layers.{layer}.mlp.gate_proj.weight", "transpose"),
    ("decoder.layers.mlp.wo.kernel", "model.layers.{layer}.mlp.down_proj.weight", "transpose"),
    ("decoder.layers.post_self_attention_layer_norm.scale", "model.layers.{layer}.norm.weight", "same"),
]
SHAPES = {
    "decoder.layers.self_attention.query.kernel": (D, H, C),
    "decoder.layers.self_attention.out.kernel": (H, C, D),
    "decoder.layers.mlp.wi_0.kernel": (D, F),
    "decoder.layers.mlp.wo.kernel": (F, D),
    "decoder.layers.post_self_attention_layer_norm.scale": (D,),
}


def stacked(axis: int) -> dict[str, tuple[int, ...]]:
    return {name: (*shape[:axis], L, *shape[axis:]) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_that_disagree_on_the_number_of_layers(axis: int, tmp_path: Path) -> None:
    """The message names the right axis; with it the mapping is accepted."""
    wrong = 1 - axis
    rows = [Row(*row, axis=wrong) for row in ROWS]
    with pytest.raises(ConfigError, match=r"rows disagree on the number of layers model.layers.\{layer\}: ") as error:
        KeyMapping(tuple(rows)).pairs(stacked(axis))
    advice = re.search(r"Set axis = (\d) in each of them: that axis has size 3 in all", str(error.value))
    assert advice
    mapping = KeyMapping(tuple(row._replace(axis=int(advice[1])) for row in rows))
    mapping.save(tmp_path / "m.toml")
    assert KeyMapping.load(tmp_path / "m.toml").their_shapes(stacked(axis)) == {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(L)
        for name, shape in {
            "self_attn.q_proj": (H * C, D), "self_attn.o_proj": (D, H * C), "mlp.gate_proj": (F, D),
            "mlp.down_proj": (D, F), "norm": (D,),
        }.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (L, D), "b": (L + 1, F)}, r"3 in row 1; 4 in row 2. Give each row the axis"),
        ({"a": (D, L), "b_0": (D,), "b_1": (D,), "b_2": (D,)}, r"3 in row 2; 32 in row 1. Set axis = 1 in each"),
        ({"a": (D, F, L), "b": (L, D)}, r"3 in row 2; 32 in row 1. Give each row the axis"),
        ({"a": (L, D), "b_0": (D,), "b_1": (D,)}, r"2 in row 2; 3 in row 1"),
    ],
)
def test_other_stacks_that_disagree(shapes: dict[str, Any], message: str) -> None:
    rows = Row("a", "h.{layer}.a"), Row("b" if "b" in shapes else "b_{layer}", "h.{layer}.b")
    with pytest.raises(ConfigError, match=message):
        KeyMapping(rows).pairs(shapes)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((0, 1, 3), "but no h.2. Give"), ((1, 2), "but no h.0. Give"), ((0, 9), "but no h.1, h.2, ")],
)
def test_layers_that_are_missing(numbers: tuple[int, ...], message: str) -> None:
    """Written as one row per layer, as the message says, the same layers are accepted."""
    shapes = {f"b_{i}": (D,) for i in numbers}
    with pytest.raises(ConfigError, match=message):
        KeyMapping((Row("b_{layer}", "h.{layer}.b"),)).pairs(shapes)
    assert len(KeyMapping(tuple(Row(f"b_{i}", f"h.{i}.b") for i in numbers)).pairs(shapes)) == len(numbers)


def test_layers_that_are_of_two_kinds_in_turns_or_counted_from_one_are_whole() -> None:
    rows = Row("a_{layer}", "h.{layer}.a"), Row("b_{layer}", "h.{layer}.b"), Row("c_{layer}", "stage{layer}.c")
    assert len(KeyMapping(rows).pairs(dict.fromkeys(("a_0", "b_1", "a_2", "b_3", "c_1", "c_2"), (D,)))) == 6


def test_suggested_rows_of_layers_with_a_gap_are_accepted() -> None:
    """Linear layers of a Sequential have parameterless ones between, for instance."""
    names = [f"net.{i}.weight" for i in (0, 2, 4)]
    rows = suggest(dict.fromkeys(names, (D, F)), dict.fromkeys(names, (D, F))).mapping.rows
    assert sorted(row.ours for row in rows) == names


def test_stacks_of_two_kinds_may_have_two_sizes() -> None:
    """An encoder of two layers beside a decoder of three."""
    rows = Row("e", "encoder.{layer}.w"), Row("d", "decoder.{layer}.w")
    assert len(KeyMapping(rows).pairs({"e": (2, D), "d": (3, D)})) == 5


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_axis_there_and_back(axis: int) -> None:
    random = np.random.default_rng(0)
    mapping = KeyMapping((Row("w", "l.{layer}.w", "transpose", axis=axis),))
    ours = {"w": np.moveaxis(random.normal(size=(L, D, F)), 0, axis)}
    theirs = mapping.to_theirs(ours)
    assert len(theirs) == L and np.array_equal(theirs["l.1.w"], np.moveaxis(ours["w"], axis, 0)[1].T)
    assert np.array_equal(mapping.to_ours(theirs, {"w": ours["w"].shape})["w"], ours["w"])


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("axis = -1", "axis = -1; give the axis of ours along which layers are stacked, from 0"),
        ("axis = true", "axis = True; give the axis"),
        ("axis = 3", r"ours = 'w' \(3, 32, 48\) has no axis = 3 that layers could be stacked along"),
        ('scale = "sqrt"', "scale = 'sqrt'; give 'sqrt_last', or leave it out"),
        ("optional = 1", "optional = 1; give true or false"),
    ],
)
def test_bad_fields(field: str, message: str, tmp_path: Path) -> None:
    row = f'{{ ours = "w", theirs = "l.{{layer}}.w", transform = "transpose", {field} }}'
    (tmp_path / "m.toml").write_text(f"rows = [{row}]")
    with pytest.raises(ConfigError, match=message):
        KeyMapping.load(tmp_path / "m.toml").pairs({"w": (L, D, F)})


def test_an_odd_head_has_no_pairs() -> None:
    with pytest.raises(ConfigError, match=r"w \(32, 4, 7\) has 3 axes, which transform = 'heads_out_pairs' is not for"):
        KeyMapping((Row("w", "w", "heads_out_pairs"),)).their_shapes({"w": (D, H, 7)})


def test_an_axis_without_a_stack(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"axis = 1 belongs to rows with \{layer\} in theirs alone; leave it out"):
        KeyMapping((Row("w", "w", axis=1),))


def test_verify_lists_what_it_did_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--like compares names and shapes with another model; nothing verifies the mapping itself."""
    source = saved(tmp_path / "source", maxtext(hf_tensors()))
    main([source, str(tmp_path / "out"), "--mapping", "maxtext", "--verify"])
    assert "not verified: whether the mapping is right" in capsys.readouterr().out
    other = hf_tensors()
    other["model.layers.0.mlp.up_proj.weight"] = np.zeros((F + 1, D), np.float32)
    save_file(other, tmp_path / "like.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj.weight \(49, 32\); map it to another tensor"):
        main([source, str(tmp_path / "b"), "--mapping", "maxtext", "--like", str(tmp_path / "like.safetensors")])
    with pytest.raises(ConfigError, match=r"--like .*source is of SOURCE's own kind; give one of TARGET's"):
        main([source, str(tmp_path / "b"), "--mapping", "maxtext", "--like", source])
    with pytest.raises(ConfigError, match=r"--mapping maxtex: neither a file nor a shipped mapping; did you mean"):
        main([source, str(tmp_path / "b"), "--mapping", "maxtex"])


@pytest.mark.parametrize("shape", [(D, D, F), (L, D, D)], ids=["axes alike", "square matrices"])
def test_verify_names_rows_that_shapes_do_not_check(
    shape: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong axis or transform keeps the shapes of square matrices, or of as many layers as rows."""
    source = saved(tmp_path / "source", {"b": {"w": np.ones(shape, np.float32)}, "n": np.ones(3, np.float32)})
    row, other = Row("b.w", "l.{layer}.w", "transpose"), Row("n", "n")
    KeyMapping((row, other)).save(tmp_path / "m.toml")
    main([source, str(tmp_path / "out"), "--mapping", str(tmp_path / "m.toml"), "--verify"])
    message = "not verified: axis and transform of 1 parameters, b.w first"
    assert message in capsys.readouterr().out
    like = ["--like", str(tmp_path / "out")]
    main([source, str(tmp_path / "again"), "--mapping", str(tmp_path / "m.toml"), "--verify", *like])
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("head", [64, 128, 96])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_scale_is_rounded_once(head: int, dtype: Any) -> None:
    """MaxText's converter scales in float32, then casts. Exact both ways for a power of four."""
    mapping = KeyMapping((Row("w", "w", scale="sqrt_last"),))
    ours: Any = np.random.default_rng(0).normal(size=(100, head)).astype(dtype)
    theirs: Any = mapping.to_theirs({"w": ours})["w"]
    wide: Any = np.float64 if dtype == np.float64 else np.float32
    assert theirs.dtype == dtype
    assert np.array_equal(theirs, (ours.astype(wide) * wide(np.sqrt(head))).astype(dtype))
    exact = ours.astype(np.longdouble) * np.sqrt(np.longdouble(head))
    bound = {8: 2.0**-52, 4: 2.0**-23, 2: 2.0**-11 if dtype == np.float16 else 2.0**-8}[theirs.itemsize]
    normal = np.abs(exact) > 1e-3
    assert np.max(np.abs(theirs.astype(np.longdouble) - exact)[normal] / np.abs(exact)[normal]) <= 1.01 * bound
    if head == 64:
        assert np.array_equal(mapping.to_ours({"w": theirs}, {"w": ours.shape})["w"], ours)


def test_a_scale_is_that_of_a_layer() -> None:
    """The scale uses the axis before the last if layers are along the last."""
    mapping = KeyMapping((Row("w", "l.{layer}.w", axis=1, scale="sqrt_last"),))
    assert np.array_equal(mapping.to_theirs({"w": np.ones((16, 3), np.float32)})["l.2.w"], np.full(16, 4, np.float32))


def test_rows_that_cannot_have_a_scale(tmp_path: Path) -> None:
    KeyMapping((Row("w", "w", scale="sqrt_last"),)).save(tmp_path / "m.toml")
    for number, (array, message) in enumerate(
        [(np.float32(3), "is a single number without a last axis"), (np.ones(3, np.int32), "is int32, which scale")]
    ):
        source = saved(tmp_path / str(number), {"w": array})
        with pytest.raises(ConfigError, match=f"{message}.*leave scale out"):
            main([source, str(tmp_path / "out"), "--mapping", str(tmp_path / "m.toml")])


def test_shipped_files_are_whole() -> None:
    for file in Path(__file__).parent.glob("*.toml"):
        text = file.read_text()
        assert tomllib.loads(text)["rows"] and f"--mapping {file.stem} " in text and KeyMapping.load(file).rows
