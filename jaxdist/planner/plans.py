"""One experiment on one mesh of one kind of device: what it holds, sends and takes, and whether it fits."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

from jaxdist.accounting import forms, memory
from jaxdist.accounting.memory import Footprint, State
from jaxdist.config import ConfigError, Experiment, Model
from jaxdist.config.hardware import USABLE, Hardware, rate
from jaxdist.config.parallel import written
from jaxdist.families import models
from jaxdist.parallel import sharding
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.planner import time

Value = TypeVar("Value")
CHUNKS = 8  # of the loss, as torchtune's default has it
# Rows of `memory`, in this order: causes of `jaxdist.accounting.memory` -> names for users.
KINDS: Mapping[str, tuple[str, ...]] = {
    "gradients": (memory.GRADIENTS, memory.FRESH),
    "gathered": (memory.ENDS, memory.UNSHARDED, memory.WEIGHTS, memory.FETCHED, memory.TURNED, memory.COPIED),
    "activations": (memory.BLOCKS, memory.WAITING, memory.AGAIN_ONE, memory.TAKEN_ONE, memory.LAST, memory.BATCH),
    "logits": (memory.LOGITS,),
    "at work": (memory.INSIDE, memory.POOLING, memory.GROUPED, memory.UPDATE, memory.WORKSPACE),
}


@cache
def param_specs(model: Model) -> dict[str, ParamSpec]:
    """The declared parameters of a model."""
    return models.param_specs(models.build(model))


def footprint(experiment: Experiment, mesh: Mapping[str, int], platform: str = "cpu") -> Footprint:
    """The closed form of what a device holds. Raises Unknown for a family that has none."""
    form = forms.footprint(experiment, param_specs(experiment.model), mesh, platform)
    return known(form, experiment, "footprint")


def known(value: Value | None, experiment: Experiment, form: str) -> Value:
    """A value of a closed form. Raises Unknown where there is none."""
    if value is None:
        raise forms.unknown(experiment, form)
    return value


@dataclass(frozen=True)
class Plan:
    """The closed form. Building it checks that the mesh divides what it must (ConfigError) and allocates nothing.

    Properties that need a closed form which the family or the optimizer lacks raise Unknown.
    """

    experiment: Experiment
    hardware: Hardware

    def __post_init__(self) -> None:
        self.experiment.check_mesh(self.mesh)
        sharding.check(param_specs(self.experiment.model), self.mesh, sharding.strategy(self.experiment.parallel))

    @cached_property
    def mesh(self) -> dict[str, int]:
        return self.experiment.parallel.axes()

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @cached_property
    def footprint(self) -> Footprint:
        return footprint(self.experiment, self.mesh, self.hardware.platform)

    # ---- memory, bytes on one device

    @cached_property
    def state(self) -> dict[str, float]:
        """State of any family between steps; `host` is in host memory."""
        specs, platform = param_specs(self.experiment.model), self.hardware.platform
        f: State = self.if_known("footprint") or State(self.experiment, specs, self.mesh, platform)
        offload = self.experiment.memory.offload
        host = f.parameters * ("parameters" in offload) + f.optimizer_state * ("optimizer" in offload)
        return {"parameters": f.parameters, "optimizer_state": f.optimizer_state, "host": host}

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes by category, at the moment of a step that takes the most; `host` lies in the host's memory, `peak` is
        all that lies on the device."""
        causes, state = self.footprint.peak, dict(self.state)
        host = state.pop("host")
        found = state | {kind: sum(causes.get(name, 0.0) for name in names) for kind, names in KINDS.items()}
        return found | {"host": host, "peak": sum(found.values()) - host}

    @property
    def room(self) -> float:
        return USABLE * self.hardware.memory

    @property
    def fits(self) -> bool:
        return self.memory["peak"] <= self.room

    # ---- traffic and time of one step

    @cached_property
    def traffic(self) -> dict[str, float]:
        """Bytes that a device sends, by mesh axis."""
        least = forms.least_bytes(self.experiment, param_specs(self.experiment.model), self.mesh)
        form = "exchanges" if "exchanges" in self.unknown else forms.UPDATE
        return {axis: size for axis, size in known(least, self.experiment, form).items() if size}

    @cached_property
    def time(self) -> time.Time:
        return time.predict(self.footprint, self.traffic, self.hardware)

    @property
    def tokens_per_second(self) -> float:
        return self.experiment.train.batch * self.experiment.per_row / self.time.step

    @property
    def flops_per_token(self) -> float:
        flops = forms.flops_per_token(self.experiment, param_specs(self.experiment.model))
        return known(flops, self.experiment, "flops")

    @property
    def mfu(self) -> float:
        """Share of the data sheet's rate at which the model's arithmetic is done, nothing of it twice."""
        flops = rate(self.hardware, self.experiment.precision.compute)
        return self.tokens_per_second * self.flops_per_token / self.devices / flops

    @property
    def unknown(self) -> list[str]:
        """The closed forms that the family or the optimizer lacks, as `forms.lacking`."""
        return forms.lacking(self.experiment, self.mesh)

    def if_known(self, name: str) -> Any:
        """A property of the plan; None where its closed form is unknown."""
        try:
            return getattr(self, name)
        except forms.Unknown:
            return None

    def changed(self, **fields: Any) -> "Plan":
        """The plan with fields by `section__field`. Raises ConfigError."""
        return replace(self, experiment=changed(self.experiment, **fields))

    def if_valid(self, **fields: Any) -> "Plan | None":
        """The same, or None where the config refuses it."""
        try:
            return self.changed(**fields)
        except ConfigError:
            return None


