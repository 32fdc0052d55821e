"""Records of single steps for a comparison with another run, and the names that both sides use.

`record/<step>.safetensors` in the run folder holds arrays `<kind>/<name>`, those of a kind in the order in which they
arise, which its metadata list. Kinds, and what they are named by:

| kind | name | value |
|---|---|---|
| `batch` | tokens, targets, or images, targets | the global batch, [B, T], or [B, Y, X, C] and [B] |
| `start` | parameter | weights before the step |
| `activation` | module, in forward order | its output, over the global batch |
| `scalar` | loss, grad_norm | as in metrics.jsonl |
| `activation_gradient` | module, in backward order | gradient of the loss by that output |
| `gradient` | parameter | summed over the global batch, before the clip |
| `clipped` | parameter | after it |
| `exp_avg`, `exp_avg_sq`, `momentum_buffer` | parameter | what its optimizer keeps, after the step |
| `row_var`, `col_var`, `variance` | parameter | the same, of Adafactor |
| `weights` | parameter | after the step |
| `ema` | parameter | the moving average of the weights after the step |

Modules are named by their path, which the twins share; what a module passes through a tap of its
own, `Parallel.tap` in JAX and an `nn.Identity` in torch, is named by the module and the tap: `q_rotated`, `k_rotated`
and `attended` of attention; the model's output is `logits`. `gradients` keeps gradient, and scalar
where a side has it beside metrics.jsonl.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdist.config.errors import ConfigError
from jaxdist.config.optimizer import state_kinds
from jaxdist.config.section import Counts, Section

LOGITS = "logits"


def record_kinds() -> tuple[str, ...]:
    """All kinds of arrays."""
    before = ("batch", "start", "activation", "scalar", "activation_gradient", "gradient", "clipped")
    return (*before, *state_kinds(), "weights")


Steps = Counts


class Record(Section):
    """Tensors of single steps, kept for a comparison."""

    steps: Steps = ()
    """Steps whose tensors are saved in record/<step>.safetensors, as 1,20; empty: none."""
    tensors: Literal["gradients", "all"] = "gradients"
    """Tensors that are saved. gradients: every parameter's gradient, before the clip; all: also batch, activations,
    moments and weights."""


def write_record(folder: Path, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `arrays`, in their order, as the record of `step` in a run folder; bfloat16 as float32."""
    file = folder / "record" / f"{step}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    # numpy has no bfloat16: its kind there is V, an opaque type
    wide = {n: a.astype(np.float32) if a.dtype.kind == "V" else a for n, a in arrays.items()}
    save_file({n: np.ascontiguousarray(a) for n, a in wide.items()}, file, metadata={"order": json.dumps(list(wide))})


def read_record(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a record in their order. Raises ConfigError."""
    try:
        with safe_open(file, framework="numpy") as stream:
            order = json.loads((stream.metadata() or {}).get("order", "null")) or list(stream.keys())
            return {name: stream.get_tensor(name) for name in order}
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:  # numpy has not all dtypes
        raise ConfigError(f"{file} is damaged: {error}; make the run again") from None
