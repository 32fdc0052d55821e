"""Reasons given for the recommended plan, or for its absence, checked against the plans that they mention."""

import math
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from jaxdist.accounting import traffic
from jaxdist.command_line.arguments import load
from jaxdist.config import AXES, STRATEGIES, ConfigError
from jaxdist.config.errors import DoesNotFit
from jaxdist.config.hardware import USABLE, hardware
from jaxdist.config.parallel import written
from jaxdist.conftest import often
from jaxdist.parallel.sharding import SHARDS, TOKENS
from jaxdist.planner.plans import Plan
from jaxdist.planner.recommend import COMPARED, REMATS, candidates, none_fits, reasons, recommend
from jaxdist.planner.time import links
from jaxdist.runs.display import megabytes

FREE_AXES = ("data", "fsdp")
VERDICT = re.compile(
    r"(?P<called>.+?) (?:"
    r"would not fit, as it holds at least (?P<least>[\d.]+ [GM]B)"
    r"|would take (?P<took>as long|[\d.]+% (?:longer|less))(?: \((?P<also>.+)\))? and hold (?P<held>[\d.]+ [GM]B)"
    r"|cannot be, as (?P<cause>.+))"
)


def settings(plan: Plan) -> dict[str, str]:
    e = plan.experiment
    own = {"strategy": e.parallel.strategy, "remat": e.memory.remat, "accumulation": e.train.accumulation}
    return {name: str(value) for name, value in {**plan.mesh, **own}.items()}


