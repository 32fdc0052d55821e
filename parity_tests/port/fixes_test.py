"""Following the fixes in a port's messages literally leads to a port that runs."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jaxdist.config import ConfigError, Optimizer
from jaxdist.config.fixes_test import advice
from jaxdist.conftest import free_port
from jaxdist.convert.mappings.mapping import KeyMapping, Row
from jaxdist.families.layers import parameter
from parity_tests.port import port, sharded, trainers
from parity_tests.port.port import Port
from parity_tests.port.port_command_test import BATCH
from parity_tests.port.port_test import AdamW, plain, square, torch_adamw
from parity_tests.port.sharded import Sharded
from parity_tests.port.sharded_test import batch, opt

pytestmark = pytest.mark.long

Fields = dict[str, Any]
LOSS = square().jax_loss
OWN: Fields = {"jax_step": AdamW(LOSS), "torch_step": torch_adamw}
MUON, EMA = Optimizer(name="muon"), Optimizer(ema=0.9)
IMAGES = [{"images": batch(4)["tokens"], "targets": batch(4)["targets"], "mask": batch(4)["mask"]}]
THREE = {"parallel": {"mesh": "data=3", "strategy": "ddp"}}
GIVE_MAPPING = "give a mapping of fields (parallel: mesh, reduce, strategy; memory: remat, remat_every; train: "


def with_field(value: Any) -> Fields:
    return {"batches": [BATCH | {"z": value}]}


def row_losses(m: Any, b: Any) -> Any:
    return (m(b["x"]) - b["y"]).square().mean(-1)


def detached(m: Any, b: Any) -> Any:
    return row_losses(m, b).mean().detach()


def mean_loss(m: Any, b: Any) -> Any:
    return row_losses(m, b).mean()


def dropping(rate: float) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Dropout(rate)), nn.Linear(6, 6))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[2].weight = module[0].weight
    return module


def tied_in_jax() -> Fields:
    """One kernel for two layers, as in a user's function."""
    tree = square().jax_parameters["params"]
    parameters = {"up": tree["Dense_0"], "bias": tree["Dense_1"]["bias"]}
    rows = [Row("up.kernel", "0.weight", "transpose"), Row("up.bias", "0.bias"), Row("bias", "2.bias")]
    down = lambda p: {"kernel": p["up"]["kernel"], "bias": p["bias"]}  # noqa: E731
    loss = lambda p, b: plain({"up": p["up"], "down": down(p)}, b)  # noqa: E731
    return {"jax_parameters": parameters, "jax_loss": loss, "mapping": KeyMapping(tuple(rows)), "torch_module": tied()}


# Wrong fields of `square`, the fix in the message, and fields that follow it.
FOLLOWED: list[tuple[Fields, str, Sequence[Fields]]] = [
    ({"torch_step": torch_adamw}, "give both, or neither for `optimizer`", [OWN, {}]),
    ({"optimizer": EMA}, "leave it out", [{"optimizer": Optimizer()}]),
    (
        {"optimizer": MUON},
        "choose another, as adamw, or give jax_step and torch_step",
        [{"optimizer": Optimizer(name="adamw")}, OWN | {"optimizer": MUON}],
    ),
    ({"torch_loss": None}, "give both, or the steps of both sides", [{}, OWN | {"torch_loss": None}]),
    ({"jax_loss": None}, "give both, or the steps of both sides", [{}, OWN | {"jax_loss": None}]),
    ({"batches": []}, "give one mapping of names to arrays for each step, and at least one", [{"batches": [BATCH]}]),
    ({"batches": [BATCH, {"x": np.ones(3)}]}, "give all the same fields", [{"batches": [BATCH, BATCH]}]),
    (
        with_field({"a": np.ones(3)}),
        "give nested ones flat, and put them together in jax_loss and torch_loss",
        [{"batches": [BATCH | {"z.a": np.ones(3)}]}],
    ),
    (
        with_field(np.array(["a", "b"])),
        "give whole or floating-point numbers, and leave out what the losses do not need",
        [with_field(np.array([0, 1])), with_field(np.ones(2)), {"batches": [BATCH]}],
    ),
    (with_field(np.full(3, np.nan)), "give finite ones", [with_field(np.ones(3))]),
    (with_field(np.array([2**31])), "give smaller ones", [with_field(np.array([2**31 - 1]))]),
    ({"torch_loss": row_losses}, "give the mean over the batch, or the sum", [{"torch_loss": mean_loss}]),
    (
        {"jax_loss": lambda v, b: jnp.ones(3)},
        "give the mean over the batch, or the sum",
        [{"jax_loss": lambda v, b: jnp.mean(jnp.ones(3))}],
    ),
    (
        {"torch_loss": detached},
        "leave out no_grad, detach and the like, and let the module's parameters require theirs",
        [{"torch_loss": mean_loss}],
    ),
    (
        {"torch_module": dropping(0.5)},
        "call torch_module.eval(), or set the rate to 0",
        [{"torch_module": dropping(0.5).eval()}, {"torch_module": dropping(0.0)}],
    ),
    ({"torch_module": tied()}, "tie them in JAX, or untie them in torch", [tied_in_jax(), {}]),
]
# The same for a model in jaxdist's sharding.
SHARDED: list[tuple[Fields, str, Sequence[Fields]]] = [
    ({"jax_loss": LOSS}, "leave out jax_loss, jax_step and torch_step", [{}]),
    (OWN, "leave out jax_loss, jax_step and torch_step", [{}]),
    ({"torch_loss": None}, "give it with sharded", [{}]),
    ({"optimizer": MUON}, "choose another, as adamw", [{"optimizer": Optimizer(name="adamw")}]),
    (
        {"sections": THREE},
        "give a multiple of 3 rows",
        [{"sections": THREE, "rows": 3}],
    ),
    (
        {"sections": {"parallel": {"mesh": "2x3"}}},
        "use 1 there, or a model with a multiple of 3",
        [{"sections": {"parallel": {"mesh": "2x1"}}}],
    ),
    (
        {"sections": {"train": {"accumulation": 3}}},
        "use train.accumulation = 1",
        [{"sections": {"train": {"accumulation": 1}}}],
    ),
    ({"batches": [batch(4), batch(2)]}, "give all the same", [{"batches": [batch(4), batch(4)]}]),
    (
        {"sections": {"parallel": "2x2"}},
        f"{GIVE_MAPPING}accumulation, seed)",
        [{"sections": {"parallel": {"mesh": "2x2"}}}],
    ),
    (
        {"sections": {"train": {"batch": 4}}},
        f"{GIVE_MAPPING}accumulation, seed)",
        [{"sections": {"train": {"seed": 4}}}],
    ),
]
OTHERS = [
    *("give the same", "name it in Sharded", "on a CPU set JAX_NUM_CPU_DEVICES=4 in the environment"),
    "end it by torch.distributed.destroy_process_group(), or start a plain process",
    *("it is raised by the losses or steps, which have to find it",),
]


