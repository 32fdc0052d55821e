"""Each kind of source that both sides can start from: the same tensors to the bit, or the same error."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jaxdist.command_line.arguments import parse
from jaxdist.config import ConfigError, Experiment, Model
from jaxdist.convert import write_hf
from jaxdist.convert.__main__ import main as convert
from jaxdist.convert.content import PARAMETERS, Content
from jaxdist.convert.entries import shapes_of
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.stream import Conversion
from jaxdist.convert.vocabulary import resized
from jaxdist.convert.weights import starting_content
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.families.mixtral.config import Mixture
from jaxdist.families.resnet.config import ResNet
from jaxdist.formats.described import Source
from jaxdist.formats.finite import is_square, start_fix
from jaxdist.formats.finite import refused as refused_weights
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.opening import opened
from jaxdist.formats.sources import kind_of
from jaxdist.formats.tables import OWN, stored
from jaxdist.train import described as jax_described
from parity_tests.runs.names import as_torch
from torch_ref.formats.hf import Weights
from torch_ref.formats.hf import describe as ref_described
from torch_ref.formats.reader import READER
from torch_ref.parallel.weights import extended

Tensors = dict[str, Tensor]
SIZES: dict[str, Any] = {"layers": 2, "dim": 8, "heads": 2, "hidden": 12, "vocab": 16, "positions": 8}
ROTARY = SIZES | {"kv_heads": 1, "head_dim": 4}
MODELS: dict[str, Model] = {
    "llama": Llama(**ROTARY),
    "qwen2": Llama(**ROTARY, tied=True, qkv_bias=True, norm_eps=1e-6),
    "gpt2": GPT2(**SIZES, family="gpt2"),
    "gpt2 untied": GPT2(**SIZES, family="gpt2", tied=False),
    "mixtral": Mixture(**ROTARY, family="mixtral", experts=3),
    "qwen3_moe": Mixture(**ROTARY, family="qwen3_moe", experts=1, top_k=1, qk_norm=True),
    "resnet": ResNet(family="resnet", depths=(1, 2), widths=(8, 16), stem=4, classes=5, channels=1),
}


def folder_of(path: Path, model: Model) -> Tensors:
    """A Hugging Face folder whose tensors all differ, and its content."""
    rng = np.random.default_rng(0)

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        counts = name.endswith("num_batches_tracked")
        array = rng.standard_normal(shape).astype(np.float32)
        return np.asarray(7, np.int64) if counts else np.abs(array) if is_square(name) else array

    write_hf(path, model, {name: drawn(name, shape) for name, shape in shapes_of(model).items()})
    return load_file(path / SINGLE)


def read_by_jaxdist(path: Path, model: Model) -> dict[str, np.ndarray]:
    """Weights that jaxdist places, under torch_ref's names and in its layout."""
    opened.cache_clear()  # files change within a test
    return placed(path, model, starting_content(path, experiment_for(model.model_dump(), "test")))


def read_by_convert(path: Path, model: Model) -> dict[str, np.ndarray]:
    """Weights that convert writes, likewise."""
    wanted = experiment_for(model.model_dump(), "test")
    return placed(path, model, KINDS[kind_of(path)].format.read_content(path, wanted, training=False))


def placed(path: Path, model: Model, content: Content) -> dict[str, np.ndarray]:
    conversion = Conversion(resized(content, model), OWN, widen=True, nonfinite="refuse")
    found = as_torch({name: array for _, name, array in conversion.stream(PARAMETERS)})
    conversion.refuse(path, start_fix(path))
    return found


def read_by_torch_ref(path: Path, model: Model) -> dict[str, np.ndarray]:
    """Weights that torch_ref places."""
    weights = Weights(path, model)
    weights.check()
    shapes = {name: tensor.shape for name, tensor in stored("torch_ref", model, READER.shapes(model)).items()}
    tensors = {name: extended(weights.read(name), torch.Size(shape)) for name, shape in shapes.items()}
    counts = {name: tensor.long() for name, tensor in tensors.items() if name.endswith("num_batches_tracked")}
    found = {name: tensor.flatten().view(torch.uint8).numpy() for name, tensor in (tensors | counts).items()}
    if weights.bad:
        raise refused_weights(path, weights.bad, start_fix(path))
    return found


def bits(array: np.ndarray) -> bytes:
    counts = array.dtype.kind == "i"  # batch counters have 64 bits in torch and 32 in JAX
    return (array.astype(np.int64) if counts else array).tobytes()


