"""Every kind of source through both sides: the same model, the same weights to the bit, the same refusals."""

import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import jax
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from jaxdist.config import Checkpoint, Model
from jaxdist.convert.__main__ import main as convert
from jaxdist.convert.content import PARAMETERS
from jaxdist.convert.entries import param_specs_of
from jaxdist.convert.kinds import deepspeed_folders_test as deepspeed
from jaxdist.convert.kinds import llmc_files_test as llmc
from jaxdist.convert.kinds import meta_test as meta
from jaxdist.convert.kinds import trainer_folders_test as trainer
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.stream import Conversion
from jaxdist.convert.weights import lies_beside as jax_beside
from jaxdist.families.gpt2.config import GPT2
from jaxdist.formats.foreign import SINGLE
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.kinds import KINDS
from jaxdist.formats.orbax import arrays, numbers_of
from jaxdist.formats.sources import kind_of
from jaxdist.runs.checkpoints import checkpoint_in
from jaxdist.training import optim
from jaxdist.training.checkpoint import Checkpoints
from jaxdist.training.step import TrainState
from parity_tests.suite.sources_test import (
    MODELS,
    SIDES,
    bits,
    folder_of,
    parsed,
    read_by_convert,
    read_by_jaxdist,
    read_by_torch_ref,
    refused,
)
from torch_ref.formats import hf
from torch_ref.formats.arrays import to_torch
from torch_ref.formats.hf import lies_beside as ref_beside

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]
LLAMA = deepspeed.LLAMA


def as_it_is(tensors: Tensors) -> Tensors:
    return tensors


def zero(stage: Callable[..., Path], around: bool) -> Callable[[Path, Change], Path]:
    """DeepSpeed's folder, or its parent, with a bfloat16 copy that must not be read."""

    def write(folder: Path, change: Change) -> Path:
        trained = deepspeed.Trained(folder / "trained")
        trained.tensors = change(trained.tensors)
        trained.groups = [[n for n in trained.tensors if n in group] for group in trained.groups]
        trained.groups[0] += [n for n in trained.tensors if n not in {*trained.groups[0], *trained.groups[1]}]
        trained.moments = dict.fromkeys(trained.moments, trained.tensors)
        tag = stage(folder / "checkpoint", trained)
        return tag.parent if around else tag

    return write


def without_zero(folder: Path, change: Change) -> Path:
    trained = deepspeed.Trained(folder / "trained")
    engine = trained.engine(trained.groups, 1, module=change(trained.tensors), param_shapes=None)
    folder.joinpath("checkpoint").mkdir()
    deepspeed.save(folder / "checkpoint/mp_rank_00_model_states.pt", engine)
    return folder / "checkpoint"


class Changed(trainer.Trained):
    """Changed weights with unchanged moments."""

    change: Change = staticmethod(as_it_is)

    @property
    def tensors(self) -> Tensors:
        return self.change(super().tensors)


def of_trainer(layout: Callable[..., Path], **options: Any) -> Callable[[Path, Change], Path]:
    def write(folder: Path, change: Change) -> Path:
        trained = Changed(folder / "trained")
        trained.change = change
        return layout(folder / "checkpoint-9", trained, **options)

    return write


def tensors_of(folder: Path, change: Change, model: Model = LLAMA) -> Tensors:
    return change(folder_of(folder / "first", model))


def lightning(folder: Path, change: Change) -> Path:
    """Callbacks with numpy arrays and numbers."""
    state = {f"net.{name}": tensor for name, tensor in tensors_of(folder, change).items()}
    callbacks = {"EarlyStopping": {"best": np.float64(0.5), "curve": np.arange(3)}}
    torch.save({"state_dict": state, "global_step": 5, "callbacks": callbacks, "epoch": 1}, folder / "last.ckpt")
    return folder / "last.ckpt"


def in_a_list(folder: Path, change: Change) -> Path:
    """A list with one state dict, and settings under the name of a model."""
    tree = {"model": {"name": "llama"}, "state_dict": [tensors_of(folder, change)]}
    torch.save(tree, folder / "file.pt", _use_new_zipfile_serialization=False)
    return folder / "file.pt"


