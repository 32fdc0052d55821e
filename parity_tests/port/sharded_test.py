"""A user's model in jaxdist's sharding: all five levels hold on a mesh, and mistakes on the mesh alone are found."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import lax
from torch import nn

from jaxdist.config import ConfigError, Optimizer
from jaxdist.families.layers import parameter
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.training.step import Step
from parity_tests.examples.sharded_opt import OPT
from parity_tests.port import port_levels
from parity_tests.port.port import Port
from parity_tests.port.port_levels import PortRun
from parity_tests.port.sharded import Sharded, stacks_of
from parity_tests.proof.verdict import LEVELS

pytestmark = pytest.mark.long

MESH = {"parallel": {"mesh": "2x2"}}


def opt(sections: Mapping[str, Mapping[str, Any]] = MESH, steps: int = 2, rows: int = 4, **fields: Any) -> Port:
    """The example's models, tiny."""
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, vocab_size=32, word_embed_proj_dim=16,
        max_position_embeddings=12, pad_token_id=None,
    )  # fmt: skip
    sharded = Sharded(OPT(vocab=32, positions=12, dim=16, layers=2, heads=2, hidden=24, std=0.2), sections=sections)
    tokens = np.random.default_rng(0).integers(32, size=(steps, rows, 9))

    def torch_loss(m: Any, b: Any) -> Any:
        return nn.functional.cross_entropy(m(b["tokens"], b["mask"]).logits.flatten(0, 1), b["targets"].flatten())

    values: dict[str, Any] = {
        "jax_parameters": sharded.parameters(),
        "torch_module": transformers.OPTForCausalLM(config).eval(),
        "mapping": None,
        "batches": [{"tokens": x[:, :-1], "targets": x[:, 1:], "mask": np.ones((rows, 8), np.int64)} for x in tokens],
        "torch_loss": torch_loss,
        "optimizer": Optimizer(learning_rate=0.01, warmup=0),
        "sharded": sharded,
    }
    return Port(**values | fields)