def without_prefix(tensors: Tensors) -> Tensors:
    return {re.sub(r"^(model|transformer|resnet)\.", "", name): tensor for name, tensor in tensors.items()}


def wrapped(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def inside(tensors: Tensors) -> Tensors:
    """Names as with torch.compile applied to each block."""
    return {re.sub(r"\.(\d+)\.", r".\1._orig_mod.", name, count=1): tensor for name, tensor in tensors.items()}


EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


def with_head(tensors: Tensors) -> Tensors:
    embedding = next(tensors[name] for name in EMBEDDINGS if name in tensors)
    return tensors | {"lm_head.weight": embedding.clone()}


def head_alone(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in with_head(tensors).items() if name not in EMBEDDINGS}


def with_buffers(tensors: Tensors) -> Tensors:
    found = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    masks = {f"transformer.h.{i}.attn.{kind}": torch.ones(4) for i in range(2) for kind in ("bias", "masked_bias")}
    return tensors | (masks if "transformer.wte.weight" in tensors else found)


def narrow(tensors: Tensors) -> Tensors:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    """A mixture's experts as transformers 5 holds them in memory."""
    block = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "gate": "gate"}
    kept, experts = dict[str, Tensor](), dict[tuple[str, str], list[Tensor]]()
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.\d+\.(\w+)\.weight", name):
            experts.setdefault((f"{found[1]}.mlp.experts", block.get(found[2], found[2])), []).append(tensor)
        else:
            kept[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    stacks = {key: torch.stack(of_layer) for key, of_layer in experts.items()}
    for place in {place for place, _ in stacks}:
        gate, up, down = (stacks[place, f"{name}_proj"] for name in ("gate", "up", "down"))
        kept |= {f"{place}.gate_up_proj": torch.cat([gate, up], dim=1), f"{place}.down_proj": down}
    return kept


def as_it_is(tensors: Tensors) -> Tensors:
    return tensors


CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "as it is": as_it_is,
    "without a prefix": without_prefix,
    "compiled": wrapped("_orig_mod."),
    "wrapped": wrapped("module._fsdp_wrapped_module."),
    "blocks compiled": inside,
    "with buffers": with_buffers,
    "bfloat16": narrow,
}
OF_TIED = {
    "with its head": with_head,
    "head alone": head_alone,
    "head alone, compiled": lambda t: inside(head_alone(t)),
}
OF_MIXTURES = {"fused": fused, "fused and compiled": lambda t: wrapped("_orig_mod.")(fused(t))}
UNBUFFERED = ("resnet", "with buffers")  # all its buffers are statistics, which are kept
CASES = [
    *((model, change) for model in MODELS for change in CHANGES.items() if (model, *change[:1]) != UNBUFFERED),
    *((model, change) for model in ("qwen2", "gpt2") for change in OF_TIED.items()),
    *((model, change) for model in ("mixtral", "qwen3_moe") for change in OF_MIXTURES.items()),
]


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize(("name", "change"), CASES, ids=[f"{model}, {change}" for model, (change, _) in CASES])
def test_both_place_the_same(
    name: str, change: tuple[str, Callable[[Tensors], Tensors]], sharded: bool, tmp_path: Path
) -> None:
    model = MODELS[name]
    right = read_by_jaxdist(tmp_path, model) if folder_of(tmp_path, model) else {}
    save(tmp_path, change[1](load_file(tmp_path / SINGLE)), sharded)
    jax, ref = read_by_jaxdist(tmp_path, model), read_by_torch_ref(tmp_path, model)
    assert {*jax} == {*ref} == {*right}
    assert all(bits(jax[name]) == ref[name].tobytes() for name in jax)
    if change[1] is not narrow:
        assert all(bits(jax[name]) == bits(right[name]) for name in jax)