def every(plan: Plan, **axes: int) -> Iterator[Plan]:
    """All plans on as many devices with any FREE_AXES, and the plan's other axes or `axes`: more than the search
    tries."""
    model = {axis: plan.mesh[axis] for axis in AXES if axis not in FREE_AXES} | axes
    rest, batch = plan.devices // math.prod(model.values()), plan.experiment.train.batch
    meshes = [model | {"data": rest // n, "fsdp": n} for n in range(1, rest + 1) if rest % n == 0]
    parts = [n for n in range(model["pipeline"], batch + 1) if batch % n == 0]
    for mesh, strategy, remat, accumulation in product(meshes, STRATEGIES, REMATS, parts):
        try:
            yield plan.changed(
                parallel__mesh=written(mesh), parallel__strategy=strategy, parallel__sequence=mesh["tensor"] > 1,
                memory__remat=remat, memory__remat_every=1, train__accumulation=accumulation,
            )  # fmt: skip
        except ConfigError:
            continue


def check(plan: Plan, sentence: str) -> None:
    """Raises AssertionError if a sentence is not true of a plan."""
    lead, _, verdicts = sentence.partition(": ")
    check_lead(plan, lead)
    for text in verdicts.split("; "):
        found = VERDICT.fullmatch(text)
        assert found, text
        check_verdict(plan, found)


def check_lead(plan: Plan, lead: str) -> None:
    mesh, f, time = plan.mesh, plan.footprint, plan.time
    name, _, value = lead.split(",")[0].partition(" = ")
    if name not in mesh and name in settings(plan):
        assert value == settings(plan)[name]
    elif name in mesh:
        assert value.split()[0] == str(mesh[name]) and mesh[name] > 1
    if name == "tensor":
        assert plan.hardware.group % mesh["tensor"] == 0 and f"the {plan.hardware.group} devices" in lead
    if name in ("tensor", "expert", "context"):
        assert f", {megabytes(plan.traffic[name])} a step" in lead
    if name == "context":
        assert f"parts of {plan.experiment.data.sequence // mesh['context']:,} tokens" in lead
    if name == "pipeline":
        ticks = traffic.passes(plan.experiment, mesh).both
        assert f"idle {1 - plan.experiment.train.accumulation / ticks:.0%} " in lead
    if name.split()[0] in STRATEGIES:
        parts = {
            "parameters": f.parameters < f.elements(False) * f.param_itemsize,
            "gradients": f.gradients < f.elements(False) * f.param_itemsize,
            "optimizer state": f.optimizer_state < f.optimizer_states(False),
        }
        sharing = SHARDS if any(parts.values()) else TOKENS
        crossing = sum(link.parameters / link.bandwidth for link in links(f, plan.traffic, plan.hardware))
        assert name.startswith(plan.experiment.parallel.strategy)
        assert all(
            (part in lead.partition(" over ")[0]) == there for part, there in parts.items() if any(parts.values())
        )
        assert any(parts.values()) or "suffices, which sums gradients alone" in lead
        assert f"over {math.prod(mesh[axis] for axis in sharing)} devices" in lead
        reach = math.prod(mesh[axis] for axis in (*sharing, "tensor"))
        assert (f" across groups of {plan.hardware.group}" in lead) == (reach > plan.hardware.group)
        assert f"with {crossing / time.step:.0%} of the step" in lead


def check_verdict(plan: Plan, found: re.Match[str]) -> None:
    own, called = settings(plan), found["called"]
    name, _, value = called.partition(" = ")
    if called in STRATEGIES:
        name, value = "strategy", called
    others = list(every(plan, **({name: int(value)} if name in AXES and name not in FREE_AXES else {})))
    if called == "fewer microbatches":
        others = [other for other in others if other.experiment.train.accumulation < plan.experiment.train.accumulation]
    else:
        assert own[name] != value
        others = [other for other in others if settings(other)[name] == value]
    fitting = [other for other in others if other.fits]
    if found["cause"]:
        assert not others and f"train.batch = {plan.experiment.train.batch} " in found["cause"]
    elif found["least"]:
        assert others and not fitting
        assert found["least"] == megabytes(min(other.memory["peak"] for other in others))
    else:
        also = dict(part.split(" = ") for part in found["also"].split(", ")) if found["also"] else {}
        named = own | ({name: value} if value else {}) | also
        (best,) = (other for other in fitting if settings(other) == named)
        assert best.time.step == pytest.approx(min(other.time.step for other in fitting), rel=1e-9)
        longer = best.time.step / plan.time.step - 1
        assert found["took"] == (
            "as long" if abs(longer) < 0.0005 else f"{abs(longer):.1%} {'longer' if longer > 0 else 'less'}"
        )
        assert found["held"] == megabytes(best.memory["peak"])


CASES: dict[str, tuple[str | None, int, str, dict[str, Any]]] = {
    "llama-1b on 8 a100": ("llama-1b", 8, "a100", {}),
    "llama-1b on one": ("llama-1b", 1, "h100", {}),
    "llama-3.1-8b on 64": ("llama-3.1-8b", 64, "h100", {}),
    "llama-3.1-8b on 64, long": ("llama-3.1-8b", 64, "h100", {"train.batch": 8, "data.sequence": 65536}),
    "llama-3.1-405b on 16384": ("llama-3.1-405b", 16384, "h100", {}),
    "mixtral-8x7b on 64": ("mixtral-8x7b", 64, "h100", {}),
    "qwen3-30b-a3b on 32": ("qwen3-30b-a3b", 32, "h100", {}),
    "gpt2 on 8": ("gpt2", 8, "h100", {"train.batch": 64}),
    "resnet-50 on 8": ("resnet-50", 8, "h100", {}),
    "default on one": (None, 1, "h100", {}),
}


@cache
def recommended(case: str) -> list[Plan]:
    config, devices, device, fields = CASES[case]
    return recommend(load(config, fields), devices, hardware(device))


@pytest.mark.long
@pytest.mark.parametrize("case", often(CASES, ["llama-3.1-8b on 64, long", "mixtral-8x7b on 64", "resnet-50 on 8"]))
def test_reasons_are_true(case: str) -> None:
    """Checks the first plan, and the first that divides the model over each other axis."""
    plans = recommended(case)
    axes = [axis for axis in AXES if plans[0].mesh[axis] == 1]
    chosen = [plans[0], *(next((p for p in plans if p.mesh[axis] > 1), plans[0]) for axis in axes)]
    for plan in {id(plan): plan for plan in chosen}.values():
        *sentences, compared = reasons(plan) or [COMPARED]
        assert compared == COMPARED
        for sentence in sentences:
            check(plan, sentence)


@pytest.mark.long
def test_every_choice_is_explained() -> None:
    sentences = [sentence for case in CASES for plan in recommended(case)[:3] for sentence in reasons(plan)]
    for begins in ("tensor", "context", "pipeline", "data", "remat", "accumulation"):
        assert any(sentence.startswith(f"{begins} = ") for sentence in sentences)
    text = "\n".join(sentences)
    for phrase in (
        "fsdp divides",
        "zero1 divides",
        "zero2 divides",
        "ddp suffices",
        "not fit",
        "longer",
        "cannot be, as",
    ):
        assert phrase in text


def test_without_a_choice_nothing_is_reported() -> None:
    """One device has no choice; a pipeline with one row at a time has none of strategy, as no devices share the
    batch."""
    assert reasons(recommended("default on one")[0]) == []
    plan = next(p for p in recommended("mixtral-8x7b on 64") if math.prod(p.mesh[axis] for axis in FREE_AXES) == 1)
    assert plan.experiment.parallel.strategy == "ddp"
    assert not any(sentence.startswith(tuple(STRATEGIES)) for sentence in reasons(plan))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "true", "false"),
    [
        ("llama-1b on 8 a100", r"ddp would take .*? hold", "ddp would not fit, as it holds at least"),
        ("llama-1b on 8 a100", r"zero1 would take [\d.]+%", "zero1 would take 9.9%"),
        ("llama-1b on 8 a100", r"with \d+% of", "with 38% of"),
        ("llama-3.1-405b on 16384", r"would not fit, as it holds at least", "would take 5.0% longer and hold"),
        ("llama-3.1-405b on 16384", r"holds at least \d", "holds at least 9"),
        (
            "llama-1b on 8 a100",
            r"zero1 would .*? GB",
            "zero1 cannot be, as train.batch = 16 sequences cannot be divided",
        ),
        ("qwen3-30b-a3b on 32", r"\(accumulation = 4\)", "(accumulation = 2)"),
        ("qwen3-30b-a3b on 32", r"idle \d+%", "idle 1%"),
    ],
)
def test_false_reasons_are_caught(case: str, true: str, false: str) -> None:
    plan = recommended(case)[0]
    sentences = reasons(plan)
    planted = [text for sentence in sentences if (text := re.sub(true, false, sentence, count=1)) != sentence]
    assert planted
    for sentence in planted:
        with pytest.raises((AssertionError, ValueError)):
            check(plan, sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "ddp: the model fits on each device, and gradients cross them once a step",
        "remat = full: with less computed again activations would not fit",
        "fsdp divides parameters, gradients and optimizer state over 8 devices, with 7% of the step: ddp would fit",
    ],
)
def test_unchecked_reasons_are_not_claimed(sentence: str) -> None:
    with pytest.raises(AssertionError):
        check(recommended("llama-1b on 8 a100")[0], sentence)


