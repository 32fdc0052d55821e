"""The program that is compiled: as large for many layers as for few."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxdist.conftest import tiny
from jaxdist.mesh import make_mesh
from jaxdist.models import llama
from jaxdist.program import Program


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from equations(getattr(part, "jaxpr", part))


def size(layers: int, mesh: str = "2x4", remat: str = "none") -> int:
    """Equations in the step of a model with this many layers."""
    experiment = tiny(model={"layers": layers}, parallel={"mesh": mesh}, memory={"remat": remat})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    return len(list(equations(program.step.trace(program.abstract, program.abstract_batch).jaxpr.jaxpr)))


@pytest.mark.parametrize(("mesh", "remat"), [("1x1", "none"), ("8x1", "full"), ("2x4", "selective")])
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