def folder_with(name: str) -> Callable[[Path, Change], Path]:
    """A Hugging Face folder with weights in that file."""

    def write(folder: Path, change: Change) -> Path:
        tensors = tensors_of(folder, change)
        (folder / "first" / SINGLE).unlink()
        if name == SINGLE:
            from safetensors.torch import save_file

            save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "first" / SINGLE)
        else:
            torch.save(tensors, folder / "first" / name)
        return folder / "first"

    return write


def llmc_file(version: int) -> Callable[[Path, Change], Path]:
    def write(folder: Path, _: Change) -> Path:
        llmc.model(folder / "model_00000040.bin", version)
        return folder / "model_00000040.bin"

    return write


def llmc_masters(folder: Path, _: Change) -> Path:
    """bfloat16 weights, and a state with float32 masters, which are read."""
    llmc.model(folder / "model_00000040.bin", 5)
    llmc.state(folder / "state_00000040_00000.bin", *(llmc.drawn(seed) for seed in (1, 2, 3)))
    return folder / "model_00000040.bin"


def of_meta(ranks: int) -> Callable[[Path, Change], Path]:
    """A checkpoint of `ranks` model-parallel ranks, which hold rows of some tensors and columns of others."""
    columns = ("wo.weight", "w2.weight", "tok_embeddings.weight")

    def piece(name: str, tensor: Tensor, rank: int) -> Tensor:
        return tensor if tensor.ndim < 2 else tensor.chunk(ranks, int(name.endswith(columns)))[rank].clone()

    def write(folder: Path, change: Change) -> Path:
        tensors = change(meta.drawn())
        return meta.saved(folder / "meta", [{n: piece(n, t, r) for n, t in tensors.items()} for r in range(ranks)])

    return write


def own_run(name: str) -> Callable[[Path, Change], Path]:
    """A run of jaxdist as training writes it: all arrays in one database."""

    def write(folder: Path, _: Change) -> Path:
        experiment = experiment_for(MODELS[name].model_dump(), "test")
        leaves, param_specs = content_of(MODELS[name]).groups[PARAMETERS], param_specs_of(MODELS[name])
        weights = {n: jax.numpy.asarray(leaf.read()) for n, leaf in leaves.items()}
        trained = {n: w for n, w in weights.items() if not param_specs[n].statistic}
        state = TrainState(weights, optim.optimizer(experiment.optimizer, 1, param_specs).init(trained))
        with Checkpoints(folder / "run/checkpoints", Checkpoint()) as checkpoints:
            checkpoints.save(3, experiment, state)
        return folder / "run"

    return write


def converted(name: str, kind: str) -> Callable[[Path, Change], Path]:
    return lambda folder, _: written(folder / "run", kind, content_of(MODELS[name]))


