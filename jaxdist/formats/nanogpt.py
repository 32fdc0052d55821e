"""`model_args` and `config`, which nanoGPT's train.py saves beside weights and optimizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.formats.torch_files import reading

ARGUMENTS, LOOP = "model_args", "config"
SOURCE = f"{ARGUMENTS}, {LOOP}"  # where an experiment of it comes from, in messages
FIELDS = {
    "layers": "n_layer", "heads": "n_head", "dim": "n_embd", "vocab": "vocab_size", "positions": "block_size",
    "bias": "bias",
}  # fmt: skip
LOOP_KEYS = ("learning_rate", "max_iters", "batch_size", "gradient_accumulation_steps", "grad_clip", "decay_lr")
DECAY_KEYS = ("warmup_iters", "lr_decay_iters", "min_lr")
EXACT = "exact"  # GELU of nanoGPT
POLICIES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
}  # by the dtype that it autocasts to


def is_nanogpt(tree: Any) -> bool:
    """Whether nanoGPT saved it."""
    arguments = tree.get(ARGUMENTS) if isinstance(tree, dict) else None
    return isinstance(arguments, dict) and {"n_layer", "n_head", "n_embd"} <= arguments.keys()


def sections(path: Path, tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of an experiment that the file has. Raises ConfigError."""
    arguments = tree[ARGUMENTS]
    if missing := [key for key in FIELDS.values() if key not in arguments and key != "bias"]:
        raise ConfigError(f"{path}: its {ARGUMENTS} have no {', '.join(missing)}; give what nanoGPT saved")
    model = {field: arguments[key] for field, key in FIELDS.items() if key in arguments}
    hidden = 4 * model["dim"] if type(model["dim"]) is int else model["dim"]
    model |= {"family": "gpt2", "hidden": hidden, "tied": True, "gelu": EXACT, "norm_eps": 1e-5}
    with reading(path, LOOP):
        loop = _loop(tree[LOOP]) if has_loop(tree) else {}
    return {"model": model, "data": {"sequence": arguments["block_size"]}, **loop}


def notes(path: Path, tree: Mapping[str, Any]) -> list[str]:
    """Notes on settings of the file's model that are not computed."""
    dropout = tree[ARGUMENTS].get("dropout")
    return [f"{path}: dropout = {dropout} of its {ARGUMENTS} ends here: jaxdist trains without"] if dropout else []


def has_loop(tree: Any) -> bool:
    """Whether it has the settings of its training loop, with the schedule."""
    settings = tree.get(LOOP) if is_nanogpt(tree) else None
    if not isinstance(settings, dict) or not all(key in settings for key in LOOP_KEYS):
        return False
    return not settings["decay_lr"] or all(key in settings for key in DECAY_KEYS)


def _loop(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections train, optimizer and precision.

    Step s of ours is its iteration s - 1, whose warm-up ends, and whose decay does, one step later by our count. Before
    2025 its warm-up began at 0, and was a step behind of today's.
    """
    accumulation, rate = settings["gradient_accumulation_steps"], settings["learning_rate"]
    optimizer: dict[str, Any] = {"learning_rate": rate, "clip": settings["grad_clip"]}
    if settings["decay_lr"]:
        optimizer |= {
            "warmup": settings["warmup_iters"] + 1,
            "decay": "cosine",
            "final": settings["min_lr"] / (rate or 1),
        }
        optimizer |= {"decay_steps": settings["lr_decay_iters"] + 1}
    else:
        optimizer |= {"warmup": 0, "decay": "constant"}
    batch = settings["batch_size"] * accumulation
    policy = POLICIES.get(settings.get("dtype", ""))
    return {
        "train": {"steps": settings["max_iters"], "batch": batch, "accumulation": accumulation},
        "optimizer": optimizer,
    } | ({"precision": {"policy": policy}} if policy else {})
