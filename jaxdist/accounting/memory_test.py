"""The closed form of a device's memory against shapes and compiled programs."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jaxdist.accounting.decoder import DecoderFootprint
from jaxdist.accounting.memory import WORKSPACE, Footprint
from jaxdist.config import ConfigError, Experiment
from jaxdist.config.experiment import read_toml
from jaxdist.conftest import slow
from jaxdist.parallel import rematerialization as rematerialization
from jaxdist.parallel.mesh import make_mesh
from jaxdist.planner.compiled import compile_plan
from jaxdist.planner.plans import footprint as form_of
from jaxdist.training import metrics
from jaxdist.training.program import Program

DEFAULT = read_toml(Path(__file__).resolve().parents[2] / "configs/default.toml")
GPT2 = {"family": "gpt2", "layers": 4, "dim": 128, "heads": 8, "hidden": 512, "vocab": 256, "tied": True}
NANOGPT = GPT2 | {"gelu": "exact", "bias": False}
MIXTRAL = {"family": "mixtral", "layers": 2, "dim": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "hidden": 128}
WIDER = MIXTRAL | {"dim": 128, "head_dim": 16, "hidden": 256}
RESNET = {"family": "resnet", "depths": [1, 1], "widths": [64, 128], "stem": 16, "image": 32, "classes": 8}
# Cases dominated by weights, by attention scores, and by the vocabulary.
WEIGHTS = {"model.layers": 16, "model.dim": 256, "model.head_dim": 32, "model.hidden": 1024, "data.sequence": 8}
SCORES = {"data.sequence": 1024, "train.batch": 16, "model.layers": 2}
VOCABULARY = {"model.vocab": 16384, "model.layers": 2}
DEEP = {"model.layers": 8, "train.batch": 64, "train.accumulation": 8}
WIDE = {"model.dim": 512, "model.head_dim": 64, "model.hidden": 2048, "data.sequence": 256, "model.vocab": 8192}


def experiment(**overrides: Any) -> Experiment:
    """The default config with `section.field` keys, on the mesh of `parallel.mesh`."""
    values: dict[str, Any] = {section: dict(fields) for section, fields in DEFAULT.items()}
    for name, value in overrides.items():
        section, _, field = name.partition(".")
        if field == "policy":  # the other dtypes follow it
            values[section] = {field: value}
        elif field:
            values.setdefault(section, {})[field] = value
        else:
            values[section] = value
    return Experiment.parse(values, source="test")


def footprint(e: Experiment) -> Footprint:
    return form_of(e, e.parallel.axes())


def of_compiled(case: dict[str, Any]) -> float:
    """Closed-form peak over the compiled program's, both without memory on the host."""
    e = experiment(**case)
    held = compile_plan(e).memory
    return (footprint(e).total - held["host"]) / held["peak"]


STATE: list[dict[str, Any]] = [
    {"parallel.mesh": "2x4"},
    {"parallel.mesh": "8x1", "parallel.strategy": "ddp"},
    {"parallel.mesh": "8x1", "parallel.strategy": "zero1", "precision.policy": "bf16"},
    {"parallel.mesh": "8x1", "parallel.strategy": "zero2", "precision.policy": "bf16-true"},
    {"parallel.mesh": "fsdp=2,context=2,tensor=2", "model": GPT2},
    {"parallel.mesh": "2x4", "model": NANOGPT},
    {"parallel.mesh": "pipeline=2,fsdp=2,tensor=2", "train.accumulation": 2},
    {"parallel.mesh": "expert=2,fsdp=2,tensor=2", "model": MIXTRAL},
    {"parallel.mesh": "8x1", "model": RESNET, "data": {}, "precision.policy": "fp16"},
    *({"parallel.mesh": "2x4", "optimizer.name": name} for name in ("adam", "sgd", "lion", "adafactor", "muon")),
    {"parallel.mesh": "2x4", "optimizer.name": "sgd", "optimizer.momentum": 0},
    {"parallel.mesh": "8x1", "optimizer.ema": 0.99},
]


