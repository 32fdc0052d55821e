"""LoRA adapters of PEFT, merged into the weights of their base model: W + scale · B A (arXiv:2106.09685)."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.config.errors import shown
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves
from jaxdist.convert.mappings.atoms import Shape
from jaxdist.convert.stream import cast
from jaxdist.formats.adapters import CONFIG, settings_of
from jaxdist.formats.safetensors_files import Tensors, leaves
from jaxdist.formats.tables import HUGGINGFACE, table_of

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
# Settings that are honoured, and those that say how an adapter was trained and not how it is added. All others that are
# set are refused by name.
PATTERNS = {"lora_alpha": "alpha_pattern", "r": "rank_pattern"}  # setting -> its values by patterns of modules' names
HONOURED = (*PATTERNS, *PATTERNS.values(), "peft_type", "fan_in_fan_out", "use_rslora", "init_lora_weights")
WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "target_modules", "task_type", "velora_config",
)  # fmt: skip
# Other ways to begin, as PiSSA and OLoRA, take what they begin with off the base, so that the sum is another.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
MOST = 1e30  # of lora_alpha
SLOW = re.compile(r"\)[*+?{]|([*+{].*){4}", re.DOTALL)  # what may compare with a name for longer than anybody waits
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?")


class Pair(NamedTuple):
    """The term added to a base tensor: scale · B A with B [O, r] and A [r, I]; `turned` if the tensor is [I, O]."""

    a: Leaf
    b: Leaf
    scale: float
    turned: bool

    @property
    def shape(self) -> Shape:
        """The shape of the base's tensor."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.turned else shape

    def change(self, weight: np.ndarray) -> np.ndarray:
        """The weight with the product added, computed in float32 at least."""
        wide = np.result_type(weight.dtype, np.float32)
        delta = wide.type(self.scale) * (self.b.read().astype(wide) @ self.a.read().astype(wide))
        return weight.astype(wide) + (delta.T if self.turned else delta)


class Saved(NamedTuple):
    """A tensor that was fully trained, which takes the place of the base's (modules_to_save)."""

    leaf: Leaf

    @property
    def shape(self) -> Shape:
        return self.leaf.shape

    def change(self, weight: np.ndarray) -> np.ndarray:
        return self.leaf.read()


def merged(base: Content, source: Path, adapter: Path, read_torch: Callable[[Path], Leaves]) -> Content:
    """The base model with an adapter merged into its weights. Raises ConfigError, also where a tensor of the adapter
    belongs to no tensor of the base. `read_torch` reads a file of torch.save's."""
    if base.naming != HUGGINGFACE:
        raise ConfigError(
            f"--adapter {adapter}: SOURCE {source} has other names than transformers; give a Hugging Face folder"
        )
    settings, tensors = settings_of(adapter), _tensors(adapter, read_torch)
    _check(adapter, settings)
    weights = dict(base.groups[PARAMETERS])
    inside = {base.origin.names.get(name, name): name for name in weights} | {name: name for name in weights}
    model = base.experiment.model
    tied = table_of(HUGGINGFACE, model).head if model.tied else ""
    for name, change in _changes(adapter, settings, tensors):
        target = _target(adapter, name, inside, tied)
        before = weights[target]
        if change.shape != before.shape:
            raise ConfigError(
                f"{adapter}: {name} is of a tensor {change.shape}, and {target} of {source} is {before.shape}; give "
                "the model that the adapter was trained on"
            )
        read = partial(_read, change, before, f"{adapter}: {name}")
        weights[target] = replace(before, read=read, place=None, besides=2 * before.bytes)
    return replace(base, groups={**base.groups, PARAMETERS: weights})