def batch(rows: int) -> dict[str, np.ndarray]:
    tokens = np.zeros((rows, 8), np.int64)
    return {"tokens": tokens, "targets": tokens, "mask": np.ones_like(tokens)}


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a proof."""
    folder = tmp_path_factory.mktemp("sharded")
    verdict = opt().prove(folder)
    assert verdict.word == "equivalent", verdict.failed
    return folder


def test_all_levels_hold(proved: Path) -> None:
    written = json.loads((proved / "verdict.json").read_text())
    assert {check["level"] for check in written["checks"]} == set(LEVELS)
    recorded = PortRun("jax", proved / "runs" / "jax-float64").records[1]
    noted = [name for name in recorded if name.startswith("activation/")]
    assert "activation/model.decoder.layers.1.self_attn.out_proj" in noted and len(noted) > 10
    summary = json.loads((proved / "runs" / "mesh-float32" / "summary.json").read_text())
    assert summary["devices"] == 4 and summary["memory"]["parameters"] * 3 < summary["parameters"] * 4


@pytest.mark.slow
def test_a_mistake_on_the_mesh_alone_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = Step.norm

    def norm(self: Step, gradients: Any) -> jax.Array:
        return right(self, gradients) * (1 + 1e-6 * (lax.axis_size("fsdp") - 1))

    monkeypatch.setattr(Step, "norm", norm)
    verdict = opt().prove(tmp_path / "new")
    assert "distribution" in {check.level for check in verdict.failed}
    assert "mathematics" not in {check.level for check in verdict.failed}
    assert verdict.divergence and (verdict.divergence.step, verdict.divergence.tensor) == (1, "scalar/grad_norm")


@pytest.mark.parametrize("kind", ["parameters", "optimizer_state"])
def test_memory_of_another_strategy_is_caught(proved: Path, kind: str) -> None:
    run, alone = (PortRun(name, proved / "runs" / f"{name}-float32") for name in ("mesh", "torch"))
    assert all(check.holds for check in port_levels.memory(run, alone))
    run.summary["memory"][kind] *= 2
    assert [check.name for check in port_levels.memory(run, alone) if not check.holds] == [
        f"mesh, {kind}, bytes match its share"
    ]


@pytest.mark.parametrize(
    ("name", "moments"),
    [("sgd", 1), ("lion", 1), ("adam", 2)],
)
@pytest.mark.slow
def test_memory_counts_the_optimizers_state(name: Any, moments: int, tmp_path: Path) -> None:
    port = opt(optimizer=Optimizer(name=name, learning_rate=0.01, warmup=0))
    mesh, torch = (port.run(kind, tmp_path / kind, [2]) for kind in ("mesh-float32", "torch-float32"))
    checks = list(port_levels.memory(mesh, torch))
    assert len(checks) == 2 and all(check.holds for check in checks)
    assert len({n.partition("/")[0] for n in torch.records[2] if n.startswith(("exp_", "momentum"))}) == moments


def test_traffic_of_another_strategy_is_caught(proved: Path) -> None:
    run = PortRun("mesh", proved / "runs" / "mesh-float32")
    assert len(checks := list(port_levels.traffic(run))) == 2 and all(check.holds for check in checks)
    for collective in run.summary["collectives"]:
        collective["bytes"] *= 1.1
    failed = [check.name for check in port_levels.traffic(run) if not check.holds]
    assert failed == ["mesh, fsdp: bytes match the closed form"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections": {"parallel": {"mesh": "16x2"}}}, "needs 32 devices, there are 8"),
        ({"sections": {"parallel": {"mesh": "3x1"}}}, "batches: 4 rows are not divided by .* = 3"),
        ({"sections": {"parallel": {"mesh": "2x3"}}}, "parameter .* does not divide"),
        ({"sections": {"parallel": {"mash": "2x2"}}}, "mash"),
        ({"jax_loss": lambda p, b: 0.0}, "sharded has its own loss and step"),
        ({"torch_loss": None}, "torch_loss is missing; give it with sharded"),
        ({"batches": [{"images": np.zeros((4, 8)), "targets": np.zeros((4, 8))}]}, "no array 'tokens'"),
        ({"batches": [batch(4), batch(2)]}, "batches: 2 has other shapes than the first"),
        ({"batches": [batch(4) | {"targets": np.zeros((4, 7), np.int64)}]}, "a step of the model cannot be traced"),
        ({"sections": {"precision": {"policy": "bf16"}}}, "sections: precision = .* give a mapping of fields"),
        ({"sections": {"parallel": "2x2"}}, "sections: parallel = '2x2'"),
        ({"sections": MESH | {"memory": {"remat": "full", "remat_every": 3}}}, "model.layers = 2"),
        ({"sections": {"train": {"accumulation": 3}}}, "train.batch = 4"),
    ],
)
def test_ports_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opt(**change).check()


def test_weights_and_layouts_that_do_not_fit() -> None:
    port = opt()
    weights = {name: w for name, w in port.jax_parameters.items() if name != "norm.scale"}
    with pytest.raises(ConfigError, match=r"norm\.scale"):
        replace(port, jax_parameters=weights, mapping=port.keys).check()
    assert port.sharded
    with pytest.raises(ConfigError, match=r"jax_parameters: norm.scale is \(4,\), and \(16,\)"):
        port.sharded.check(port.jax_parameters | {"norm.scale": np.ones(4)}, port.batches, port.optimizer)
    with pytest.raises(ConfigError, match=r"parameter weight has no axes"):
        Sharded(Bare())
    with pytest.raises(ConfigError, match=r"parameter weight: unknown logical axis 'hiden'; did you mean 'hidden'\?"):
        Sharded(Unknown()).parameters()


class Bare(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(np.ones(3))


class Unknown(nnx.Module):
    def __init__(self) -> None:
        self.weight = parameter((3,), ("hiden",))


def test_stacks_are_found_by_any_name() -> None:
    names = {"blocks.a.kernel": 3, "blocks.b": 3, "tower.layers.c.w": 2, "tower.norm": 0, "embed": 0}
    param_specs = {
        name: ParamSpec(name, (n, 4), ("layers" if n else "vocab", "embed"), 0, 0) for name, n in names.items()
    }
    assert stacks_of(param_specs) == {"blocks": 3, "tower.layers": 2}


@pytest.mark.slow
def test_a_script_of_thirty_lines(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = Path(__file__).parents[1] / "examples" / "opt.py"
    assert len(file.read_text().splitlines()) <= 30
    command = [sys.executable, "-W", "error", "-m", "parity_tests.examples.opt", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.startswith("Equivalent"), done.stdout + done.stderr
