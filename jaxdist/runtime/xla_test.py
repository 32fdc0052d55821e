"""Compiler options arrive, and the CPU compiler's collectives and products."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.config import Parallel
from jaxdist.conftest import MIXTRAL, often, tiny
from jaxdist.ops import linear
from jaxdist.parallel.mesh import make_mesh
from jaxdist.planner.overlap import computations
from jaxdist.runtime import xla
from jaxdist.training.program import Program
from jaxdist.training.step_test import train

pytestmark = pytest.mark.long

HANDLE = r"channel_handle<handle = (\d+)"  # a collective's number in StableHLO
KNOBS: dict[str, Any] = {"overlap": True, "bucket_mb": 0.5}


# Options that the CPU compiler lacks from jax 0.11 on.
GONE = {name for name in xla.OVERLAP if "pipelined" in name} if jax.__version_info__ >= (0, 11) else set()


def test_all_are_known_to_this_version() -> None:
    assert xla.options(Parallel()) == {}
    found = xla.options(Parallel(**KNOBS))
    assert found == dict.fromkeys({*xla.OVERLAP} - GONE, True) | dict.fromkeys(xla.BUCKETS, 2**19)
    assert all(xla.known(name, value) for name, value in xla.YNN.items())


def test_options_unknown_to_a_version_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "OVERLAP", ("xla_gpu_of_another_time", xla.OVERLAP[0]))
    assert xla.options(Parallel(overlap=True)) == {xla.OVERLAP[1]: True}


def test_they_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "options", lambda parallel: {"xla_gpu_of_another_time": True})
    experiment = tiny()
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_of_another_time"):
        program.step.lower(program.abstract, program.abstract_batch).compile()


@pytest.mark.slow
def test_on_cpus_no_number_changes(batches: Any) -> None:
    """The CPU compiler accepts options for GPUs without effect."""
    plain, knobs = (train(tiny(parallel={"mesh": "4x2"} | more), batches, steps=3) for more in ({}, KNOBS))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(knobs), strict=True))


STAGES = {"mesh": "pipeline=2,fsdp=2", "pipeline_schedule": "Interleaved1F1B", "virtual_stages": 2}
SEVERAL: dict[str, dict[str, Any]] = {
    "1F1B": {"parallel": {"mesh": "pipeline=2,context=2"}},
    "interleaved": {"model": {"layers": 4}, "parallel": STAGES, "memory": {"remat": "full"}},
    "mixture": {"model": MIXTRAL, "parallel": {"mesh": "fsdp=2,expert=2"}, "memory": {"remat": "selective"}},
}


@pytest.mark.parametrize("which", often(SEVERAL, ["1F1B"]))
def test_each_collective_has_a_number_of_its_own(which: str) -> None:
    """Programs compiled for CPUs number them; JAX itself gives all the same."""
    experiment = tiny(**SEVERAL[which], train={"accumulation": 2})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    traced = program.step.trace(program.abstract, program.abstract_batch)
    assert {*re.findall(HANDLE, traced.lower().as_text())} == {"1"}
    found = re.findall(r"channel_id=(\d+)", program.step.lowered(traced).compile().as_text())
    assert len(found) > 40 and len({*found}) == len(found)


def test_another_program_of_the_process_is_untouched() -> None:
    """Compiled after ours, a plain `jax.jit` has JAX's numbers."""
    experiment = tiny(parallel={"mesh": "fsdp=2"})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    program.step.lower(program.abstract, program.abstract_batch).compile()
    specs: dict[str, Any] = {"mesh": program.mesh, "in_specs": P("fsdp"), "out_specs": P()}
    other = jax.jit(jax.shard_map(lambda x: jax.lax.psum(jax.lax.psum(x, "fsdp") * x, "fsdp"), **specs))
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert re.findall(HANDLE, other.lower(x).as_text()) == ["1", "1"]
    assert re.findall(HANDLE, xla.Jitted(other, program.mesh).lower(x).as_text()) == ["1", "2"]


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="groups are mesh axes")
def test_none_is_compiled_within_groups_of_one() -> None:
    """Models use collectives over axes of one device: the lowered program has them, the compiled one does not."""
    experiment = tiny(parallel={"mesh": "fsdp=2"})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    traced = program.step.trace(program.abstract, program.abstract_batch)
    assert "dense<[[0], [1]]>" in traced.lower().as_text()
    found = re.findall(r"replica_groups=(\S+)", program.step.lowered(traced).compile().as_text())
    assert found and not [groups for groups in found if "{0}" in groups or groups.startswith("[2,1]")]


