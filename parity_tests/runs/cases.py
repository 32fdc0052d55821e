"""Cases to compare: models, meshes and strategies, accumulation and rematerialization."""

import json
from pathlib import Path
from typing import Any

import numpy as np

# Sizes all differ, so that a swapped pair cannot pass; the initial weights are large enough to matter.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama", "layers": 2, "dim": 40, "heads": 12, "kv_heads": 4, "head_dim": 8, "hidden": 56,
        "vocab": 256, "positions": 64, "qk_norm": True, "qkv_bias": True, "output_bias": True, "init_std": 0.1,
        "rope_scaling": "llama3", "rope_original_positions": 16, "window": 20,
    },
    "gpt2": {
        "family": "gpt2", "layers": 2, "dim": 40, "heads": 4, "hidden": 56, "vocab": 256, "positions": 44,
        "init_std": 0.1,
    },
}  # fmt: skip

# Three of eight experts, an uneven share; if nearly all were chosen, balance and order would not matter.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "family": "mixtral", "layers": 2, "dim": 40, "heads": 12, "kv_heads": 4, "head_dim": 8, "hidden": 24,
        "vocab": 256, "positions": 64, "init_std": 0.1, "window": 20, "experts": 8, "top_k": 3, "balance": 0.05,
    },
    "qwen3_moe": {
        "family": "qwen3_moe", "layers": 2, "dim": 40, "heads": 12, "kv_heads": 4, "head_dim": 8, "hidden": 24,
        "vocab": 256, "positions": 64, "init_std": 0.1, "qk_norm": True, "norm_topk_prob": False, "experts": 8,
        "top_k": 3, "balance": 0.05, "capacity": 1.0,
    },
}  # fmt: skip

# Classes that no mesh divides: the head's bias is replicated.
IMAGES: dict[str, Any] = {
    "family": "resnet", "block": "bottleneck", "depths": [2, 1], "widths": [32, 48], "stem": 8, "channels": 3,
    "image": 12, "classes": 6, "init_std": 0.1,
}  # fmt: skip

MESHES: dict[str, dict[str, Any]] = {
    "1x1": {"mesh": "1x1"},
    "ddp": {"mesh": "4x1", "strategy": "ddp"},
    "zero1": {"mesh": "4x1", "strategy": "zero1"},
    "zero2": {"mesh": "4x1", "strategy": "zero2"},
    "fsdp": {"mesh": "4x1", "strategy": "fsdp"},
    "fsdp-kept": {"mesh": "4x1", "parallel.reshard_after_forward": False},
    "fsdp-offload": {
        "mesh": "4x1", "memory.offload": "optimizer,parameters,activations", "memory.remat": "full",
    },
    "zero2-offload": {"mesh": "4x1", "strategy": "zero2", "memory.offload": "optimizer,parameters"},
    "2x2x2-offload": {"mesh": "data=2,fsdp=2,tensor=2", "memory.offload": "optimizer,parameters"},
    "hybrid": {"mesh": "data=2,fsdp=2"},
    "hybrid-zero1": {"mesh": "data=2,fsdp=2", "strategy": "zero1"},
    "tensor": {"mesh": "1x4"},
    "2x4": {"mesh": "2x4"},
    "2x2x2": {"mesh": "data=2,fsdp=2,tensor=2"},
    "sequence": {"mesh": "2x2", "parallel.sequence": True},
    "ring": {"mesh": "fsdp=2,context=2"},
    "ring-zero1": {"mesh": "data=2,context=2", "strategy": "zero1"},
    "ring-tensor": {"mesh": "context=2,tensor=2", "parallel.sequence": True},
    "ulysses": {"mesh": "context=4", "parallel.context": "ulysses"},
}  # fmt: skip

EXPERT_MESHES: dict[str, dict[str, Any]] = {
    "fsdp, full, accumulation": {"mesh": "fsdp=2,expert=2", "memory.remat": "full", "train.accumulation": 2},
    "ddp": {"mesh": "data=2,expert=2", "strategy": "ddp"},
    "tensor zero2": {"mesh": "expert=2,tensor=2", "strategy": "zero2"},
    "sequence, full": {"mesh": "expert=2,tensor=2", "parallel.sequence": True, "memory.remat": "full"},
    "context": {"mesh": "fsdp=2,expert=2,context=2"},
    "hybrid, selective": {"mesh": "data=2,fsdp=2,expert=2", "memory.remat": "selective"},
    "kept": {"mesh": "fsdp=2,expert=4", "parallel.reshard_after_forward": False},
}

# Four layers, so that each of two stages can have two parts.
DEEP = {
    "llama, 4 layers": MODELS["llama"] | {"layers": 4, "tied": False},
    "gpt2, 4 layers": MODELS["gpt2"] | {"layers": 4, "tied": True},
}