def changed(experiment: Experiment, **fields: Any) -> Experiment:
    """The experiment with fields by `section__field`. Raises ConfigError. Sections without a change are valid as they
    are."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        section, _, field = name.partition("__")
        changes.setdefault(section, {})[field] = value
    sections = {name: getattr(experiment, name).model_dump(exclude_none=True) | new for name, new in changes.items()}
    values = dict(experiment) | sections
    return Experiment.parse(values, source="plan")


def flags(experiment: Experiment, base: Experiment) -> str:
    """Arguments that turn `base` into `experiment`: the fields in which they differ."""
    short = {"parallel.mesh": "mesh", "parallel.strategy": "strategy"}
    before, after = base.model_dump(), experiment.model_dump()
    found = []
    for section in Experiment.sections():
        for name, value in after[section].items():
            if value != before[section][name]:
                text = ",".join(value) if isinstance(value, tuple) else str(value).lower()
                found.append(f"--{short.get(f'{section}.{name}', f'{section}.{name}')} {text}")
    return " ".join(found)


def changes(plan: Plan) -> Iterator[dict[str, Any]]:
    """Single changes that may make a plan fit, as fields by `section__field`."""
    e = plan.experiment
    for remat in ("selective", "full"):
        if e.memory.remat in ("none", "selective") and e.memory.remat != remat:
            yield {"memory__remat": remat, "memory__remat_every": 1}
    if e.memory.loss_chunks == 1:
        yield {"memory__loss_chunks": CHUNKS}
    rows = e.train.batch // math.prod(plan.mesh[axis] for axis in sharding.BATCH)
    for accumulation in (n for n in range(2 * e.train.accumulation, rows + 1) if rows % n == 0):
        yield {"train__accumulation": accumulation}
    if e.parallel.strategy != "fsdp" or not e.parallel.reshard_after_forward:
        axes = dict(plan.mesh)
        if not e.parallel.row.optimizer:
            axes |= {"fsdp": axes["fsdp"] * axes["data"], "data": 1}
        fields = {"parallel__strategy": "fsdp", "parallel__reshard_after_forward": True}
        yield fields | ({"parallel__mesh": written(axes)} if axes != plan.mesh else {})
    if plan.mesh["tensor"] > 1 and not e.parallel.sequence:
        yield {"parallel__sequence": True}
    if "optimizer" not in e.memory.offload:
        yield {"memory__offload": (*e.memory.offload, "optimizer")}
    for axis in ("fsdp", "tensor"):
        for factor in (2, 4, 8, 16):
            yield {"parallel__mesh": written(plan.mesh | {axis: plan.mesh[axis] * factor})}


def smallest_change(plan: Plan) -> Plan | None:
    """The plan that fits by a single change and whose step is the fastest, on as many devices if that can be; the
    first, where the time of a step is unknown. None where no single change suffices."""
    fitting = (other for fields in changes(plan) if (other := plan.if_valid(**fields)) and other.fits)
    timed = plan.if_known("time") is not None
    return min(fitting, key=lambda other: (other.devices, other.time.step if timed else 0.0), default=None)


def neighbours(plan: Plan) -> list[Plan]:
    """The plan, and those that share its devices between fsdp and tensor in other ways, as `--mesh` alone changes it:
    so each is what the command says of that mesh."""
    found = [plan]
    ways = plan.mesh["fsdp"] * plan.mesh["tensor"]
    for tensor in (2**k for k in range(ways.bit_length()) if ways % 2**k == 0):
        mesh = plan.mesh | {"tensor": tensor, "fsdp": ways // tensor}
        if mesh != plan.mesh and (other := plan.if_valid(parallel__mesh=written(mesh))):
            found.append(other)
    return found
