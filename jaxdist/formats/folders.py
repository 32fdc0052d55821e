"""Folders that common torch trainers write, recognized by their files, and the files that are only a part of one."""

import re
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import ConfigError
from jaxdist.config.bounded import file_within, read_bytes
from jaxdist.formats.foreign import GGUF, INDEX, SINGLE, indexed

BIN, BIN_INDEX, CONFIG = "pytorch_model.bin", "pytorch_model.bin.index.json", "config.json"


def is_hf(path: Path) -> bool:
    """Whether `path` is a folder with config.json and safetensors weights."""
    return (path / CONFIG).is_file() and any(path.glob("*.safetensors"))


def is_bin_folder(path: Path) -> bool:
    """Whether `path` is a folder with config.json and weights as pytorch_model.bin, in one file or in shards."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in (BIN, BIN_INDEX))


def bin_files(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The files of weights of such a folder, and tensor -> file as their index has it, if it goes by one.

    transformers takes a single file before an index, too. Raises ConfigError.
    """
    index = None if (path / BIN).exists() else indexed(path, BIN_INDEX)
    try:
        return ([file_within(path, BIN)] if index is None else sorted({*index.values()})), index
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; give a folder with its files in it") from None


TRAINER_STATE = "trainer_state.json"
FSDP_WEIGHTS, FSDP_FILE, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "optimizer_0"
OPTIMIZERS, SCHEDULERS, SCALER = ("optimizer.pt", "optimizer.bin"), ("scheduler.pt", "scheduler.bin"), "scaler.pt"
WEIGHTS = (FSDP_WEIGHTS, SINGLE, INDEX, BIN, BIN_INDEX, FSDP_FILE)


def is_trainer_folder(path: Path) -> bool:
    """Whether `path` is a checkpoint of transformers' Trainer or of Accelerate: weights with a trainer's state."""
    state = (TRAINER_STATE, *OPTIMIZERS, FSDP_OPTIMIZER, FSDP_WEIGHTS, FSDP_FILE)
    return any((path / name).exists() for name in WEIGHTS) and any((path / name).exists() for name in state)


def trainer_state_files(file: Path) -> list[str]:
    """Trainer state in files beside a file of weights."""
    names = (*OPTIMIZERS, FSDP_OPTIMIZER, *SCHEDULERS, TRAINER_STATE)
    return [name for name in names if name != file.name and (file.parent / name).exists()]


LATEST, DEEPSPEED_UNSHARDED = "latest", "mp_rank_00_model_states.pt"
DEEPSPEED_MODEL, DEEPSPEED_OPTIMIZER = "*mp_rank_*_model_states.pt", "*_optim_states.pt"
DEEPSPEED_EXPERTS = "*expert_*_mp_rank_*_model_states.pt"  # layer_0_expert_3_..., or of older ones expert_3_...
DEEPSPEED_UNIVERSAL = "zero"  # the folder with the parameters of a universal checkpoint
DEEPSPEED_PARTS = (
    *(DEEPSPEED_OPTIMIZER, DEEPSPEED_UNSHARDED, DEEPSPEED_EXPERTS, "layer_*-model_states.pt"),
    f"{DEEPSPEED_UNIVERSAL}/optimizer_state.pt",
)
DEEPSPEED = f"all {DEEPSPEED_MODEL} and {DEEPSPEED_OPTIMIZER}"
LONGEST = 255  # bytes of the name of a folder, in `latest`


def deepspeed_tag(path: Path) -> Path | None:
    """The folder of a DeepSpeed checkpoint: `path`, or the one in it that its file `latest` names; else None."""
    if _is_deepspeed_tag(path):
        return path
    try:
        found = file_within(path, read_bytes(path / LATEST, LONGEST).decode().strip())
    except (OSError, ValueError):
        return None
    return found if _is_deepspeed_tag(found) else None


def is_deepspeed(path: Path) -> bool:
    """Whether `path` is a DeepSpeed checkpoint, or the folder around one that its file `latest` names."""
    return deepspeed_tag(path) is not None


def _is_deepspeed_tag(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in DEEPSPEED_PARTS)


class PartFile(NamedTuple):
    """A file that holds a part of a checkpoint: the pattern of its name, what it is, what its folder must have, and a
    pattern of what must lie beside it, for it to be one."""

    name: re.Pattern[str]
    title: str
    needs: str
    sibling: str = ""

    def holds(self, path: Path) -> bool:
        """Whether `path` is one."""
        return bool(self.name.fullmatch(path.name)) and (not self.sibling or any(path.parent.glob(self.sibling)))


_SHARD = "one of several shards of a model's weights"
PART_FILES = (
    PartFile(re.compile(r"pytorch_model-\d+-of-\d+\.bin"), _SHARD, f"config.json, {BIN_INDEX} and all shards"),
    PartFile(
        re.compile(r"model-\d+-of-\d+\.safetensors"), _SHARD, "config.json, model.safetensors.index.json and all shards"
    ),
    PartFile(
        re.compile(r".*\.(bin|safetensors)\.index\.json"),
        "the index of a model's shards, without weights",
        "config.json and all shards",
    ),
    PartFile(
        re.compile(r"optimizer(_\d+)?\.(pt|bin)"),
        "the optimizer's state of a trainer, without weights",
        "the weights too",
    ),
    PartFile(re.compile(r".*_optim_states\.pt"), "one DeepSpeed rank's shard of fp32 weights and moments", DEEPSPEED),
    PartFile(
        re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"),
        "one expert of DeepSpeed's mixtures",
        DEEPSPEED,
    ),
    PartFile(
        re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt"),
        "one DeepSpeed ZeRO-3 rank's model file: placeholders without weights",
        DEEPSPEED,
    ),
    PartFile(
        re.compile(r"mp_rank_\d+_model_states\.pt"),
        "DeepSpeed's copy of a model's weights, which has neither their fp32 values nor moments",
        DEEPSPEED,
        sibling=DEEPSPEED_OPTIMIZER,
    ),
    PartFile(re.compile(r"scheduler(_\d+)?\.(pt|bin)"), "the state of a trainer's schedule", "the weights too"),
    PartFile(
        re.compile(r"training_args\.bin|rng_state(_\d+)?\.pth|random_states_\d+\.pkl"),
        "no checkpoint, but files that a trainer keeps next to one",
        "the weights too",
    ),
)


def part_of(path: Path) -> PartFile | None:
    """The complete file that `path` is a part of, by its name; None if it is complete."""
    return next((part for part in PART_FILES if part.holds(path)), None) if path.is_file() else None


# Formats of weights that are not read: the pattern of a file's name, and what it is.
UNREADABLE = (
    (re.compile(r".*\.(gguf|ggml)", re.I), GGUF),
    (re.compile(r".*\.msgpack", re.I), "a msgpack file of flax"),
    (re.compile(r".*\.(h5|keras|tflite)", re.I), "a model of TensorFlow or Keras"),
    (re.compile(r".*\.onnx(_data)?", re.I), "a graph of ONNX"),
    (re.compile(r".*\.nemo", re.I), "an archive of NeMo"),
    (re.compile(r".*\.(mlmodel|mlpackage)", re.I), "a model of Core ML"),
)


def unreadable(path: Path) -> str:
    """The unsupported format of `path`, or of the first such file in a folder; "" if there is none."""
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else [path.name] if path.is_file() else []
    return next((title for name in names for pattern, title in UNREADABLE if pattern.fullmatch(name)), "")
