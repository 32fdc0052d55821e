"""Narrowest dtype of a step's precision-sensitive operations: softmax, norms, rotation and the loss.

An error in them is smaller than that of bfloat16 elsewhere: no loss curve of a bf16 run shows it, though some models
train worse. The dispatcher, which every operation passes, shows it at once, where it is written with these functions: a
norm that divides by a square root cannot be distinguished from Adam, which does too, and fused kernels compute in
float32 inside, whatever their inputs.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ref.runtime.compat import TorchDispatchMode

DELICATE = ("exp", "exp2", "log", "log1p", "rsqrt", "cos", "sin", "_softmax", "_log_softmax", "logsumexp")


class Arithmetic(TorchDispatchMode):
    """Within it, notes of each function the narrowest dtype that it puts out; fused kernels keep theirs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes back as the local tensors' operations
        result = func(*args, **(kwargs or {}))
        if (name := func.overloadpacket.__name__) in DELICATE:
            dtype = result.dtype
            self.dtypes[name] = max(self.dtypes.get(name, dtype), dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result

    def narrowest(self) -> dict[str, str]:
        """function -> dtype."""
        return {name: str(dtype).removeprefix("torch.") for name, dtype in sorted(self.dtypes.items())}