def test_options_in_xla_flags_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, _ = make_mesh(tiny(parallel={"mesh": "fsdp=2"}), "cpu")
    (name,) = xla.on_cpus(mesh)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false --{name}=")
    assert not xla.on_cpus(mesh)


@pytest.mark.parametrize("devices", [1, 2])
def test_reductions_are_xlas_own_on_several_devices(devices: int) -> None:
    """Products are YNNPACK's, on one device and on several."""
    experiment = tiny(parallel={"mesh": f"fsdp={devices}"}, precision={"policy": "fp32"})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    text = program.step.lower(program.abstract, program.abstract_batch).compile().as_text()
    ynn = [line for line in text.splitlines() if "__ynn_fusion" in line]
    reductions = [line for line in ynn if "/reduce_" in line]
    assert len(ynn) > len(reductions) and bool(reductions) == (devices == 1)


PRODUCTS: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": {"mesh": "fsdp=2"}},
    "tensor": {"parallel": {"mesh": "fsdp=2,tensor=2", "sequence": True}, "memory": {"remat": "full"}},
    "ring": {"parallel": {"mesh": "context=2"}},
    "chunks": {"parallel": {"mesh": "fsdp=2"}, "memory": {"loss_chunks": 2}},
    "mixture": {"model": MIXTRAL, "parallel": {"mesh": "fsdp=2"}},
    "tied": {"model": {"tied": True}, "parallel": {"mesh": "fsdp=2"}},
}
ROUTER = "BTD,DE->BTE"  # a small product, left to Eigen


def not_ynnpacks(**fields: Any) -> list[str]:
    """Matrix products in optimized HLO that XLA does not give to YNNPACK."""
    experiment = tiny(**fields, precision={"policy": "fp32"})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    text = program.step.lower(program.abstract, program.abstract_batch).compile().as_text()
    ynnpacks = set(re.findall(r"calls=%([\w.-]+).*__ynn_fusion", text))
    products = [
        (name, line) for name, lines in computations(text) for line in lines if " dot(" in line and ROUTER not in line
    ]
    assert len(products) > 20
    return [line for name, line in products if name not in ynnpacks]


@pytest.mark.parametrize("which", often(PRODUCTS, ["fsdp", "tensor"]))
def test_every_product_is_ynnpacks_on_several_devices(which: str) -> None:
    assert not not_ynnpacks(**PRODUCTS[which])


def test_eigens_products_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: with the left side summed over rows Eigen gets at least the gradients of a block's seven kernels and the
    head's."""
    monkeypatch.setattr(linear, "written", lambda x: x)
    assert len(not_ynnpacks(**PRODUCTS["fsdp"])) >= 8


PRODUCT_OF_HEADS = {
    "ynn": lambda x, y: linear.transposed(x) @ y,
    "eigen": lambda x, y: jnp.einsum("BKNC,BKNS->BKCS", x, y),
}


@pytest.mark.parametrize("whose", PRODUCT_OF_HEADS)
def test_products_of_heads(whose: str) -> None:
    """Products of attention's backward pass alone."""
    mesh, _ = make_mesh(tiny(parallel={"mesh": "fsdp=2"}, precision={"policy": "fp32"}), "cpu")
    x, y = (jax.ShapeDtypeStruct((2, 4, 64, size), jnp.float32) for size in (16, 64))
    with jax.set_mesh(mesh):
        product = jax.jit(PRODUCT_OF_HEADS[whose], compiler_options=xla.on_cpus(mesh))
        text = str(product.lower(x, y).compile().as_text())
    assert ("__ynn_fusion" in text) == (whose == "ynn")