def save(folder: Path, tensors: Tensors, sharded: bool = False) -> None:
    """Write a folder's weights to one file, or to two and their index."""
    (folder / SINGLE).unlink(missing_ok=True)
    if not sharded:
        save_file(tensors, folder / SINGLE)
        return
    places = {name: f"{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


FORMS: dict[str, Callable[[Tensors], Any]] = {
    "a state dict": lambda tensors: tensors,
    "a script's": lambda tensors: {"model_state_dict": tensors, "epoch": 3, "loss": 1.5},
    "Lightning's": lambda tensors: {"state_dict": {f"net.{n}": t for n, t in tensors.items()}, "global_step": 5},
    "Lightning's, averaged": lambda tensors: {
        "state_dict": {f"net.{n}": torch.zeros_like(t) for n, t in tensors.items()},
        "current_model_state": {f"net.{n}": t for n, t in tensors.items()},
    },
}


@pytest.mark.long
@pytest.mark.parametrize("form", ["pytorch_model.bin", *FORMS])
@pytest.mark.parametrize("name", MODELS)
def test_both_place_the_same_of_torch_files(name: str, form: str, tmp_path: Path) -> None:
    model = MODELS[name]
    tensors = folder_of(tmp_path / "hf", model)
    right = read_by_jaxdist(tmp_path / "hf", model)
    source = tmp_path / "file.pt"
    if form in FORMS:
        torch.save(FORMS[form](wrapped("_orig_mod.")(tensors)), source)
    else:
        source = tmp_path / "hf"
        (source / SINGLE).unlink()
        torch.save(fused(tensors) if name in ("mixtral", "qwen3_moe") else tensors, source / form)
    jax, ref = read_by_jaxdist(source, model), read_by_torch_ref(source, model)
    assert {*jax} == {*ref} == {*right}
    assert all(bits(jax[n]) == ref[n].tobytes() == bits(right[n]) for n in jax)


def test_both_place_the_same_of_a_file_of_jaxdist(tmp_path: Path) -> None:
    model = MODELS["qwen2"]
    folder_of(tmp_path / "hf", model)
    convert([str(tmp_path / "hf"), str(tmp_path / "file.pt")])
    jax, ref = (read(tmp_path / "file.pt", model) for read in (read_by_jaxdist, read_by_torch_ref))
    assert {*jax} == {*ref} and all(bits(jax[n]) == ref[n].tobytes() for n in jax)
    other = Llama(**ROTARY, tied=True, qkv_bias=True, norm_eps=1e-3)
    message = refused(read_by_jaxdist, tmp_path / "file.pt", other)
    assert "norm_eps" in message and refused(read_by_torch_ref, tmp_path / "file.pt", other) == message


def nanogpt(bias: bool) -> Callable[[Path], Path]:
    """nanoGPT's ckpt.pt."""

    def write(folder: Path) -> Path:
        model = GPT2(**SIZES | {"hidden": 32}, family="gpt2", gelu="exact", bias=bias)
        folder_of(folder / "hf", model)
        tensors = {n: t for n, t in load_file(folder / "hf" / SINGLE).items() if bias or not n.endswith(".bias")}
        turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        tensors = {n: t.t().contiguous() if n.endswith(turned) else t for n, t in tensors.items()}
        arguments = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8, "bias": bias, "vocab_size": 16}
        torch.save({"model": wrapped("_orig_mod.")(tensors), "model_args": arguments}, folder / "ckpt.pt")
        return folder / "ckpt.pt"

    return write


def folder(name: str) -> Callable[[Path], Path]:
    return lambda path: path / "hf" if folder_of(path / "hf", MODELS[name]) else path


def own_file(name: str) -> Callable[[Path], Path]:
    """A torch file that jaxdist wrote."""

    def write(path: Path) -> Path:
        convert([str(folder(name)(path)), str(path / "file.pt")])
        return path / "file.pt"

    return write


def beside_config(name: str) -> Callable[[Path], Path]:
    """A state dict beside its model's config.json."""

    def write(path: Path) -> Path:
        torch.save({"model": folder_of(path, MODELS[name])}, path / "weights.pt")
        (path / SINGLE).unlink()
        return path / "weights.pt"

    return write


def binaries(path: Path) -> Path:
    torch.save(folder_of(path, MODELS["qwen2"]), path / "pytorch_model.bin")
    (path / SINGLE).unlink()
    return path


def alone(path: Path) -> Path:
    """A state dict that does not state its model."""
    torch.save(folder_of(path / "hf", MODELS["llama"]), path / "weights.pt")
    return path / "weights.pt"


