"""Compiled programs: size independent of depth, true float32 where claimed, and an evaluation that computes what the
step does in its memory."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.lax import Precision

from jaxdist.conftest import MIXTRAL, often, slow, tiny
from jaxdist.data import IGNORED
from jaxdist.families.llama import model as llama
from jaxdist.families.loss import chunked
from jaxdist.parallel.mesh import make_mesh
from jaxdist.training import step
from jaxdist.training.program import Program

pytestmark = pytest.mark.long


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, including those of inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from equations(getattr(part, "jaxpr", part))


PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"model": MIXTRAL},
    "resnet": {"model": {"family": "resnet", "depths": [1, 1], "widths": [8, 16]}, "parallel": {"mesh": "2x1"}},
}


def approximate(fields: dict[str, Any], mesh: str = "2x2") -> tuple[list[str], list[str]]:
    """Kinds of products of a step in float32, and those that a GPU may compute in TF32 or a TPU in bfloat16."""
    experiment = tiny(**({"parallel": {"mesh": mesh}} | fields))
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    jaxpr = program.step.trace(program.abstract, program.abstract_batch).jaxpr.jaxpr
    products = [equation for equation in equations(jaxpr) if equation.primitive.name in PRODUCTS]
    exact = (Precision.HIGHEST, Precision.HIGHEST)
    lax = [equation for equation in products if equation.params["precision"] not in (Precision.HIGHEST, exact)]
    return [e.primitive.name for e in products], [e.primitive.name for e in lax]


@pytest.mark.parametrize("model", MODELS)
def test_float32_is_float32_on_all_devices(model: str) -> None:
    products, rounded = approximate(MODELS[model])
    assert len(products) > 10 and not rounded


def test_products_in_less_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    update: Any = jax.config.update

    def but_one(name: str, value: Any) -> None:
        update(name, None if name == "jax_default_matmul_precision" else value)

    monkeypatch.setattr(jax.config, "update", but_one)
    assert approximate(MODELS["llama"])[1]


def size(layers: int, mesh: str = "2x4", remat: str = "none") -> int:
    """Equations in the step of a model with this many layers."""
    experiment = tiny(model={"layers": layers}, parallel={"mesh": mesh}, memory={"remat": remat})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    return len(list(equations(program.step.trace(program.abstract, program.abstract_batch).jaxpr.jaxpr)))


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("1x1", "none"), ("8x1", "full"))]


@pytest.mark.parametrize(("mesh", "remat"), [("2x4", "selective"), *SLOW])
def test_does_not_grow_with_depth(mesh: str, remat: str) -> None:
    assert size(2, mesh, remat) == size(64, mesh, remat)


def test_growth_with_depth_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unrolled(par: Any, layers: nnx.Module, x: jax.Array, rematerialize: Any, *rest: Any) -> jax.Array:
        graph, weights = nnx.split(layers)
        for i in range(jax.tree.leaves(weights)[0].shape[0]):
            x = par.use(nnx.merge(graph, jax.tree.map(lambda w, i=i: w[i], weights)))(par, x, *rest)
        return x

    monkeypatch.setattr(llama, "scan_layers", unrolled)
    assert size(8) > 2 * size(2)


def in_chunks(chunks: int, mesh: str) -> Program:
    """Evaluation by two microbatches."""
    experiment = tiny(train={"accumulation": 2}, parallel={"mesh": mesh}, memory={"loss_chunks": chunks})
    return Program(experiment, make_mesh(experiment, "cpu")[0])


@pytest.mark.parametrize("mesh", often(["1x1", "2x2", "pipeline=2,fsdp=2"], ["2x2"]))
@pytest.mark.slow
def test_evaluation_in_chunks_is_that_of_the_whole(batches: Any, monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    """Three padded chunks of a device's 80 or 160 tokens; dropping the last changes the loss."""
    batch, parameters = batches(tiny(), 1)[0], in_chunks(1, mesh).initialize().parameters

    def evaluated(chunks: int) -> float:
        program = in_chunks(chunks, mesh)
        return float(program.evaluate(parameters, program.placement.put(batch)).loss)

    at_once = evaluated(1)
    for chunks in (2, 3, 80):
        assert evaluated(chunks) == pytest.approx(at_once, rel=1e-14)
    monkeypatch.setattr(step, "chunked", lambda targets, chunks: chunked(targets, chunks).at[-1].set(IGNORED))
    assert abs(evaluated(3) / at_once - 1) > 0.1


@pytest.mark.parametrize("chunks", [4, *slow([1])])
def test_evaluation_takes_no_more_memory_than_the_step(chunks: int) -> None:
    """Logits dominate; those of eight microbatches at once would exceed the step's memory."""
    experiment = tiny(model={"vocab": 4096}, train={"accumulation": 8}, memory={"loss_chunks": chunks})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    state, batch = program.abstract, program.abstract_batch
    lowered = program.step.lower(state, batch), program.evaluate.lower(state.parameters, batch)
    trained, found = (one.compile().memory_analysis().temp_size_in_bytes for one in lowered)
    logits = 8 * 16 * 20 * 4096 / chunks  # float64, of the whole batch
    assert found < trained and found < logits