def name_of(case: Any) -> str:
    return " ".join(str(value["family"] if isinstance(value, dict) and value else value) for value in case.values())


@pytest.mark.parametrize("case", STATE, ids=name_of)
def test_the_state_between_steps_is_exact(case: dict[str, Any]) -> None:
    """Parameters and optimizer state match the program's arrays, byte for byte."""
    e = experiment(**case)
    program, form = Program(e, make_mesh(e, "cpu")[0]), footprint(e)
    trained = {n: a for n, a in program.abstract.parameters.items() if not program.param_specs[n].statistic}
    assert form.parameters == metrics.bytes_on_device(trained)
    assert form.optimizer_state == metrics.bytes_on_device(program.abstract.optimizer)


LONG = {"model.dim": 512, "model.head_dim": 64, "data.sequence": 4096, "model.positions": 4096, "model.vocab": 4096}
# Precisions, rematerialization, chunks of the loss, offload, context, stages, experts.
CASES: list[dict[str, Any]] = [
    {"parallel.mesh": "data=2,fsdp=2,tensor=2", "precision.policy": "bf16", "memory.remat": "full"},
    {"parallel.mesh": "2x4", "memory.remat": "full", "memory.offload": "optimizer,parameters,activations"},
    {"parallel.mesh": "2x4", "model": GPT2, "memory.remat": "full"},
]
# The other terms, dominating terms, and other sizes and combinations.
MORE: list[dict[str, Any]] = [
    {"parallel.mesh": "fsdp=2,context=4", "parallel.context": "ulysses"},
    {"parallel.mesh": "2x4", "memory.remat": "selective", "memory.loss_chunks": 8} | VOCABULARY,
    {"parallel.mesh": "pipeline=4"} | DEEP,
    {"parallel.mesh": "expert=4,fsdp=2", "model": WIDER, "precision.policy": "bf16"},
    {"parallel.mesh": "2x4", "parallel.sequence": True},
    {"parallel.mesh": "8x1", "parallel.strategy": "zero2", "train.accumulation": 2},
    {"parallel.mesh": "1x1"},
    {"parallel.mesh": "8x1", "parallel.strategy": "zero1", "memory.remat": "selective"},
    {"parallel.mesh": "8x1", "parallel.reshard_after_forward": False},
    {"parallel.mesh": "8x1", "data.sequence": 32, "train.batch": 64, "model.hidden": 2048},
    {"parallel.mesh": "8x1", "parallel.strategy": "ddp"} | WEIGHTS,
    {"parallel.mesh": "2x4", "model": NANOGPT},
    {"parallel.mesh": "fsdp=2,context=4"},
    {"parallel.mesh": "2x4", "memory.remat": "selective"} | SCORES,
    {"parallel.mesh": "8x1", "memory.remat": "none"} | VOCABULARY,
    {"parallel.mesh": "pipeline=4", "parallel.pipeline_schedule": "GPipe"} | DEEP,
    {"parallel.mesh": "expert=2,fsdp=2", "model": MIXTRAL},
    {"parallel.mesh": "8x1", "memory.remat": "full", "memory.remat_every": 2},
    {"parallel.mesh": "8x1", "precision.policy": "bf16-true", "train.accumulation": 2},
    {"parallel.mesh": "8x1", "precision.policy": "16-true", "optimizer.eps": 1e-4} | WEIGHTS,
    {"parallel.mesh": "2x4"},
    {"parallel.mesh": "8x1"},
    {"parallel.mesh": "8x1", "parallel.strategy": "ddp"},
    {"parallel.mesh": "8x1", "parallel.strategy": "zero1", "memory.remat": "full"},
    {"parallel.mesh": "data=2,fsdp=2,tensor=2", "parallel.reshard_after_forward": False, "train.accumulation": 2},
    {"parallel.mesh": "8x1", "model.vocab": 4096},
    {"parallel.mesh": "2x4", "model": GPT2},
    {"parallel.mesh": "2x4", "model": NANOGPT, "memory.remat": "full"},
    {"parallel.mesh": "fsdp=2,context=4", "memory.remat": "full"},
    *({"parallel.mesh": "8x1", "memory.remat": remat} | SCORES for remat in ("none", "selective", "full")),
    *({"parallel.mesh": "2x4", "memory.remat": remat} | SCORES for remat in ("none", "full")),
    *({"parallel.mesh": "8x1", "memory.remat": remat} | VOCABULARY for remat in ("selective", "full")),
    {"parallel.mesh": "2x4", "parallel.sequence": True, "memory.remat": "selective"} | VOCABULARY,
    {"parallel.mesh": "1x1", "memory.remat": "full", "memory.loss_chunks": 2} | VOCABULARY,
    {"parallel.mesh": "8x1", "memory.loss_chunks": 8} | VOCABULARY,
    {"parallel.mesh": "8x1", "parallel.strategy": "ddp", "precision.policy": "bf16", "memory.loss_chunks": 2}
    | VOCABULARY,
    {"parallel.mesh": "8x1", "parallel.strategy": "zero2", "memory.remat": "full"} | WEIGHTS,
    {"parallel.mesh": "pipeline=2,tensor=2", "parallel.pipeline_schedule": "GPipe", "memory.remat": "full"} | DEEP,
    {"parallel.mesh": "pipeline=2,fsdp=2"} | DEEP,
    {"parallel.mesh": "pipeline=2,fsdp=2", "memory.remat": "selective"} | DEEP,
    {"parallel.mesh": "pipeline=4,fsdp=2", "model.vocab": 4096} | DEEP,
    {"parallel.mesh": "pipeline=2,fsdp=4", "parallel.pipeline_schedule": "Interleaved1F1B", "memory.remat": "selective"}
    | (DEEP | WIDE | {"parallel.virtual_stages": 2, "train.accumulation": 4}),
    {"parallel.mesh": "1x1", "model": WIDER},
    {"parallel.mesh": "expert=4,fsdp=2", "model": WIDER},
    {"parallel.mesh": "8x1", "model": WIDER, "memory.remat": "full"},
    {"parallel.mesh": "expert=4,fsdp=2", "model": WIDER, "memory.remat": "selective"},
    {"parallel.mesh": "1x1", "precision.policy": "bf16", "memory.remat": "full", "data.sequence": 512},
    {"parallel.mesh": "2x4", "precision.policy": "bf16", "memory.remat": "full", "data.sequence": 512},
    {"parallel.mesh": "8x1", "parallel.strategy": "zero1", "precision.policy": "bf16-true", "memory.remat": "full"}
    | WEIGHTS,
    {"parallel.mesh": "2x4", "model": GPT2, "precision.policy": "bf16-true", "memory.remat": "selective"},
    {"parallel.mesh": "data=2,fsdp=2,tensor=2", "parallel.strategy": "zero1", "train.accumulation": 2}
    | {"model": WIDER, "precision.policy": "bf16-true", "memory.remat": "full"},
    {"parallel.mesh": "fsdp=4,context=2", "parallel.strategy": "zero2", "train.accumulation": 4}
    | {"data.sequence": 512, "memory.remat": "selective"},
    {"parallel.mesh": "fsdp=4,context=2", "precision.policy": "bf16", "memory.remat": "full", "data.sequence": 512},
    {"parallel.mesh": "context=2,tensor=2", "data.sequence": 1024},
    {"parallel.mesh": "fsdp=2,context=4", "memory.remat": "selective"} | LONG,
]


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *slow(MORE)], ids=name_of)
def test_the_peak_of_a_compiled_step(case: dict[str, Any]) -> None:
    assert of_compiled(case) == pytest.approx(1, rel=0.1)


