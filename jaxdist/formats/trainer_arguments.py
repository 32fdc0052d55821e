"""Arguments of transformers' Trainer, from training_args.bin: a pickle of a TrainingArguments.

Nothing that the pickle names is imported or called: placeholders replace all classes, and only plain values are taken.
"""

import io
from pathlib import Path
from typing import Any

from jaxdist.formats.pickles import Careful
from jaxdist.formats.torch_zips import is_zip, open_zip

FILE = "training_args.bin"
NUMBER = (int, float)
TYPES: dict[str, tuple[type, ...]] = {
    "per_device_train_batch_size": (int,), "gradient_accumulation_steps": (int,), "max_grad_norm": NUMBER,
    "bf16": (bool,), "fp16": (bool,), "warmup_steps": NUMBER, "warmup_ratio": NUMBER, "lr_scheduler_type": (str,),
    "lr_scheduler_kwargs": (dict,), "optim": (str,), "learning_rate": NUMBER, "weight_decay": NUMBER,
    "adam_beta1": NUMBER, "adam_beta2": NUMBER, "adam_epsilon": NUMBER,
}  # fmt: skip


class Thing:
    """Placeholder of a class or an object, with the arguments of its constructor and its state."""

    def __init__(self, arguments: Any = ()) -> None:
        self.arguments, self.state = arguments, dict[Any, Any]()


class Reader(Careful):
    """Reads a pickle of any classes. Raises ValueError, and whatever else a damaged one leads to."""

    def find_class(self, module: str, name: str) -> Any:
        return Thing()

    def persistent_load(self, pid: Any) -> Any:
        return Thing()

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.charge(arguments)
        self.stack[-1] = Thing(arguments)

    load_newobj = load_reduce

    def load_build(self) -> None:
        state = self.stack.pop()
        self.charge(state)
        if isinstance(thing := self.stack[-1], Thing) and isinstance(state, dict):
            thing.state = state


def read(folder: Path) -> dict[str, Any]:
    """The arguments in a folder that TYPES lists, members of an Enum as their values; empty where none can be read."""
    try:
        if not is_zip(folder / FILE):
            return {}
        pickle, _ = open_zip(folder / FILE)
        found = Reader(io.BytesIO(pickle), len(pickle)).load()
    except Exception:  # of a file that is missing, damaged or hostile, many kinds: it stays behind, by name
        return {}
    state = found.state if isinstance(found, Thing) else {}
    values = {key: _plain(state[key]) for key in TYPES if key in state}
    return {key: value for key, value in values.items() if type(value) in TYPES[key]}


def _plain(value: Any) -> Any:
    """The value of an Enum member, which is constructed from it; other values unchanged."""
    arguments = value.arguments if isinstance(value, Thing) else ()
    return arguments[0] if isinstance(arguments, tuple) and arguments else value
