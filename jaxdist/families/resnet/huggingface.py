"""A ResNet's names in other formats: config.json, and the tensors of each naming. Neutral."""

from typing import Any

from jaxdist.config.errors import ConfigError
from jaxdist.formats.hf_decisions import EVERY, HONOURED, NONE, HuggingFace, ModelType, each, fixed, read
from jaxdist.formats.hf_keys import COUNT, COUNTS, TABLE, Key, Settings, value, values
from jaxdist.formats.tables import STATISTICS, Table, TensorRow, linear, norm

ARCHITECTURE = "ResNetForImageClassification"
KEYS = {
    "channels": Key("num_channels", COUNT, 3),
    "stem": Key("embedding_size", COUNT, 64),
    "widths": Key("hidden_sizes", COUNTS, [256, 512, 1024, 2048]),
    "depths": Key("depths", COUNTS, [3, 4, 6, 3]),
}
CLASSES = Key("id2label", TABLE, {})  # left out, num_labels counts
LABELS = Key("num_labels", COUNT, 2)
BATCH_NORM_EPS = 1e-5  # no key of theirs
DECISIONS = {
    **EVERY,
    **read(KEYS),
    **each(HONOURED, "id2label num_labels"),
    "layer_type": fixed("basic", "bottleneck"),
    **each(NONE, "stage_names out_features out_indices tie_word_embeddings"),
    "hidden_act": fixed("relu"),
    **each(fixed(False), "downsample_in_first_stage downsample_in_bottleneck"),
}


def _read(settings: Settings) -> Settings:
    """The fields of the model section. Raises ConfigError."""
    found = values(settings, KEYS)
    classes = len(value(settings, *CLASSES)) or value(settings, *LABELS)
    return {"block": settings.get("layer_type", "bottleneck"), **found, "classes": classes}


def _write(model: Any) -> Settings:
    """Raises ConfigError."""
    if model.norm_eps != BATCH_NORM_EPS:
        raise ConfigError(
            f"model.norm_eps = {model.norm_eps}: {ARCHITECTURE} has {BATCH_NORM_EPS} always; keep the weights as an "
            "Orbax checkpoint"
        )
    settings = {key.name: getattr(model, field) for field, key in KEYS.items()}
    labels = {str(i): f"LABEL_{i}" for i in range(model.classes)}
    named: Settings = {"architectures": [ARCHITECTURE], "model_type": "resnet", "layer_type": model.block}
    named |= {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    named |= {"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False}
    return named | {CLASSES.name: labels, "label2id": {label: int(i) for i, label in labels.items()}}


NAMES = {field: key.name for field, key in KEYS.items()}
HUGGINGFACE = HuggingFace({"resnet": ModelType(ARCHITECTURE, DECISIONS, _read, NAMES)}, _write)


def _conv_norm(ours: str, conv: str, norm_: str) -> list[TensorRow]:
    """torch.nn.Conv2d and BatchNorm2d: a kernel is (out, in, Y, X), ours (Y, X, in, out)."""
    kernel = TensorRow((f"{ours}.conv.kernel",), f"{conv}.weight", transpose=True)
    running = [TensorRow((f"{ours}.norm.{name}",), f"{norm_}.{name}") for name in STATISTICS]
    return [kernel, *norm(f"{ours}.norm", norm_), *running]


def _in_transformers(ours: str, theirs: str) -> list[TensorRow]:
    return _conv_norm(ours, f"{theirs}.convolution", f"{theirs}.normalization")


BLOCK, THEIR_BLOCK = "stages.{stage}.{block}", "resnet.encoder.stages.{stage}.layers.{block}"
VISION_BLOCK = "layer{number}.{block}"
TABLES: dict[str, Table] = {
    "huggingface": Table(
        [
            *_in_transformers("stem", "resnet.embedder.embedder"),
            *_in_transformers(f"{BLOCK}.shortcut", f"{THEIR_BLOCK}.shortcut"),
            *[r for i in range(3) for r in _in_transformers(f"{BLOCK}.layer.{i}", f"{THEIR_BLOCK}.layer.{i}")],
            *linear("head", "classifier.1"),
        ],
        head="classifier.",
        prefix="resnet.",
    ),
    # torchvision's names, which most scripts have.
    "torchvision": Table(
        [
            *_conv_norm("stem", "conv1", "bn1"),
            *_conv_norm(f"{BLOCK}.layer.0", f"{VISION_BLOCK}.conv1", f"{VISION_BLOCK}.bn1"),
            *_conv_norm(f"{BLOCK}.layer.1", f"{VISION_BLOCK}.conv2", f"{VISION_BLOCK}.bn2"),
            *_conv_norm(f"{BLOCK}.layer.2", f"{VISION_BLOCK}.conv3", f"{VISION_BLOCK}.bn3"),
            *_conv_norm(f"{BLOCK}.shortcut", f"{VISION_BLOCK}.downsample.0", f"{VISION_BLOCK}.downsample.1"),
            *linear("head", "fc"),
        ],
        head="fc.weight",
    ),
}
