"""transformers reads our folders with the same tensors, dtypes and logits, for every family."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdist.config import Model, TrainingError
from jaxdist.config.registry import FAMILIES, resolve
from jaxdist.conftest import often
from jaxdist.convert.convert_test import MODELS, draw, saved
from jaxdist.convert.kinds.hf import write_hf
from jaxdist.convert.verify import probe
from jaxdist.families.resnet.config import ResNet
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.tables import HUGGINGFACE, STATISTICS
from jaxdist.parallel.mesh import make_mesh
from jaxdist.training.program import Program

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
hf_reference = importlib.import_module("jaxdist.convert.hf_reference")

BOUND = 5e-6  # relative L2 distance of float32 logits
IMAGES: dict[str, Any] = {"family": "resnet", "stem": 4, "image": 32, "classes": 7}
ALL: dict[str, Model] = MODELS | {
    "ResNetForImageClassification": ResNet(**IMAGES, block="basic", depths=(1, 1), widths=(4, 8)),
    "ResNetForImageClassification deep": ResNet(**IMAGES, depths=(2, 1, 2), widths=(8, 12, 16)),
}
# A model of each family.
QUICK = (
    *("LlamaForCausalLM biases", "Qwen3ForCausalLM biases window", "GPT2LMHeadModel", "MixtralForCausalLM"),
    *("Qwen3MoeForCausalLM", "ResNetForImageClassification deep"),
)


def drawn(model: Model) -> dict[str, np.ndarray]:
    """Random weights; batch norms get no negative variance, and integer counts."""
    parameters = draw(model)
    for name, array in parameters.items():
        if name.endswith(STATISTICS):
            parameters[name] = np.abs(array) if array.ndim else np.array(3, np.int32)
    return parameters


def read(folder: Path, model: Model) -> tuple[Any, Any]:
    """transformers' model, and its report on loading."""
    if model.input_kind == "images":
        return transformers.AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto", **eager)


def error(folder: Path, model: Model, parameters: dict[str, np.ndarray]) -> float:
    """Relative L2 distance of transformers' logits from our program's."""
    inputs, experiment = probe(model), experiment_for(model.model_dump(), "test")
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    ours = program.logits({name: jnp.asarray(array) for name, array in parameters.items()}, inputs)
    images = model.input_kind == "images"
    batch = torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy() if images else inputs.astype(np.int64))
    with torch.no_grad():
        theirs = read(folder, model)[0].eval()(batch).logits.numpy()
    assert np.array_equal(hf_reference.logits(folder, inputs), theirs)
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))


@pytest.mark.long
@pytest.mark.parametrize("name", often(ALL, QUICK))
def test_transformers_reads_written_folders(name: str, tmp_path: Path) -> None:
    model, parameters = ALL[name], drawn(ALL[name])
    loaded, report = read(saved(tmp_path / "hf", model, parameters), model)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded).__name__ == name.split()[0] and str(loaded.dtype) == "torch.float32"
    assert error(tmp_path / "hf", model, parameters) < BOUND


def test_a_dtype_that_is_written(tmp_path: Path) -> None:
    model = MODELS["Qwen3ForCausalLM"]
    loaded, _ = read(saved(tmp_path / "hf", model, draw(model, ml_dtypes.bfloat16)), model)
    assert type(loaded).__name__ == "Qwen3ForCausalLM" and str(loaded.dtype) == "torch.bfloat16"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("LlamaForCausalLM", "k_proj", "v_proj"),
        ("MixtralForCausalLM", "w1", "w3"),
        pytest.param("Qwen3MoeForCausalLM", "gate_proj", "up_proj", marks=pytest.mark.slow),
        pytest.param("GPT2LMHeadModel", "ln_1", "ln_2", marks=pytest.mark.slow),
        pytest.param("ResNetForImageClassification deep", "running_mean", "bias", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_in_a_table_is_found(
    name: str, a: str, b: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: two of their names are swapped, except in the head."""
    model, parameters = ALL[name], drawn(ALL[name])
    tables, names = resolve(FAMILIES[model.family].tables), {a: b, b: a}
    table = tables[HUGGINGFACE]

    def swapped(theirs: str) -> str:
        return theirs if theirs.startswith(table.head) else ".".join(names.get(x, x) for x in theirs.split("."))

    rows = [row._replace(theirs=swapped(row.theirs)) for row in table.rows]
    monkeypatch.setitem(tables, HUGGINGFACE, table._replace(rows=rows))
    write_hf(tmp_path / "hf", model, parameters)
    assert error(tmp_path / "hf", model, parameters) > 1e-3


def test_folders_that_transformers_cannot_read_are_reported(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hf", MODELS["GPT2LMHeadModel"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(TrainingError, match=r"cannot compute the logits of \S+hf: OSError: .*Leave out --verify"):
        hf_reference.logits(folder, probe(MODELS["GPT2LMHeadModel"]))


@pytest.mark.parametrize("implementation", ["a-hub/kernel", "flash_attention_2"])
def test_a_config_chooses_no_other_program(implementation: str, tmp_path: Path) -> None:
    """A kernel would be downloaded from the Hub, and flash attention needs a GPU."""
    model = MODELS["LlamaForCausalLM"]
    folder = saved(tmp_path / "hf", model)
    right, file = hf_reference.logits(folder, probe(model)), folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_attn_implementation": implementation}))
    assert np.array_equal(hf_reference.logits(folder, probe(model)), right)
