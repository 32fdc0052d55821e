"""Memory of a device: its share of the state, and the activations that the rematerialization mode keeps."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import TrainingError
from jaxdist.conftest import slow, tiny
from jaxdist.families.llama import model as llama
from jaxdist.parallel import rematerialization
from jaxdist.parallel.mesh import make_mesh
from jaxdist.parallel.sharding import LOSS_AXES
from jaxdist.runtime.xla import Jitted
from jaxdist.training import metrics
from jaxdist.training.metrics import bytes_on_device
from jaxdist.training.placement import shardings
from jaxdist.training.program import Program
from jaxdist.training.step import TrainState

pytestmark = pytest.mark.long

# With XLA's fusion emitters, which conftest.py turns off: they decide what is copied.
AS_FOR_A_USER = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


def program(**sections: Any) -> Program:
    experiment = tiny(**{"precision": {"policy": "fp32"}} | sections)
    return Program(experiment, make_mesh(experiment, "cpu")[0])


def compiled(p: Program, **options: Any) -> Any:
    return p.step.lower(p.abstract, p.abstract_batch).compile(options)


def reported(p: Program, state: TrainState | None = None) -> dict[str, int]:
    traced = p.step.trace(p.abstract, p.abstract_batch)
    return metrics.memory(p, traced, traced.lower().compile(), state)


@pytest.mark.parametrize(
    ("mesh", "strategy", "parameters", "optimizer"),
    [
        ("8x1", "zero1", 1, 8),
        ("data=2,fsdp=4", "fsdp", 4, 4),
        ("8x1", "ddp", 1, 1),
        ("8x1", "zero2", 1, 8),
        ("8x1", "fsdp", 8, 8),
    ],
)
@pytest.mark.slow
def test_born_with_its_share(mesh: str, strategy: str, parameters: int, optimizer: int) -> None:
    p = program(parallel={"mesh": mesh, "strategy": strategy})
    state = p.initialize()
    unsharded = metrics.parameter_count(p.param_specs) * 4
    assert bytes_on_device(state.parameters) == unsharded // parameters
    counts = 2 * 4  # step counts of Adam and of the schedule
    assert bytes_on_device(state.optimizer) == 2 * unsharded // optimizer + counts
    found = reported(p)
    assert (found["parameters"], found["optimizer_state"]) == (
        bytes_on_device(state.parameters),
        bytes_on_device(state.optimizer),
    )


def test_reported_memory_is_that_of_the_arrays() -> None:
    """Checked on a state whose moments are replicated, contrary to their specs."""
    p = program(parallel={"mesh": "8x1"})
    state, declared = p.initialize(), reported(p)
    assert reported(p, state) == declared
    everywhere = state._replace(optimizer=jax.device_put(state.optimizer, NamedSharding(p.mesh, P())))
    found = reported(p, everywhere)
    assert found["parameters"] == declared["parameters"]
    assert found["optimizer_state"] == bytes_on_device(everywhere.optimizer) > 7 * declared["optimizer_state"]


def gradients(p: Program, batch: Any) -> Any:
    """Gradients of a step before they are reduced, per device: [devices that differ, ...]."""
    sharded = p.strategy.gradients
    apart = {n: tuple(a for a in LOSS_AXES if a not in spec.mesh_axes(sharded)) for n, spec in p.param_specs.items()}
    specs = {n: P(apart[n], *spec.split(sharded)) for n, spec in p.param_specs.items()}

    def function(parameters: Any, batch: Any) -> Any:
        return {name: g[None] for name, g in p.step_function.accumulate(parameters, batch)[1].items()}

    inputs = (p.partition_specs.parameters, p.batch_specs)
    mapped = jax.shard_map(function, mesh=p.mesh, in_specs=inputs, out_specs=specs)
    return Jitted(jax.jit(mapped), p.mesh)(p.initialize().parameters, batch)


@pytest.mark.parametrize(
    ("mesh", "strategy", "reduce", "share"),
    [
        ("8x1", "zero2", "auto", 8),
        pytest.param("8x1", "zero2", "step", 1, marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=4", "fsdp", "auto", 4, marks=pytest.mark.slow),
        pytest.param("8x1", "ddp", "auto", 1, marks=pytest.mark.slow),
        pytest.param("8x1", "zero1", "auto", 1, marks=pytest.mark.slow),
        pytest.param("8x1", "fsdp", "auto", 8, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_share_that_is_reported(
    mesh: str, strategy: str, reduce: str, share: int, batches: Any
) -> None:
    p = program(parallel={"mesh": mesh, "strategy": strategy, "reduce": reduce})
    found = bytes_on_device(gradients(p, batches(p.experiment, 1)[0]))
    assert found == reported(p)["gradients"] == metrics.parameter_count(p.param_specs) * 4 // share


def test_initialization_never_holds_the_whole_model() -> None:
    """Drawing a sharded weight takes no more than its share of memory, including arguments."""
    p = program(model=dict(tiny().model.model_dump(), dim=256, hidden=1024, layers=8), parallel={"mesh": "8x1"})
    analysis: Any = (
        jax.jit(p.initial, out_shardings=shardings(p.mesh, p.partition_specs)).lower().compile().memory_analysis()
    )
    unsharded = metrics.parameter_count(p.param_specs) * 4
    assert analysis.output_size_in_bytes + analysis.temp_size_in_bytes < 0.6 * unsharded  # the state itself takes 3/8


def temporary(remat: str, every: int = 1, **sections: Any) -> int:
    model = dict(tiny().model.model_dump(), layers=8, dim=64, hidden=256)
    p = program(model=model, data={"sequence": 64}, memory={"remat": remat, "remat_every": every}, **sections)
    return int(compiled(p).memory_analysis().temp_size_in_bytes)


@pytest.mark.slow
def test_rematerialization_saves_memory() -> None:
    none, selective, full, half = (temporary(*mode) for mode in (("none",), ("selective",), ("full",), ("full", 2)))
    assert full < selective < none
    assert full < half < none


LAYERS = 16


def scratch(mesh: str, remat: str, every: int = 1) -> float:
    """Temporary memory of the compiled step over the bytes of the whole model, with weights that dwarf activations."""
    model = dict(tiny().model.model_dump(), layers=LAYERS, dim=256, hidden=1024)
    p = program(
        model=model,
        data={"sequence": 8},
        train={"steps": 1, "batch": 8},
        parallel={"mesh": mesh},
        memory={"remat": remat, "remat_every": every},
    )
    unsharded = metrics.parameter_count(p.param_specs) * 4
    return float(compiled(p, **AS_FOR_A_USER).memory_analysis().temp_size_in_bytes / unsharded)


def allowed(devices: int) -> float:
    """A device's share of the gradients twice (accumulated and of one microbatch), and two full blocks."""
    return 2 / devices + 2 / LAYERS


