"""Steps compiled for GPUs that are not at hand: by processes of their own, as the plugin is to be told before JAX."""

import json
import subprocess
import sys
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.config.hardware import shipped
from jaxdist.planner import gpus


@pytest.mark.parametrize("name", [name for name, device in shipped().items() if device.platform == "gpu"])
def test_a_chip_is_told_of(name: str) -> None:
    """What hardware.toml says of it, as the numbers of XLA's own descriptions."""
    device = shipped()[name]
    assert device.chip
    said = gpus.target(device)
    major, minor = device.chip.capability.split(".")
    for text in (f"core_count: {device.chip.cores}", f"major: {major} minor: {minor}", f"NVIDIA {device.known_as}"):
        assert text in said
    with pytest.raises(ConfigError, match="has no table `chip`"):
        gpus.target(device.model_copy(update={"chip": None}))


def compiled(*arguments: str) -> dict[str, Any]:
    line = [sys.executable, "-m", "jaxdist.plan", "--compiled", "--json", "--hardware", "h100", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


needed = pytest.mark.skipif(not gpus.installed(), reason="JAX's CUDA plugin is not installed: jaxdist[cuda12]")
LLAMA = ("--config", "llama-3.1-8b", "--model.layers", "4", "--train.accumulation", "1", "--parallel.overlap")


@needed
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_fsdp_on_eight_gpus(overlap: str) -> None:
    """Gradients are reduce-scattered in float32, weights gathered in bfloat16, most of both beside matrix products,
    as XLA schedules them by default and with its pipelined collectives."""
    found = compiled(*LLAMA, overlap, "--mesh", "8x1")
    program = found["compiled"]
    assert program["platform"] == "gpu"
    assert {kind: program["memory"][kind] for kind in ("parameters", "optimizer_state")} == {
        kind: found["memory"][kind] for kind in ("parameters", "optimizer_state")
    }
    assert program["traffic"] == pytest.approx(found["least_bytes"], rel=1e-3)
    of_blocks = [o for o in program["overlaps"] if o["looped"]]
    assert {(o["op"], o["dtype"]) for o in of_blocks} == {("all-gather", "bf16"), ("reduce-scatter", "f32")}
    hidden = [o for o in of_blocks if o["products"]]
    assert {o["op"] for o in hidden} == {"all-gather", "reduce-scatter"} and len(hidden) > len(of_blocks) / 2


@needed
def test_gradients_of_another_dtype_are_seen() -> None:
    program = compiled(*LLAMA, "false", "--mesh", "8x1", "--precision.reduce", "bfloat16")["compiled"]
    assert ("reduce-scatter", "bf16") in {(o["op"], o["dtype"]) for o in program["overlaps"] if o["looped"]}