# XLA holds more: with two stages, whose last tick it unrolls, embedding and head once more; in a loop over two blocks,
# one recomputed under `selective`, the other's activations.
FAR: list[tuple[dict[str, Any], float]] = [
    ({"parallel.mesh": "pipeline=2,fsdp=4"} | DEEP | WIDE, 0.83),
    ({"parallel.mesh": "8x1", "memory.remat": "selective", "memory.remat_every": 2}, 0.84),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "share"), FAR, ids=("stages", "every second"))
def test_where_the_form_is_too_low(case: dict[str, Any], share: float) -> None:
    assert of_compiled(case) == pytest.approx(share, abs=0.02)


DRAWN: dict[str, tuple[Any, ...]] = {
    "parallel.mesh": (
        *("1x1", "8x1", "4x1", "2x4", "4x2", "data=2,fsdp=4", "data=2,fsdp=2,tensor=2"),
        *("fsdp=2,context=2", "fsdp=4,context=2", "fsdp=2,context=4"),
    ),
    "parallel.strategy": ("ddp", "zero1", "zero2", "fsdp"),
    "parallel.sequence": (False, True),
    "parallel.context": ("ring", "ulysses"),
    "precision.policy": ("fp32", "bf16", "bf16-true"),
    "memory.remat": ("none", "selective", "full"),
    "memory.loss_chunks": (1, 4),
    "train.accumulation": (1, 2, 4),
    "train.batch": (16, 32, 64),
    "data.sequence": (128, 256, 512),
    "model": (DEFAULT["model"], DEFAULT["model"], GPT2, WIDER),
    "model.layers": (2, 4, 8),
    "model.dim": (128, 256),
}


