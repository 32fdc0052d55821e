"""Counted traffic equals the closed form of each strategy."""

import pytest

from torch_ref.conftest import Train, command

pytestmark = pytest.mark.long

# Over n = 2 devices a gather or scatter of P bytes sends P/2, an all-reduce P.
CASES = {
    "--mesh 2x1 --strategy ddp --train.accumulation 2": {"all_reduce": 1.0},
    # The all-reduce spans all four ranks, the broadcasts two.
    "--mesh data=2,fsdp=2 --strategy zero1": {"all_reduce": 2 * 3 / 4, "broadcast": 0.5},
    # One gather for both microbatches, one scatter each.
    "--mesh 2x1 --strategy zero2 --train.accumulation 2": {"all_gather": 0.5, "reduce_scatter": 1.0},
}
SCALARS = 100  # bytes; above the loss, the token count and the norm


@pytest.mark.slow
@pytest.mark.parametrize("arguments", CASES)
def test_a_step_sends_its_strategys_closed_form(train: Train, arguments: str) -> None:
    summary = train(arguments).summary
    size = summary["parameters"] * 8
    sent: dict[str, float] = {}
    for collective in summary["collectives"]:
        if collective["bytes"] > SCALARS:
            sent[collective["op"]] = sent.get(collective["op"], 0) + collective["bytes"] / size
    assert sent == pytest.approx(CASES[arguments], rel=1e-3)


def test_fsdp_gathers_blocks_twice_and_the_rest_once(train: Train) -> None:
    summary = train("--mesh data=2,fsdp=2 --train.accumulation 2 --memory.remat selective").summary
    sent = {(c["op"], c["axis"]): c["bytes"] for c in summary["collectives"] if c["bytes"] > SCALARS}
    rest = (128 * 32 + 32) * 8  # tied embedding and last norm
    size = summary["parameters"] * 8
    expected = {
        ("all_gather", "fsdp"): 2 * (2 * (size - rest) + rest) / 2,
        ("reduce_scatter", "fsdp"): 2 * size / 2,
        ("all_reduce", "data"): size / 2,  # shards, once a step
    }
    assert sent == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_activations_cross_the_tensor_axis_in_bfloat16(train: Train) -> None:
    collectives = train("--mesh 1x2 --precision bf16").summary["collectives"]
    found = {c["dtype"]: c for c in collectives if c["axis"] == "tensor"}
    layers, activation = 2, 8 * 16 * 32 * 2  # B·T·D in bytes; an all-reduce over two devices sends it once
    assert found["bfloat16"]["count"] == 4 * layers + 2 + 2 * layers  # plus the gradients of the query and key norms
    assert found["bfloat16"]["bytes"] == pytest.approx((4 * layers + 2) * activation, rel=1e-2)
    assert found["float32"]["bytes"] < activation  # the loss, a few numbers a token


def test_an_unknown_collective_is_refused() -> None:
    unknown = "from torch_ref.accounting import traffic\ntraffic.KINDS.pop('_allgather_base_')"
    result = command("--mesh", "2x1", "--steps", "2", "--model.vocab", "256", before=unknown)
    assert result.returncode == 1 and "not counted yet" in result.stderr


def test_smaller_buckets_need_more_all_reduces(train: Train) -> None:
    """`bucket_mb` (DDP's bucket_cap_mb) changes the number of all-reduces, not their bytes."""
    ddp = "--mesh 2x1 --strategy ddp --train.accumulation 2"
    counts, sent = [], []
    for arguments in (ddp, f"{ddp} --parallel.bucket_mb 0.02"):
        large = [c for c in train(arguments).summary["collectives"] if c["bytes"] > SCALARS]
        counts.append(sum(c["count"] for c in large))
        sent.append(sum(c["bytes"] for c in large))
    assert counts[1] > counts[0] and sent[0] == pytest.approx(sent[1], rel=1e-3)
