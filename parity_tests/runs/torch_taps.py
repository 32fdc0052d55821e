"""Record outputs of the modules of a torch model, without changing it. Twin: jax_taps.py, which defines the names."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parity_tests.runs.names import numbered


@contextmanager
def torch_taps(module: nn.Module, note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, `note(path, output)` is called for every module's output, in forward order; its own path is "" """
    calls: Counter[str] = Counter()

    def hook(path: str) -> Callable[..., None]:
        def noted(_: nn.Module, __: Any, y: Any) -> None:
            if isinstance(y, Mapping):
                y = y.get("logits", tuple(y.values()))  # a mixture's come after the loss of its routers
            first = next(iter(y), None) if isinstance(y, tuple | list) else y
            if isinstance(first, Tensor) and torch.is_floating_point(first):
                calls[path] += 1
                note(numbered(path, calls[path]), first)

        return noted

    with ExitStack() as stack:
        for path, part in module.named_modules():
            stack.callback(part.register_forward_hook(hook(path)).remove)
        yield