def drawn(random: Random) -> dict[str, Any]:
    """One of each, with hidden and heads growing with the model's width."""
    case = {name: random.choice(choices) for name, choices in DRAWN.items()}
    model, dim = case.pop("model"), case.pop("model.dim")
    sizes = {"layers": case.pop("model.layers"), "dim": dim, "hidden": model["hidden"] * dim // model["dim"]}
    if "head_dim" in model:
        sizes["head_dim"] = dim // model["heads"]
    return case | {"model": model | sizes}


@pytest.mark.slow
def test_peaks_of_ordinary_configurations() -> None:
    """19 in 20 of 60 random accepted configurations are within 10 %, and all within 20 %."""
    random, off = Random(0), list[float]()
    for _ in range(200):  # more than half are refused
        with suppress(ConfigError):
            off.append(abs(of_compiled(drawn(random)) - 1))
        if len(off) == 60:
            break
    assert len(off) == 60 and sorted(off)[56] < 0.1 and max(off) < 0.2


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_kept_beyond_the_mode_are_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the program keeps activations that its mode of rematerialization drops."""
    e = experiment(**{"parallel.mesh": "2x4", "memory.remat": mode, "data.sequence": 256})
    predicted = footprint(e).total
    monkeypatch.setitem(rematerialization.POLICIES, mode, rematerialization.POLICIES["none"])
    assert compile_plan(e).memory["peak"] > 1.3 * predicted


def test_a_gpu_fetches_the_state_to_update() -> None:
    """Sharded moments and, if they are offloaded too, full weights; nothing where the host's memory is the device's."""
    e = experiment(**{"parallel.mesh": "8x1", "parallel.strategy": "zero1", "memory.offload": "optimizer,parameters"})
    form = footprint(e)
    full = form.elements(False) * 4
    assert form.fetched == 0 and replace(form, platform="gpu").fetched == full + 2 * full / 8


def test_differences_between_platforms() -> None:
    """CPUs widen 16 bits to 32; fused attention and its workspaces are for GPUs; TPUs have grouped products."""
    e = experiment(model=MIXTRAL, **{"parallel.mesh": "expert=2", "precision.policy": "bf16"})
    form = footprint(e)
    assert isinstance(form, DecoderFootprint)
    cpu, gpu, tpu = (replace(form, platform=platform) for platform in ("cpu", "gpu", "tpu"))
    assert (cpu.compute, gpu.compute, tpu.compute) == (4, 2, 2)
    assert (cpu.scores, gpu.scores, tpu.scores) == (True, False, True)
    assert cpu.grouped > gpu.grouped > 0 == tpu.grouped
    assert tpu.working == tpu.formulas != cpu.working and cpu.several_cpus
    assert gpu.peak[WORKSPACE] > 0 == tpu.peak[WORKSPACE]