def test_divided_gradients_are_tried() -> None:
    """zero2 sends as much as zero1 with one microbatch, and holds less."""
    found = recommended("llama-3.1-8b on 64")
    one, two = (
        next(p for p in found if p.experiment.parallel.strategy == name and p.experiment.train.accumulation == 1)
        for name in ("zero1", "zero2")
    )
    assert one.traffic == pytest.approx(two.traffic) and two.memory["peak"] < one.memory["peak"]


@pytest.mark.parametrize(
    ("config", "fields", "devices"),
    [
        ("llama-3.1-8b", {}, 512),
        (None, {}, 512),
        (None, {"train.accumulation": 2}, 7),
        ("resnet-50", {}, 7),
    ],
)
def test_the_batch_is_named_where_no_mesh_divides_it(config: str | None, fields: dict[str, Any], devices: int) -> None:
    """The message gives the next larger one that fits without another change to the command line."""
    device, e = hardware("h100"), load(config, fields)
    with pytest.raises(ConfigError) as error:
        recommend(e, devices, device)
    found = re.fullmatch(
        r"train\.batch = (\d+) \w+ cannot be divided over any mesh of (\d+) .*; use --train\.batch (\d+)",
        str(error.value),
    )
    assert found and found[1] == str(e.train.batch) and found[2] == str(devices)
    assert recommend(load(config, fields | {"train.batch": int(found[3])}), devices, device)
    for batch in range(e.train.batch, int(found[3]), e.train.accumulation):
        assert not any(candidates(load(config, fields | {"train.batch": batch}), devices, device))


def test_the_batch_is_named_where_it_does_not_fit() -> None:
    """The batch is divisible, but not into one microbatch with as few rows as fit into memory."""
    alone = Plan(
        load("resnet-50", {"parallel.mesh": "8x1", "parallel.strategy": "zero2", "train.batch": 8}), hardware("h100")
    )
    device = alone.hardware.model_copy(update={"memory": 1.001 * alone.memory["peak"] / USABLE})
    message = (
        r"batch = 16 images cannot be divided over 8 devices so that a step fits in 95% of .*; use --train.batch 8$"
    )
    with pytest.raises(ConfigError, match=message):
        recommend(load("resnet-50", {"train.batch": 16}), 8, device)
    assert recommend(load("resnet-50", {"train.batch": 8}), 8, device)


def test_other_causes_than_batch_and_memory_are_reported() -> None:
    e = load(None, {"memory.loss_chunks": 4096})
    with pytest.raises(
        ConfigError, match=r"memory.loss_chunks = 4096 are more than the 256 tokens .*; use at most 256"
    ):
        recommend(e, 8, hardware("h100"))


@pytest.mark.long
@pytest.mark.parametrize(("config", "devices", "memory"), [(None, 8, 1e6), ("llama-3.1-405b", 64, 80e9)])
def test_memory_is_named_where_no_batch_helps(config: str | None, devices: int, memory: float) -> None:
    device = hardware("h100").model_copy(update={"memory": memory})
    with pytest.raises(DoesNotFit, match=r"no mesh, .* fits in 95% of .* whatever train.batch is") as raised:
        recommend(load(config, {}), devices, device)
    least = re.search(r"as ([\d.]+) ([GM])B are the least; give more devices, or", str(raised.value))
    assert least
    enough = (float(least[1]) + 0.01) * {"G": 1e9, "M": 1e6}[least[2]] / USABLE
    for room, none in ((enough, False), (0.99 * enough, True)):
        error = none_fits(load(config, {}), devices, device.model_copy(update={"memory": room}))
        assert none == isinstance(error, DoesNotFit) == str(error).startswith(f"--devices {devices}: no mesh")