def _check(adapter: Path, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError, naming every setting by which an adapter would not be B A times its scale."""
    wrong = [key for key in settings if settings[key] and key not in (*HONOURED, *WITHOUT_EFFECT)]
    wrong += [key for key, allowed in (("peft_type", ("LORA",)), ("init_lora_weights", BEGINNINGS))
              if settings.get(key) not in allowed]  # fmt: skip
    if wrong:
        listing = ", ".join(f"{key} = {shown(settings.get(key))}" for key in wrong)
        raise ConfigError(f"{adapter}: {listing}: not merged here; merge it by PEFT's merge_and_unload")
    for default, name in PATTERNS.items():
        patterns = settings.get(name) or {}
        if not isinstance(patterns, dict):
            raise ConfigError(f"{adapter / CONFIG}: {name} = {shown(patterns)}; give numbers by names of modules")
        for key, number in {default: settings.get(default), **patterns}.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < MOST:
                raise ConfigError(f"{adapter / CONFIG}: {key} = {shown(number)}; give a number below {MOST:g}")
        if wrong := [key for key in patterns if not _is_pattern(key)]:
            raise ConfigError(
                f"{adapter / CONFIG}: {name} has {shown(wrong[0])}, no pattern of a module's name that is read "
                "here; merge it by PEFT's merge_and_unload"
            )


def _is_pattern(key: str) -> bool:
    """Whether a pattern can be compared with a name at once: without groups that are repeated, and few repetitions."""
    try:
        re.compile(key)
    except (re.error, RecursionError, OverflowError):
        return False
    return not SLOW.search(key)


def _read(change: Pair | Saved, before: Leaf, name: str) -> np.ndarray:
    """The changed tensor in the dtype of the base. Raises ConfigError for values that the adapter's tensor `name` makes
    infinite or NaN."""
    weight = before.read()
    changed = np.ascontiguousarray(change.change(weight))
    if not np.isfinite(changed).all() and np.isfinite(weight).all():
        raise ConfigError(f"{name} makes finite weights infinite or NaN; give an adapter whose values are finite")
    return cast(name, changed, before.dtype)


def _target(adapter: Path, name: str, inside: Mapping[str, str], tied: str) -> str:
    """The tensor of the base that a tensor of the adapter changes. `tied`: the head of a base that ties it, or empty.

    Raises ConfigError where there is none."""
    bare = name.removeprefix(PREFIX).replace(".base_layer.", ".")  # a table that is saved beside its factors
    for found in (bare, f"{bare}.weight"):
        if found in inside:
            return inside[found]
    if tied and tied in (bare, f"{bare}.weight"):
        raise ConfigError(
            f"{adapter}: {name} is of a head that the base model ties to its embedding: not merged here; merge it by "
            "PEFT's merge_and_unload into a model with tie_word_embeddings = false"
        )
    raise ConfigError(f"{adapter}: tensor {name} belongs to no tensor of the base model; give the adapter's own base")


def _changes(adapter: Path, settings: Mapping[str, Any], tensors: Leaves) -> Iterator[tuple[str, Pair | Saved]]:
    """Each name of the base, with PREFIX, and what changes there. Raises ConfigError for a factor that is alone."""
    pairs: dict[tuple[str, bool], dict[str, Leaf]] = defaultdict(dict)
    for name, leaf in tensors.items():
        if match := FACTOR.fullmatch(name):
            pairs[match[1], bool(match[2])][match[3]] = leaf
        else:
            yield name, Saved(leaf)
    for (module, embedding), pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise ConfigError(f"{adapter}: {module} has lora_{next(iter(pair))} alone; give a complete adapter")
        turned = embedding or bool(settings.get("fan_in_fan_out"))
        ranks = pair["A"].shape[0], pair["B"].shape[1], _own(settings, module, "r")
        if len({*ranks}) > 1:
            raise ConfigError(
                f"{adapter}: {module} has lora_A of rank {ranks[0]} and lora_B of rank {ranks[1]}, where {CONFIG} has "
                f"{ranks[2]} (r, rank_pattern); give the files of one adapter"
            )
        yield module, Pair(pair["A"], pair["B"], _scale(settings, module, ranks[0]), turned)


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """lora_alpha / r, or / sqrt(r) (arXiv:2312.03732), with the module's own alpha where a pattern names one."""
    alpha = float(_own(settings, module, "lora_alpha"))
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def _own(settings: Mapping[str, Any], module: str, name: str) -> Any:
    """The setting `name` of a module: that of the first of its PATTERNS that the module's name matches, if any."""
    bare, patterns = module.removeprefix(PREFIX), settings.get(PATTERNS[name]) or {}
    own = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", bare))
    return next(own, settings[name])


def _tensors(path: Path, read_torch: Callable[[Path], Leaves]) -> Leaves:
    file = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise ConfigError(f"{path}: neither {' nor '.join(WEIGHTS)}; give a folder that PEFT's save_pretrained wrote")
    return leaves(Tensors(file)) if file.suffix == ".safetensors" else read_torch(file)