def refusal(make: Callable[..., Port], fields: Fields, checked_alone: bool = False) -> str:
    """Message that a port gives when checked or by the end of a first step in torch; empty without one."""
    try:
        port = make(**fields)
        port.check()
        if not checked_alone:
            _ = port.modules
            port.torch_side("float32", None).step(port.batches[0])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("wrong", "fix", "rights"), FOLLOWED, ids=lambda value: "")
def test_a_port(wrong: Fields, fix: str, rights: Sequence[Fields]) -> None:
    assert refusal(square, wrong).endswith(fix)
    assert [refusal(square, right) for right in rights] == [""] * len(rights)


@pytest.mark.parametrize(("wrong", "fix", "rights"), SHARDED, ids=lambda value: "")
def test_a_model_in_our_sharding(wrong: Fields, fix: str, rights: Sequence[Fields]) -> None:
    assert refusal(opt, wrong, checked_alone=True).endswith(fix)
    assert [refusal(opt, right, checked_alone=True) for right in rights] == [""] * len(rights)


def test_fields_of_batches_are_named_in_sharded() -> None:
    assert refusal(opt, {"batches": IMAGES}, checked_alone=True).endswith("; name it in Sharded")
    model = opt().sharded
    assert model is not None
    named = {"batches": IMAGES, "sharded": Sharded(model.model, inputs="images")}
    assert not refusal(opt, named, checked_alone=True)


def test_weights_are_those_of_shardeds_model() -> None:
    port = opt()
    assert port.sharded is not None
    cut = port.jax_parameters | {"norm.scale": np.ones(4)}
    with pytest.raises(ConfigError, match=r"jax_parameters: norm\.scale .*; give the same$"):
        port.sharded.check(cut, port.batches, port.optimizer)
    port.sharded.check(port.sharded.parameters(), port.batches, port.optimizer)


def test_a_parameter_is_declared() -> None:
    class Model(nnx.Module):
        def __init__(self, weight: Any) -> None:
            self.weight = weight

    with pytest.raises(ConfigError, match=r"; declare it by jaxdist\.families\.layers\.parameter$"):
        Sharded(Model(nnx.Param(np.ones(3))))
    Sharded(Model(parameter((4,), ("embed",))))


@pytest.mark.slow
def test_more_devices_of_a_cpu() -> None:
    """JAX creates CPU devices at its start, so this runs in a new process."""
    code = (
        "from jaxdist.config import Parallel; from parity_tests.port.sharded import Sharded; "
        "print(Sharded.mesh(None, Parallel(mesh='4x1')).size)"
    )
    few = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    refused = subprocess.run([sys.executable, "-c", code], env=few, capture_output=True, text=True)
    assert refused.returncode == 1
    ((name, value),) = re.findall(r"; on a CPU set (\w+)=(\d+) in the environment$", refused.stderr.strip())
    done = subprocess.run([sys.executable, "-c", code], env=few | {name: value}, capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_process_group_is_ended(process_group: None) -> None:
    assert "end it by torch.distributed.destroy_process_group(), or" in refusal(square, {})
    torch.distributed.destroy_process_group()
    assert not refusal(square, {})


def test_a_file_that_is_found(tmp_path: Path) -> None:
    def loss(m: Any, b: Any) -> Any:
        return mean_loss(m, b) * torch.from_numpy(np.load(tmp_path / "scale.npy"))

    message = refusal(square, {"torch_loss": loss})
    assert message.endswith("; it is raised by the losses or steps, which have to find it")
    np.save(tmp_path / "scale.npy", np.ones(()))
    assert not refusal(square, {"torch_loss": loss})


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--folder", "a"]])
def test_the_folder_of_a_script(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Proved(Exception):
        pass

    def prove(_: Port, folder: Path) -> None:
        raise Proved(str(folder))

    monkeypatch.setattr(Port, "prove", prove)
    monkeypatch.setattr(sys, "argv", ["port.py", *arguments])
    with pytest.raises(SystemExit):
        square().main()
    assert "error: give one argument, the folder" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["port.py", "new"])
    with pytest.raises(Proved, match="new"):
        square().main()


def test_every_fix_is_followed() -> None:
    """Each fix in the source is among those that the tests above follow."""
    known = [*OTHERS, *(fix for _, fix, _ in (*FOLLOWED, *SHARDED)), "declare it by jaxdist.families.layers.parameter"]
    modules = [Path(module.__file__ or "") for module in (port, sharded, trainers)]
    assert not [p for p in advice(*modules) if not any(re.fullmatch(p, fix) for fix in known)]
