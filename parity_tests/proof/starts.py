"""Starting weights that differ from the given ones: perturbed, or those of a model with another value of a field."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxdist.convert.kinds.hf import read_hf, write_hf
from parity_tests.proof.caveats import GELU
from parity_tests.runs import compare


def perturbed(start: Path, folder: Path) -> Path:
    """Writes the weights of `start` in float64, each off by about 64 roundings, as a sum of 4096 terms may be, to
    `folder` unless it is there, and returns it."""
    if not folder.exists():
        shutil.copytree(start, folder)
        random = np.random.default_rng(0)
        for file in folder.glob("*.safetensors"):
            found = load_file(file)
            arrays = {name: w.astype(np.float64) for name, w in found.items() if w.dtype.kind not in "iu"}
            counts = {name: w for name, w in found.items() if name not in arrays}
            off = {n: w * (1 + compare.PERTURBATION * random.standard_normal(w.shape)) for n, w in arrays.items()}
            save_file(off | counts, file)
    return folder


def with_changed_field(start: Path, folder: Path, field: str) -> Path:
    """Writes the weights of `start` as those of a model with a tenth of its `norm_eps` or with the other `gelu`, as
    `field` says, to `folder` unless it is there, and returns it."""
    if not folder.exists():
        model, parameters = read_hf(start)
        value = model.norm_eps / 10 if field == "norm_eps" else GELU[model.gelu]
        write_hf(folder, model.model_copy(update={field: value}), parameters)
    return folder
