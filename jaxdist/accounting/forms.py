"""Closed forms of a family's FLOPs, memory and traffic, looked up by its row.

A missing form means unknown, which is not an error: memory and traffic of a step can still be measured.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxdist.accounting import traffic
from jaxdist.accounting.memory import Footprint
from jaxdist.config import ConfigError, Experiment, Model
from jaxdist.config.plugins import optional, running
from jaxdist.config.registry import FAMILIES
from jaxdist.parallel.sharding import ParamSpec

ParamSpecs = Mapping[str, ParamSpec]
Mesh = Mapping[str, int]  # sizes of the mesh axes


@dataclass(frozen=True)
class Accounting:
    """Closed forms of a family; None: unknown."""

    flops: Callable[[Experiment, ParamSpecs], float] | None = None
    """FLOPs of a step per token, or image: products and attention, nothing of it twice."""
    footprint: Callable[[Experiment, ParamSpecs, Mesh, str], Footprint] | None = None
    """Memory and work of one device in a step, on a platform: cpu, gpu or tpu."""
    exchanges: Mapping[str, Callable[[Experiment, ParamSpecs, Mesh], Mapping[str, float]]] | None = None
    """Exchanges other than parameters: name -> its least bytes by mesh axis. By these names the proof knows how many
    collectives each side takes (`parity_tests/expected/collectives.py`)."""


class Unknown(ConfigError):
    """A closed form that a family or an optimizer lacks."""


UPDATE = "traffic"  # the closed form of an optimizer, a piece of its row; those of a family are fields of `Accounting`


def unknown(experiment: Experiment, form: str) -> Unknown:
    """The error for a closed form that is lacking."""
    e = experiment
    field, register = f"model.family = {e.model.family}", f"the family with an accounting that has {form}"
    if form == UPDATE:
        field, register = f"optimizer.name = {e.optimizer.name}", f"the optimizer with {form}, or as elementwise"
    return Unknown(
        f"{field}: the closed form of its {form}, by which plans are ranked and drawn, is unknown; leave out "
        f"--recommend and --output and give --mesh and --compiled, or register {register}"
    )


def lacking(experiment: Experiment, mesh: Mesh) -> list[str]:
    """Names of the closed forms that the family and the optimizer lack, as in `Accounting` and in the optimizer's
    row."""
    there = accounting_of(experiment.model)
    found = [name for name in ("footprint", "exchanges", "flops") if getattr(there, name) is None]
    return found if traffic.update_is_known(experiment, mesh) else [*found, UPDATE]


def accounting_of(model: Model) -> Accounting:
    """Closed forms of a model's family. Raises ConfigError for a row without any."""
    return optional(FAMILIES, model.family, "accounting", Accounting) or Accounting()


def flops_per_token(experiment: Experiment, param_specs: ParamSpecs) -> float | None:
    """FLOPs of a step per token or image, multiply-adds × 2; None if unknown."""
    form = accounting_of(experiment.model).flops
    with running(FAMILIES, experiment.model.family, "accounting"):
        return form(experiment, param_specs) if form else None


def footprint(experiment: Experiment, param_specs: ParamSpecs, mesh: Mesh, platform: str = "cpu") -> Footprint | None:
    """Memory and work of one device in a step; None if unknown."""
    if mesh["tensor"] == 1 and experiment.parallel.sequence:  # it splits nothing, and gathers nothing
        parallel = experiment.parallel.model_copy(update={"sequence": False})
        experiment = experiment.model_copy(update={"parallel": parallel})
    form = accounting_of(experiment.model).footprint
    with running(FAMILIES, experiment.model.family, "accounting"):
        return form(experiment, param_specs, mesh, platform) if form else None


def least_bytes(experiment: Experiment, param_specs: ParamSpecs, mesh: Mesh) -> dict[str, float] | None:
    """Least bytes that a device must send per step, by mesh axis: for parameters, for what an update rule asks of full
    ones, and for the exchanges of the family; None where one of these is unknown."""
    exchanges = accounting_of(experiment.model).exchanges
    if exchanges is None or not traffic.update_is_known(experiment, mesh):
        return None
    found = Counter(traffic.least_of_parameters(experiment, param_specs, mesh))
    found += Counter(traffic.least_of_update(experiment, param_specs, mesh))
    with running(FAMILIES, experiment.model.family, "accounting"):
        for exchange in exchanges.values():
            found += Counter(exchange(experiment, param_specs, mesh))
    return dict(found)


def check(experiment: Experiment, param_specs: ParamSpecs, mesh: Mesh) -> None:
    """Raises ConfigError where a closed form of a plugin's fails that a run needs at its end."""
    flops_per_token(experiment, param_specs)
    least_bytes(experiment, param_specs, mesh)