INTERLEAVED = {"parallel.pipeline_schedule": "Interleaved1F1B", "parallel.virtual_stages": 2}
PIPELINES: dict[str, dict[str, Any]] = {
    "GPipe": {"mesh": "pipeline=2", "parallel.pipeline_schedule": "GPipe", "train.accumulation": 4},
    "1F1B": {"mesh": "pipeline=4", "train.accumulation": 8},
    "interleaved": {"mesh": "pipeline=2", "train.accumulation": 4, **INTERLEAVED},
    "fsdp": {"mesh": "pipeline=2,fsdp=2", "train.accumulation": 4, "memory.remat": "full"},
    "fsdp, GPipe": {
        "mesh": "pipeline=2,fsdp=2", "train.accumulation": 2, "parallel.pipeline_schedule": "GPipe",
    },
    "fsdp, interleaved": {"mesh": "pipeline=2,fsdp=2", "train.accumulation": 4, **INTERLEAVED},
    "tensor": {"mesh": "pipeline=2,tensor=2", "train.accumulation": 2},
    "tensor, GPipe": {
        "mesh": "pipeline=2,tensor=2", "train.accumulation": 4, "parallel.pipeline_schedule": "GPipe",
    },
    "tensor, interleaved": {"mesh": "pipeline=2,tensor=2", "train.accumulation": 2, **INTERLEAVED},
    "ddp": {"mesh": "pipeline=2,data=2", "strategy": "ddp", "train.accumulation": 2},
    "zero1": {"mesh": "pipeline=2,fsdp=2", "strategy": "zero1", "train.accumulation": 2},
    "hybrid": {"mesh": "pipeline=2,data=2,fsdp=2", "train.accumulation": 2},
    "2x2x2": {"mesh": "pipeline=2,fsdp=2,tensor=2", "train.accumulation": 4},
    "context, full": {"mesh": "pipeline=2,context=2", "train.accumulation": 2, "memory.remat": "full"},
    "context, zero1, interleaved": {
        "mesh": "pipeline=2,context=2", "strategy": "zero1", "train.accumulation": 4, **INTERLEAVED,
    },
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "accumulation": {"train.accumulation": 2},
    "full": {"memory.remat": "full"},
    "selective": {"memory.remat": "selective"},
    "full-every-2": {"memory.remat": "full", "memory.remat_every": 2},
    "skip": {"train.skip": "3,4,9"},
    "full-chunks": {"memory.remat": "full", "memory.loss_chunks": 3},
}

# Mistakes of the size that real ports make, as overrides of one side's config; each must be caught.
MISTAKES: dict[str, dict[str, Any]] = {
    "learning rate +0.01 %": {"optimizer.learning_rate": 0.010001},
    "Adam eps × 10": {"optimizer.eps": 1e-7},
    "clip +0.1 %": {"optimizer.clip": 0.5005},
    "beta2 + 0.001": {"optimizer.beta2": 0.951},
    "weight decay 0.1 -> 0.01": {"optimizer.weight_decay": 0.01},
    "norm eps 1e-5 -> 1e-6": {"model.norm_eps": 1e-6},
    "window + 1": {"model.window": 21},
    "no rope scaling": {"model.rope_scaling": "none"},
    "another seed": {"train.seed": 1},
    "schedule off by one": {"optimizer.warmup": 4},
    "a step passed over": {"train.skip": "5"},
}


def experiment(model: str, documents: Path, steps: int) -> dict[str, Any]:
    """The fields of a short run of one of MODELS, MIXTURES or DEEP in float64, on `documents`."""
    return {
        "model": (MODELS | MIXTURES | DEEP)[model],
        "data": {"path": str(documents), "documents": "padded", "sequence": 32},
        "train": {"steps": steps, "batch": 16, "validation_batches": 0},
        "optimizer": {"learning_rate": 0.01, "warmup": 3, "clip": 0.5},
        "precision": {"policy": "fp64"},
    }


def write_documents(file: Path) -> None:
    """Documents of uneven length, so that padded to one length a mean of means differs from the mean."""
    words = ["the", "same", "model,", "trained", "the", "same", "way,", "with", "the", "same", "memory"]
    lines = (" ".join(words[(i * j) % len(words)] for j in range(1 + (7 * i) % 23)) for i in range(400))
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")


def write_images(file: Path) -> None:
    """Images of uneven brightness, in which classes differ by a pattern."""
    random, shape = np.random.default_rng(0), (12, 12, 3)
    labels = random.integers(IMAGES["classes"], size=200)
    patterns = random.normal(size=(IMAGES["classes"], *shape))
    images = patterns[labels] + random.normal(size=(200, *shape)) + random.normal(size=(200, 1, 1, 1))
    np.savez(file, images=images.astype(np.float32), labels=labels)