def distributed(below: str, buffers: bool) -> Callable[[Path, Change], Path]:
    """Another program's checkpoint: torchtitan's names, with its weights below `below`."""

    def write(folder: Path, change: Change) -> Path:
        leaves = Conversion(content_of(LLAMA), "torchtitan").groups[PARAMETERS]
        tensors = change({name: torch.from_numpy(np.array(leaf.read())) for name, leaf in leaves.items()})
        tree: dict[str, Any] = tensors | ({"freqs_cis": torch.ones(12, 3, dtype=torch.complex64)} if buffers else {})
        optimizer = {f"state.{name}.exp_avg": torch.zeros(3) for name in tensors}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that there is no process group
            rest = {"optimizer": optimizer, "train_state": {"step": torch.tensor(9)}}
            dcp.save(({below: tree} if below else tree) | rest, checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp"

    return write


OF_META = meta.MODEL.model_copy(update={"positions": 8192, "init_std": 0.02})  # params.json leaves these out
OF_LLMC = GPT2(
    family="gpt2", layers=llmc.L, dim=llmc.D, heads=llmc.H, hidden=4 * llmc.D, vocab=llmc.V, positions=llmc.T,
    vocab_multiple=llmc.ROWS,
)  # fmt: skip
# name -> kind, writer, model, and whether the source states the model
SOURCES: dict[str, tuple[str, Callable[[Path, Change], Path], Model, bool]] = {
    "ZeRO 2": ("deepspeed", zero(deepspeed.zero_2, False), LLAMA, True),
    "ZeRO 3, the folder around": ("deepspeed", zero(deepspeed.zero_3, True), LLAMA, True),
    "DeepSpeed without ZeRO": ("deepspeed", without_zero, LLAMA, False),
    "the Trainer": ("trainer", of_trainer(trainer.huggingface), LLAMA, True),
    "the Trainer, pytorch_model.bin": ("trainer", of_trainer(trainer.huggingface, binary=True), LLAMA, True),
    "Accelerate": ("trainer", of_trainer(trainer.accelerate), LLAMA, False),
    "Accelerate, FSDP in shards": ("trainer", of_trainer(trainer.sharded), LLAMA, False),
    "Accelerate, FSDP in one file": ("trainer", of_trainer(trainer.full), LLAMA, False),
    "Hugging Face": ("hf", folder_with(SINGLE), LLAMA, True),
    "pytorch_model.bin": ("bin", folder_with("pytorch_model.bin"), LLAMA, True),
    "Lightning": ("torch", lightning, LLAMA, False),
    "a list of a state dict, before torch 1.6": ("torch", in_a_list, LLAMA, False),
    "llm.c": ("llmc", llmc_file(3), OF_LLMC, True),
    "llm.c, bfloat16": ("llmc", llmc_file(5), OF_LLMC, True),
    "llm.c, with masters": ("llmc", llmc_masters, OF_LLMC, True),
    "Meta": ("meta", of_meta(1), OF_META, True),
    "Meta, two ranks": ("meta", of_meta(2), OF_META, True),
    **{
        f"a run of jaxdist, {name}": ("orbax", own_run(name), MODELS[name], True)
        for name in ("qwen2", "mixtral", "resnet")
    },
    **{
        f"Orbax by convert, {name}": ("orbax", converted(name, "orbax"), MODELS[name], True)
        for name in ("gpt2", "resnet")
    },
    "a run of torch_ref": ("dcp", converted("qwen3_moe", "dcp"), MODELS["qwen3_moe"], True),
    "torchtitan": ("dcp", distributed("", buffers=True), LLAMA, False),
    "torchtitan, below app.": ("dcp", distributed("app", buffers=False), LLAMA, False),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCES)
def test_both_take_it_alike(name: str, tmp_path: Path) -> None:
    """The same model where the source states one, and the same tensors, which all differ."""
    kind, write, model, tells = SOURCES[name]
    path = write(tmp_path, as_it_is)
    assert kind_of(path) == kind
    models = [parsed(side, path).model for side in SIDES]
    assert models[0] == models[1] and (models[0] == model) == tells
    jax_side, ref = read_by_jaxdist(path, model), read_by_torch_ref(path, model)
    assert {*jax_side} == {*ref} and len({array.tobytes() for array in ref.values()}) > len(ref) / 2
    assert all(bits(jax_side[n]) == ref[n].tobytes() for n in ref)
    by_convert = read_by_convert(path, model)
    assert {*by_convert} == {*ref} and all(bits(by_convert[n]) == bits(jax_side[n]) for n in ref)


@pytest.mark.long
def test_a_square_matrix_that_one_side_transposes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shape is right, so only the numbers show it."""
    _, write, model, _ = SOURCES["a run of jaxdist, qwen2"]
    path = write(tmp_path, as_it_is)
    right = read_by_jaxdist(path, model)

    def turned(array: np.ndarray) -> Tensor:
        return to_torch(array.T if array.ndim == 2 and array.shape[0] == array.shape[1] else array)

    monkeypatch.setattr(hf, "to_torch", turned)
    found = read_by_torch_ref(path, model)
    wrong = {name for name in right if bits(right[name]) != found[name].tobytes()}
    assert wrong and all(right[name].shape[0] == right[name].shape[1] for name in wrong)


def test_every_kind_has_a_source() -> None:
    assert {kind for kind, *_ in SOURCES.values()} == {*KINDS}


def first_matrix(tensors: Mapping[str, Tensor]) -> str:
    """First tensor of a layer that is not square."""
    oblong = (name for name, t in tensors.items() if t.ndim == 2 and t.shape[0] != t.shape[1])
    return next(name for name in oblong if ".1." in name)


def dropped(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != first_matrix(tensors)}


def transposed(tensors: Tensors) -> Tensors:
    return tensors | {first_matrix(tensors): tensors[first_matrix(tensors)].t().contiguous()}


def one_more(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.other.weight": torch.ones(3, 4)}


def not_finite(tensors: Tensors) -> Tensors:
    wrong = tensors[first_matrix(tensors)].clone()
    wrong[1, 1] = torch.nan
    return tensors | {first_matrix(tensors): wrong}


def whole_numbers(tensors: Tensors) -> Tensors:
    return tensors | {first_matrix(tensors): tensors[first_matrix(tensors)].to(torch.int8)}


DAMAGES: dict[str, tuple[Change, str]] = {
    "dropped": (dropped, "absent there"),
    "transposed": (transposed, "is transposed"),
    "one more": (one_more, "in the model"),
    "not finite": (not_finite, "nan"),
    "whole numbers": (whole_numbers, "is int8"),
}
CHANGED = [name for name in SOURCES if not re.search(r"jaxdist|Orbax|torch_ref|llm\.c|two ranks", name)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "damage"),
    # ZeRO's tensors are in vectors of one dtype.
    [(n, d) for n in CHANGED for d in DAMAGES if not (n.startswith("ZeRO") and d == "whole numbers")],
)
def test_both_refuse_it_in_the_same_words(name: str, damage: str, tmp_path: Path) -> None:
    _, write, model, _ = SOURCES[name]
    change, words = DAMAGES[damage]
    path = write(tmp_path, change)
    message = refused(read_by_jaxdist, path, model)
    assert words in message, message
    assert [refused(read, path, model) for read in (read_by_torch_ref, read_by_convert)] == [message] * 2


def test_both_refuse_an_index_of_another_dtype_in_the_same_words(tmp_path: Path) -> None:
    path = distributed("", buffers=False)(tmp_path, as_it_is)
    index = pickle.loads((path / ".metadata").read_bytes())
    name, entry = next(iter(index.state_dict_metadata.items()))
    entry.properties.dtype = torch.bfloat16
    (path / ".metadata").write_bytes(pickle.dumps(index))
    jax, ref = (refused(read, path, LLAMA) for read in (read_by_jaxdist, read_by_torch_ref))
    assert jax == ref
    assert f"tensor {name}: __0_0.distcp has float32[" in jax and "of it, not bfloat16[" in jax


@pytest.mark.long
def test_a_layer_of_an_orbax_checkpoint_is_named_by_the_array_and_its_place(tmp_path: Path) -> None:
    """`jaxdist.train --init` and `convert` name it alike."""
    _, write, model, _ = SOURCES["the Trainer"]
    convert([str(write(tmp_path, not_finite)), str(tmp_path / "run"), "--nonfinite", "keep"])
    (name,) = (n for n, a in arrays(checkpoint_in(tmp_path / "run")).items() if np.isnan(numbers_of(tmp_path, a)).any())
    expected = (
        rf"tensor {re.escape(name)}\[1\] has 1 of \d+ values that are NaN or infinite, the first nan at \[1, 1\]\."
    )
    message = refused(read_by_torch_ref, tmp_path / "run", model)
    assert re.search(expected, message) and message == refused(read_by_jaxdist, tmp_path / "run", model)


def state(folder: Path, tree: Any = None, **options: Any) -> Path:
    """A torch file of a tree, or of a small state dict."""
    torch.save({"a": torch.ones(4, 4)} if tree is None else tree, folder / "a.pt", **options)
    return folder / "a.pt"


def rezipped(folder: Path, method: int = ZIP_STORED, order: bytes = b"little") -> Path:
    with ZipFile(state(folder)) as before, ZipFile(folder / "b.pt", "w", method) as after:
        for record in before.infolist():
            content = before.read(record.filename)
            after.writestr(record.filename, order if record.filename.endswith("byteorder") else content)
    return folder / "b.pt"


def cut(folder: Path) -> Path:
    state(folder).write_bytes((folder / "a.pt").read_bytes()[:-100])
    return folder / "a.pt"


def holding(content: bytes, name: str = "a.pt") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def scripted(folder: Path) -> Path:
    with ZipFile(folder / "a.pt", "w", ZIP_STORED) as file:
        file.writestr("a/data.pkl", pickle.dumps(Path("x"), 2))
        file.writestr("a/code/__torch__.py", "")
        file.writestr("a/version", "3\n")
    return folder / "a.pt"


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "compressed": (lambda f: rezipped(f, ZIP_DEFLATED), "its records are compressed"),
    "of another byte order": (lambda f: rezipped(f, order=b"big"), "its byteorder is 'big'"),
    "cut": (cut, "it is cut: its end"),
    "empty": (holding(b""), "it is empty"),
    "text": (holding(b"hello world"), "is refused"),
    "a page": (holding(b"<!DOCTYPE html><html>", "a.ckpt"), "is a page of HTML"),
    "GGUF": (holding(b"GGUF123"), "is GGUF"),
    "a pointer of Git LFS": (holding(b"version https://git-lfs.github.com/spec/v1\n"), "is a pointer of Git LFS"),
    "a class": (lambda f: state(f, {"model": {"a": torch.ones(1)}, "path": Path("x")}), "is refused"),
    "a class, before torch 1.6": (
        lambda f: state(f, {"path": Path("x")}, _use_new_zipfile_serialization=False), "is refused"
    ),
    "a script": (scripted, "is refused"),
    "sparse": (lambda f: state(f, {"a": torch.ones(2, 2).to_sparse()}), "it has a tensor that is torch.sparse_coo"),
    "expanded": (lambda f: state(f, {"a": torch.ones(1).expand(10**10)}), "is larger than the file"),
    "numpy's": (lambda f: state(f, {"model": {"a": np.ones(3)}}), "no state dict of a model"),
    "another protocol": (lambda f: state(f, pickle_protocol=4), "pickle_protocol=4"),
    "nothing": (lambda f: f / "nothing", "no such file or folder"),
    "an empty folder": (lambda f: f, "no checkpoint of a known kind"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse_other_files_than_checkpoints_in_the_same_words(name: str, tmp_path: Path) -> None:
    write, words = REFUSED[name]
    path = write(tmp_path)
    message = refused(read_by_jaxdist, path, LLAMA)
    assert words in message, message
    assert refused(read_by_torch_ref, path, LLAMA) == message


# Fields of DeepSpeed's files about the layout of their vectors, in a wrong form.
NOT_DEEPSPEED: dict[str, Any] = {
    "param_shapes": [{"w": 5}], "buffer_names": [[1]], "shared_params": {"x": [1]}, "frozen_param_shapes": [1],
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_DEEPSPEED)
def test_both_refuse_a_layout_of_another_form_in_the_same_words(name: str, tmp_path: Path) -> None:
    path = SOURCES["ZeRO 2"][1](tmp_path, as_it_is)
    (file,) = path.rglob("mp_rank_00_model_states.pt")
    torch.save(torch.load(file) | {name: NOT_DEEPSPEED[name]}, file)
    message = refused(read_by_jaxdist, path, LLAMA)
    assert "use an intact copy of its folder" in message, message
    assert refused(read_by_torch_ref, path, LLAMA) == message


def test_training_starts_from_the_masters(tmp_path: Path) -> None:
    """llm.c's masters, to the bit on both sides; its narrow copy has other numbers."""
    path = llmc_masters(tmp_path, as_it_is)
    ref = read_by_torch_ref(path, OF_LLMC)
    assert ref["norm.bias"].tobytes() == llmc.drawn(3)["lnfb"].tobytes()
    assert ref["layers.1.mlp.up_proj.weight"].tobytes() == llmc.drawn(3)["fcw"][1].tobytes()


@pytest.mark.parametrize("name", ["ZeRO 2", "ZeRO 3, the folder around", "the Trainer", "Hugging Face"])
def test_both_keep_the_files_beside_the_weights(name: str, tmp_path: Path) -> None:
    """Keeps the source's config.json, tokenizer and dtype for the way back."""
    _, write, _, _ = SOURCES[name]
    path = write(tmp_path, as_it_is)
    around = path if (path / "config.json").exists() else path.parent
    (around / "tokenizer.json").write_text("{}")
    kept, ref = jax_beside(path), ref_beside(path)
    assert kept and ref and kept == ref and kept.files.keys() >= {"config.json", "tokenizer.json"}
    assert kept.dtype == "float32"


def test_both_keep_the_origin_in_a_file_of_jaxdist(tmp_path: Path) -> None:
    write = folder_with(SINGLE)
    source = write(tmp_path, as_it_is)
    (source / "tokenizer.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    convert([str(source), str(tmp_path / "elsewhere/file.pt")])
    kept, ref = jax_beside(tmp_path / "elsewhere/file.pt"), ref_beside(tmp_path / "elsewhere/file.pt")
    assert kept == ref and kept and kept.files["tokenizer.json"] == b"{}" and "config.json" in kept.files