STARTS: dict[str, tuple[Callable[[Path], Path], Model | None]] = {
    "nanoGPT": (nanogpt(True), GPT2(**SIZES | {"hidden": 32}, family="gpt2", gelu="exact")),
    "nanoGPT without biases": (nanogpt(False), GPT2(**SIZES | {"hidden": 32}, family="gpt2", gelu="exact", bias=False)),
    "a folder": (folder("qwen2"), MODELS["qwen2"]),
    "pytorch_model.bin": (binaries, MODELS["qwen2"]),
    "jaxdist's own": (own_file("qwen2"), MODELS["qwen2"]),
    "jaxdist's own, of images": (own_file("resnet"), MODELS["resnet"]),
    "beside config.json": (beside_config("mixtral"), MODELS["mixtral"]),
    "a state dict alone": (alone, None),
}  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_both_take_the_model_of_the_same_source(name: str, tmp_path: Path) -> None:
    """`--init` alone gives the same model and data; all weights are placed alike."""
    write, right = STARTS[name]
    path = write(tmp_path)
    models = [parsed(side, path).model for side in SIDES]
    if right is None:
        assert models == [Experiment().model] * 2
        return
    assert models == [right] * 2
    jax, ref = (read(path, right) for read in (read_by_jaxdist, read_by_torch_ref))
    assert {*jax} == {*ref} and all(bits(jax[n]) == ref[n].tobytes() for n in jax)


SIDES: dict[str, Callable[[Path], Source | None]] = {"jaxdist": jax_described, "torch_ref": ref_described}


def parsed(side: str, path: Path, *flags: str) -> Experiment:
    return parse(["--init", str(path), *flags], f"{side}.train", "", describe=SIDES[side]).experiment


NANOGPT_FLAGS = (
    "--model.family=gpt2", "--model.layers=2", "--model.dim=8", "--model.heads=2", "--model.hidden=32",
    "--model.vocab=16", "--model.positions=8", "--model.tied=true", "--data.sequence=8",
)  # fmt: skip


def test_gelu_is_nanogpts_on_both_sides(tmp_path: Path) -> None:
    """All other flags of the model may be given; another GELU is refused in the same words."""
    path = nanogpt(True)(tmp_path)
    models: list[Any] = [parsed(side, path, *NANOGPT_FLAGS).model for side in SIDES]
    assert models[0] == models[1] and models[0].gelu == "exact"
    messages = list[str]()
    for side in SIDES:
        with pytest.raises(ConfigError) as error:
            parsed(side, path, "--model.gelu=tanh")
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "leave out --model.gelu" in messages[0]
    plain = GPT2(**SIZES | {"hidden": 32}, family="gpt2")  # as if the file did not say
    assert "model.gelu = 'tanh'" in refused(read_by_torch_ref, path, plain)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tree: tree["model_args"].pop(key)


def no_norm(tree: dict[str, Any]) -> None:
    del tree["model"]["_orig_mod.transformer.ln_f.weight"]


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no width": (without("n_embd"), "is absent there"),
    "no length": (without("block_size"), "its model_args have no block_size; give what nanoGPT saved"),
    "heads": (lambda tree: tree["model_args"].update(n_head=3), "model.heads = 3 does not divide model.dim = 8"),
    "a tensor": (no_norm, r"transformer\.ln_f\.weight is absent there"),
    "fewer rows": (lambda tree: tree["model_args"].update(vocab_size=20), r"\(16, 8\) there, and \(20, 8\)"),
    "layers": (lambda tree: tree["model_args"].update(n_layer=3), "is absent there"),
    "a rate": (
        lambda tree: tree.update(
            config={"learning_rate": -1.0, "max_iters": 5, "batch_size": 2, "gradient_accumulation_steps": 1,
                    "grad_clip": 1.0, "decay_lr": False}
        ),
        "learning_rate = -1.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_both_refuse_a_nanogpt_file_in_the_same_words(name: str, tmp_path: Path) -> None:
    path = nanogpt(True)(tmp_path)
    damage, words = DAMAGES[name]
    tree = torch.load(path)
    damage(tree)
    torch.save(tree, path)
    models = [parsed(side, path).model for side in SIDES]
    assert models[0] == models[1]
    message = refused(read_by_jaxdist, path, models[0])
    assert re.search(words, message), message
    assert refused(read_by_torch_ref, path, models[0]) == message


def refused(read: Callable[[Path, Model], Any], path: Path, model: Model) -> str:
    with pytest.raises(ConfigError) as error:
        read(path, model)
    return str(error.value)


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


def test_layers_of_several_dtypes_are_widened(tmp_path: Path) -> None:
    """They form one array in jaxdist."""
    model = MODELS["llama"]
    tensors = folder_of(tmp_path, model)
    mixed = {name: tensor.bfloat16() if ".0." in name else tensor for name, tensor in tensors.items()}
    save(tmp_path, mixed)
    found = read_by_jaxdist(tmp_path, model)
    save(tmp_path, {name: tensor.float() for name, tensor in mixed.items()})
    right = read_by_jaxdist(tmp_path, model)
    assert all(bits(found[name]) == bits(right[name]) for name in right)