DEVICES = [8, *slow([1])]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    ("remat", "every"), [("none", 1), *(pytest.param("full", every, marks=pytest.mark.slow) for every in (1, 2))]
)
def test_a_step_copies_no_weights(devices: int, remat: str, every: int) -> None:
    """No mode keeps gathered weights or slices of the stack from forward to backward."""
    assert scratch(f"{devices}x1", remat, every) < allowed(devices)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.slow
def test_kept_weights_are_caught(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rematerialization.POLICIES, "none", jax.checkpoint_policies.everything_saveable)
    assert scratch(f"{devices}x1", "none") > allowed(devices)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX 0.11 sees through slices: nothing is copied")
@pytest.mark.parametrize("devices", DEVICES)
def test_copied_slices_are_caught(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: slices outside of the checkpoint are stacked once more for the backward pass."""

    def copying(par: Any, layers: Any, x: Any, rematerialize: Any, *rest: Any) -> Any:
        graph, weights = nnx.split(layers)
        apply = rematerialize.block(lambda x, weights: par.use(nnx.merge(graph, weights))(par, x, *rest))
        groups = jax.tree.map(lambda w: w[:, None], weights)
        return jax.lax.scan(lambda x, group: (apply(x, jax.tree.map(lambda w: w[0], group)), None), x, groups)[0]

    monkeypatch.setattr(llama, "scan_layers", copying)
    assert scratch(f"{devices}x1", "full") > allowed(devices)


@pytest.mark.slow
def test_same_numbers_in_every_mode(batches: Any) -> None:
    results = []
    for remat in ("none", "full", "selective"):
        p = program(memory={"remat": remat}, precision={"policy": "fp64"})
        state, values = p.step(p.initialize(), batches(p.experiment, 1)[0])
        results.append((float(values["loss"]), float(values["grad_norm"]), np.asarray(state.parameters["norm.scale"])))
    for loss, norm, scale in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-14) and norm == pytest.approx(results[0][1], rel=1e-13)
        np.testing.assert_allclose(scale, results[0][2], rtol=1e-13)


def test_a_device_without_memory_is_reported() -> None:
    @rematerialization.in_memory("less")
    def step(message: str) -> None:
        raise jax.errors.JaxRuntimeError(message)

    with pytest.raises(TrainingError, match=r"^a device is out of memory: RESOURCE_EXHAUSTED: Out .*; use less$"):
        step("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 30.20GiB.\nAnd much more.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        step("INTERNAL: another error")
