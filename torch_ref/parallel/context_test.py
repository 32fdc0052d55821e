"""torch's context parallelism. Its ring needs a GPU, which all ranks share here over gloo."""

import numpy as np
import pytest
import torch

from jaxdist.config import read_record
from torch_ref.conftest import Run, Train
from torch_ref.parallel import context


class Mesh:
    """A mesh axis, as one of its ranks sees it."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.ranks


def ring(rank: int, ranks: int) -> context.Ring:
    return context.Ring(Mesh(rank, ranks))  # type: ignore[arg-type]


def test_order_is_that_of_torch_and_rows_are_a_ranks_own() -> None:
    from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

    order = ring(0, 3).order(24)
    assert order.tolist() == _HeadTailLoadBalancer(24, 3, "cpu")._generate_indices()[0].tolist()
    rows = [ring(rank, 3).rows(10 * torch.arange(24)) for rank in range(3)]
    assert (torch.cat(rows).numpy() == 10 * order).all()


# NCCL needs a GPU per rank, and gloo gathers and exchanges on CPUs alone.
ON_ONE_GPU = """
import torch
import torch.distributed as dist
from torch_ref.runtime import launch

begin, select = dist.init_process_group, torch.cuda.set_device
torch.cuda.set_device = lambda device: select(0)
launch.plan = lambda parallel, device: launch.Plan(parallel.axes(None), "cuda")
dist.init_process_group = lambda backend, device_id=None, **given: begin("gloo", **given)
ops, library = torch.ops._c10d_functional, torch.library.Library("_c10d_functional", "IMPL")

def on_the_host(op):
    return lambda x, *rest: ops.wait_tensor(op(x.cpu(), *rest)).to(x.device)

for name in ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor", "all_reduce"):
    library.impl(name, on_the_host(getattr(ops, name).default), "CUDA")
"""
IN_OTHER_TIMES = "from torch_ref.parallel.context import Context, Ring\nRing.order = Context.order\n"
RECORDED = "--device gpu --strategy ddp --record.steps 1 --record.tensors all"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's ring attention needs a GPU")


def off(run: Run, exact: Run) -> dict[str, float]:
    """Relative distance of each tensor in the record of step 1, except weights: Adam's first step depends on the sign
    of gradients near zero."""
    ours, theirs = (read_record(each.folder / "record" / "1.safetensors") for each in (run, exact))
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if not name.startswith("weights/")]
    return {n: float(np.linalg.norm(ours[n] - theirs[n]) / (np.linalg.norm(theirs[n]) or 1)) for n in names}


@needs_gpu
@pytest.mark.parametrize("mesh", ["context=2", "data=2,context=2", "context=2,tensor=2"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_ring_loses_no_more_than_one_device(train: Train, mesh: str, precision: str) -> None:
    exact = train(f"{RECORDED} --mesh 1x1")
    alone = off(train(f"{RECORDED} --mesh 1x1 --precision {precision}"), exact)
    lost = off(train(f"{RECORDED} --mesh {mesh} --precision {precision}", before=ON_ONE_GPU), exact)
    assert lost["batch/tokens"] == 0 and max(lost[name] / (alone[name] or 1e-6) for name in lost) < 4


@needs_gpu
def test_times_in_another_order_than_the_ring_are_found(train: Train) -> None:
    exact = train(f"{RECORDED} --mesh 1x1")
    lost = off(train(f"{RECORDED} --mesh context=2 --precision bf16", before=ON_ONE_GPU + IN_OTHER_TIMES), exact)
    assert lost["batch/tokens"] == 0 and lost["activation/layers.0.attention.attended"] > 0.1


@needs_gpu
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_ring_sends_its_closed_form(train: Train, remat: str) -> None:
    arguments = f"--device gpu --mesh context=2 --strategy ddp --precision bf16 --memory.remat {remat}"
    collectives = train(arguments, before=ON_ONE_GPU).summary["collectives"]
    found = {c["op"]: (c["count"], c["bytes"]) for c in collectives if c["op"] in ("all_gather", "all_to_all")}
    layers, keys = 2, 8 * 16 * 2 * 2 * 8 * 2  # B·T, keys and values of 2 heads with 8 numbers, in bytes
    gathers = layers * (3 if remat == "full" else 2)
    assert found == {"all_gather": (gathers, gathers * keys / 2), "all_to_all": (2 * layers, 2 * layers * keys / 2 * 2)}
