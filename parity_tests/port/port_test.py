"""Users' own models: two that agree are proved equivalent, and a mistake is located."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from torch import nn

from jaxdist.config import ConfigError, Optimizer
from jaxdist.conftest import slow
from jaxdist.convert.mappings.mapping import KeyMapping, Row
from jaxdist.convert.mappings.suggest import suggest
from jaxdist.convert.mappings.trees import shapes
from parity_tests.examples.flax_vit import MLP, Attention, Block, ViT
from parity_tests.port.port import Port
from parity_tests.proof.verdict import Verdict
from parity_tests.runs.jax_taps import note

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {"size": 8, "patch": 4, "dim": 12, "layers": 2, "heads": 3, "hidden": 20, "classes": 5}
OPTIMIZER = Optimizer(learning_rate=0.01, warmup=0)


def torch_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def vit(change: Callable[[ViT], None] = lambda _: None, steps: int = 3, **fields: Any) -> Port:
    """The example's two models, tiny, with random weights throughout; `change` plants a mistake in JAX."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    module = transformers.ViTForImageClassification(config).eval()
    model = ViT(**SIZES)
    change(model)
    graph, parameters = nnx.split(model)
    random = np.random.default_rng(0)
    parameters = jax.tree.map(lambda a: a + 0.1 * random.normal(size=a.shape).astype(np.float32), parameters)

    def loss(p: Any, b: Any) -> jax.Array:
        logits = nnx.merge(graph, p)(b["images"].transpose(0, 2, 3, 1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, b["labels"]).mean()

    values: dict[str, Any] = {
        "jax_loss": loss,
        "jax_parameters": parameters,
        "torch_loss": lambda m, b: nn.functional.cross_entropy(m(b["images"]).logits, b["labels"]),
        "torch_module": module,
        "mapping": suggest(shapes(parameters), torch_shapes(module)),
        "batches": [
            {"images": random.normal(size=(4, 3, 8, 8)), "labels": random.integers(5, size=4)} for _ in range(steps)
        ],
        "optimizer": OPTIMIZER,
    }
    return Port(**values | fields)


def proved(port: Port, folder: Path) -> tuple[Verdict, dict[str, Any]]:
    verdict = port.prove(folder)
    return verdict, json.loads((folder / "verdict.json").read_text())


class TestExample:
    @pytest.mark.slow
    def test_a_script_of_thirty_lines(self, tmp_path: Path) -> None:
        """transformers' ViT against the Flax one: mapped without an edit, and equivalent at every level."""
        pytest.importorskip("transformers")
        file = Path(__file__).parents[1] / "examples" / "vit.py"
        assert len(file.read_text().splitlines()) <= 30
        out = tmp_path / "out"
        command = [sys.executable, "-W", "error", "-m", "parity_tests.examples.vit", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("Equivalent: all 25 checks hold.")
        written = json.loads((out / "verdict.json").read_text())
        assert {check["level"] for check in written["checks"]} == {"mathematics", "precision", "traffic"}
        names = [check["name"] for check in written["checks"]]
        for wanted in ("loss", "grad_norm", "gradient at step 1", "gradient at step 10", "exp_avg_sq at step 10"):
            assert any(name.startswith(wanted) for name in names), wanted
        page = (out / "report.html").read_text()
        assert "<strong>Equivalent</strong>" in page and page.count("✓ yes") == 25 and "✗" not in page
        for side in ("jax", "torch"):
            lines = (out / "runs" / f"{side}-float64" / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))

    def test_the_records_hold_the_whole_step(self, tmp_path: Path) -> None:
        port = vit(steps=1)
        runs = [port.run(kind, tmp_path / kind, [1]) for kind in ("jax-float64", "torch-float64")]
        order = [list(run.records[1]) for run in runs]
        assert order[0] == order[1]
        kinds = list(dict.fromkeys(name.partition("/")[0] for name in order[0]))
        assert kinds == [
            "batch", "start", "activation", "scalar", "activation_gradient", "gradient", "exp_avg", "exp_avg_sq",
            "weights",
        ]  # fmt: skip
        forward = [name.partition("/")[2] for name in order[0] if name.startswith("activation/")]
        backward = [name.partition("/")[2] for name in order[0] if name.startswith("activation_gradient/")]
        assert len(forward) == 25 and backward == forward[::-1]
        assert forward[0] == "vit.embeddings.patch_embeddings.projection" and forward[-1] == "classifier"


def norm_eps(model: ViT) -> None:
    model.blocks[1].mlp_norm = nnx.LayerNorm(12, epsilon=1e-6, rngs=nnx.Rngs(0))


class TanhMLP(MLP):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Unscaled(Attention):
    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        q, k, v = self.query(x_BPD), self.key(x_BPD), self.value(x_BPD)
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / 2.001
        return self.out(jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores, axis=-1), v))


class Stopped(Block):
    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPD = x_BPD + self.attention(jax.lax.stop_gradient(self.attention_norm(x_BPD)))
        return x_BPD + self.mlp(self.mlp_norm(x_BPD))


def tanh(model: ViT) -> None:
    model.blocks[0].mlp = TanhMLP(12, 20, nnx.Rngs(0))


def unscaled(model: ViT) -> None:
    model.blocks[1].attention = Unscaled(12, 3, nnx.Rngs(0))


def stopped(model: ViT) -> None:
    model.blocks[0] = Stopped(12, 3, 20, 1e-12, nnx.Rngs(0))


class TestMistakes:
    """Mistakes in the JAX model, the mapping or the batches, each located at the first tensor that it changes."""

    @pytest.mark.parametrize(
        ("change", "tensor"),
        [
            (norm_eps, "activation/vit.layers.1.layernorm_after"),
            (tanh, "activation/vit.layers.0.mlp.fc2"),
            (unscaled, "activation/vit.layers.1.attention.o_proj"),
            (stopped, "activation_gradient/vit.layers.0.layernorm_before"),
        ],
    )
    @pytest.mark.slow
    def test_in_the_model(self, change: Callable[[ViT], None], tensor: str, tmp_path: Path) -> None:
        verdict, written = proved(vit(change, steps=2), tmp_path)
        assert verdict.word == "not_equivalent" and verdict.failed[0].level == "mathematics"
        divergence = written["parting"]
        assert (divergence["step"], divergence["tensor"]) == (1, tensor)
        assert divergence["before"] < 1e-13 and divergence["error"] > 1e-7

    @pytest.mark.slow
    def test_swapped_rows(self, tmp_path: Path) -> None:
        """Query and key have one shape, so only values show that their rows are swapped."""
        port = vit(steps=2)
        swapped = {".query.": ("q_proj", "k_proj"), ".key.": ("k_proj", "q_proj")}
        rows = list(port.keys.rows)
        for i, row in enumerate(rows):
            for part, (right, wrong) in swapped.items():
                if part in row.ours:
                    rows[i] = row._replace(theirs=row.theirs.replace(right, wrong))
        verdict, written = proved(replace(port, mapping=KeyMapping(tuple(rows))), tmp_path)
        assert verdict.word == "not_equivalent"
        assert written["parting"]["tensor"] == "activation/vit.layers.0.attention.o_proj"

    @pytest.mark.slow
    def test_at_a_later_step(self, tmp_path: Path) -> None:
        """One side clips inputs above 10, which only the fourth batch has: bisection finds the step."""
        port = vit(steps=6)
        port.batches[3]["images"][0, 0, 0, 0] = 11.0  # type: ignore[index]
        original = port.jax_loss
        assert original is not None

        def clipped(p: Any, b: Any) -> jax.Array:
            return original(p, b | {"images": jnp.clip(b["images"], -10, 10)})

        _, written = proved(replace(port, jax_loss=clipped), tmp_path)
        difference = written["parting"]
        assert (difference["step"], difference["tensor"]) == (
            4,
            "activation/vit.embeddings.patch_embeddings.projection",
        )
        looked = sorted(int(path.name) for path in (tmp_path / "bisection").iterdir())
        assert looked == [3, 4]


class Square(linen.Module):
    """A perceptron with square matrices, so a transposed one has the right shape."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(linen.Dense(6)(x))
        return linen.Dense(6)(x)


class AdamW:
    """A user's training step in JAX."""

    def __init__(self, loss: Any, **settings: float):
        self.loss = loss
        self.chain = optax.adamw(settings.pop("lr", 0.01), **({"weight_decay": 0.1, "eps": 1e-8} | settings))

    def start(self, parameters: Any) -> Any:
        return parameters, self.chain.init(parameters)

    def step(self, state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(self.loss)(state[0], batch)
        updates, moments = self.chain.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), loss

    def parameters(self, state: Any) -> Any:
        return state[0]


def torch_adamw(module: nn.Module, lr: float = 0.01, weight_decay: float = 0.1) -> Callable[[Any], torch.Tensor]:
    """A user's training step in torch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=weight_decay)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((module(batch["x"]) - batch["y"]) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def square(**fields: Any) -> Port:
    """A linen model against an nn.Sequential."""
    random = np.random.default_rng(0)
    model = Square()
    variables = model.init(jax.random.key(0), jnp.ones((1, 6)))
    leaves = (("kernel", "weight", "transpose"), ("bias", "bias", "same"))
    rows = [Row(f"Dense_{i}.{a}", f"{2 * i}.{b}", transform) for i in range(2) for a, b, transform in leaves]
    values: dict[str, Any] = {
        "jax_loss": lambda v, b: jnp.mean((model.apply(v, b["x"]) - b["y"]) ** 2),
        "jax_parameters": variables,
        "torch_loss": lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(),
        "torch_module": nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
        "mapping": KeyMapping(tuple(rows)),
        "batches": [{"x": random.normal(size=(5, 6)), "y": random.normal(size=(5, 6))} for _ in range(4)],
        "optimizer": OPTIMIZER,
    }
    return Port(**values | fields)


class TestBytes:
    """Pixels as bytes, from which 128 is subtracted: in uint8 that would wrap around."""

    def port(self, cast: Any) -> Port:
        random, model = np.random.default_rng(0), Square()
        pixels = [random.integers(256, size=(5, 6)).astype(np.uint8) for _ in range(4)]
        batches = [{"x": x, "y": random.normal(size=(5, 6))} for x in pixels]

        def jax_loss(v: Any, b: Any) -> jax.Array:
            x = (b["x"].astype(cast) - np.asarray(128, cast)).astype(b["y"].dtype) / 64
            return jnp.mean((model.apply(v, x) - b["y"]) ** 2)

        def torch_loss(m: nn.Module, b: Any) -> torch.Tensor:
            return ((m((b["x"] - 128).to(b["y"].dtype) / 64) - b["y"]) ** 2).mean()

        return square(batches=batches, jax_loss=jax_loss, torch_loss=torch_loss)

    def test_bytes_stay_bytes(self, tmp_path: Path) -> None:
        verdict, _ = proved(self.port(np.uint8), tmp_path)
        assert verdict.word == "equivalent", verdict.sentence

    def test_a_side_that_leaves_their_range(self, tmp_path: Path) -> None:
        verdict, _ = proved(self.port(np.int32), tmp_path)
        assert verdict.word == "not_equivalent", verdict.sentence


class TestLinen:
    def test_equivalent(self, tmp_path: Path) -> None:
        verdict, written = proved(square(), tmp_path)
        assert verdict.word == "equivalent" and written["notes"] == []

    def test_a_matrix_the_wrong_way_round(self, tmp_path: Path) -> None:
        port = square()
        rows = [row._replace(transform="same") if row.ours == "Dense_1.kernel" else row for row in port.keys.rows]
        verdict, written = proved(replace(port, mapping=KeyMapping(tuple(rows))), tmp_path)
        assert verdict.word == "not_equivalent" and written["parting"]["tensor"] == "activation/2"

    def test_outputs_that_cannot_be_recorded_are_reported(self, tmp_path: Path) -> None:
        """Outputs within a jitted function cannot be recorded; all else is compared."""
        port = square()
        inner = jax.jit(Square().apply)
        loss = lambda v, b: jnp.mean((inner(v, b["x"]) - b["y"]) ** 2)  # noqa: E731
        verdict, written = proved(replace(port, jax_loss=loss), tmp_path)
        assert verdict.word == "equivalent"
        assert written["notes"] == [
            "Outputs of 2 modules are not compared, since one side does not show them, or in another shape: Dense_0, "
            "Dense_1."
        ]


def plain(parameters: Any, batch: Any) -> jax.Array:
    """The same without modules; `note` records intermediate values."""

    def dense(name: str, x: jax.Array) -> jax.Array:
        return note(name, x @ parameters[name]["kernel"] + parameters[name]["bias"])

    return jnp.mean((dense("down", jnp.tanh(dense("up", batch["x"]))) - batch["y"]) ** 2)


class TestPlain:
    """A JAX function and a tree of arrays."""

    def port(self, transform: str = "transpose") -> Port:
        tree = square().jax_parameters["params"]
        parameters = {"up": tree["Dense_0"], "down": tree["Dense_1"]}
        leaves = (("kernel", "weight", "transpose"), ("bias", "bias", "same"))
        rows = [Row(f"{name}.{a}", f"{2 * i}.{b}", t) for i, name in enumerate(parameters) for a, b, t in leaves]
        rows[2] = rows[2]._replace(transform=transform)
        return square(jax_parameters=parameters, jax_loss=plain, mapping=KeyMapping(tuple(rows)))

    def test_equivalent(self, tmp_path: Path) -> None:
        verdict, written = proved(self.port(), tmp_path)
        assert verdict.word == "equivalent" and written["notes"] == []

    def test_a_matrix_the_wrong_way_round(self, tmp_path: Path) -> None:
        _, written = proved(self.port("same"), tmp_path)
        assert written["parting"]["tensor"] == "activation/2"

    def test_outside_of_a_proof_a_note_is_nothing(self) -> None:
        x = jnp.ones(3)
        assert note("up", x) is x


class Scanned(linen.Module):
    """Three stacked layers."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(dense: linen.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(dense(x)), None  # type: ignore[operator]

        scan = linen.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return linen.Dense(6, name="head")(scan(linen.Dense(6, name="layers"), x, None)[0])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class TestScan:
    def test_equivalent(self, tmp_path: Path) -> None:
        """Stacked parameters are matched to layers; a bias, a matrix when stacked, decays as little as torch's."""
        model = Scanned()
        port = square(
            jax_parameters=model.init(jax.random.key(0), jnp.ones((1, 6))),
            jax_loss=lambda v, b: jnp.mean((model.apply(v, b["x"]) - b["y"]) ** 2),
            torch_module=Layers(),
            mapping=None,
        )
        verdict, written = proved(port, tmp_path)
        assert verdict.word == "equivalent"
        assert written["notes"] == [
            "Outputs of 1 modules are not compared, since one side does not show them, or in another shape: layers."
        ]


class Separate(nn.Module):
    """Separate keys, values, gate and up projections, where openpi's Gemma in JAX has one array for two."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(i, o, bias=False) for i, o in ((6, 8), (6, 4), (6, 4), (8, 6), (6, 10), (6, 10), (10, 6))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = (torch.einsum("thc,sc->hts", q, k[:, 0]) / 2).softmax(-1)
        x = x + self.o_proj(torch.einsum("hts,sc->thc", weights, v[:, 0]).flatten(1))
        return x + self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


def fused_loss(p: Any, b: Any) -> jax.Array:
    x = b["x"]
    q = jnp.einsum("td,hdc->thc", x, p["q_einsum"]["w"])
    k, v = jnp.einsum("td,nkdc->ntkc", x, p["kv_einsum"]["w"])
    weights = jax.nn.softmax(jnp.einsum("thc,sc->hts", q, k[:, 0]) / 2)
    attended = jnp.einsum("hts,sc->thc", weights, v[:, 0])
    x = x + jnp.einsum("thc,hcd->td", attended, p["attn_vec_einsum"]["w"])
    gate, up = jnp.einsum("td,ndf->ntf", x, p["mlp"]["gating_einsum"])
    return jnp.mean((x + (jnp.tanh(gate) * up) @ p["mlp"]["linear"] - b["y"]) ** 2)


class TestFused:
    """One array in JAX, two tensors in torch."""

    def port(self) -> Port:
        random = np.random.default_rng(1)
        shapes = {"q_einsum": (2, 6, 4), "kv_einsum": (2, 1, 6, 4), "attn_vec_einsum": (2, 4, 6)}
        parameters: dict[str, Any] = {name: {"w": 0.5 * random.normal(size=shape)} for name, shape in shapes.items()}
        parameters["mlp"] = {"gating_einsum": random.normal(size=(2, 6, 10)), "linear": random.normal(size=(10, 6))}
        return square(jax_parameters=parameters, jax_loss=fused_loss, torch_module=Separate(), mapping=None)

    def test_equivalent(self, tmp_path: Path) -> None:
        verdict, written = proved(self.port(), tmp_path)
        assert verdict.word == "equivalent", verdict.failed
        assert "kv_einsum.w -> k_proj.weight" in written["notes"][-1]

    def test_swapped_pieces(self, tmp_path: Path) -> None:
        port = self.port()
        rows = [
            row._replace(part=1 - row.part) if row.part is not None and "kv" in row.ours else row
            for row in port.keys.rows
        ]
        verdict, written = proved(replace(port, mapping=KeyMapping(tuple(rows))), tmp_path)
        assert verdict.word == "not_equivalent" and written["parting"]["step"] == 1
        assert written["parting"]["tensor"] == "scalar/loss"


@pytest.mark.parametrize("batch", [{"x": {"y": np.ones(3)}}, {"x": [np.ones(2), np.ones(3)]}], ids=["nested", "ragged"])
def test_batches_that_are_no_arrays(batch: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batches: x is a (dict|list), no array of numbers; give nested ones flat"):
        replace(square(), batches=[batch]).prove(tmp_path / "port")


def test_batches_from_a_generator() -> None:
    """A generator's batches are taken once and kept."""
    port = square()
    assert len(replace(port, batches=(b for b in port.batches)).batches) == 4  # type: ignore[arg-type]


class TestOwnSteps:
    def test_equivalent(self, tmp_path: Path) -> None:
        port = square()
        verdict, written = proved(replace(port, jax_step=AdamW(port.jax_loss), torch_step=torch_adamw), tmp_path)
        assert verdict.word == "equivalent"
        assert written["notes"] == []
        assert written["not_compared"] == ["the optimizer's moments", "gradient norm", "learning rate"]
        assert verdict.sentence.endswith("Not compared: the optimizer's moments, gradient norm, learning rate.")
        names = " ".join(check["name"] for check in written["checks"])
        assert "gradient at step 4" in names and "weights at step 4" in names and "exp_avg" not in names

    def test_without_losses(self, tmp_path: Path) -> None:
        port = square()
        own: dict[str, Any] = {"jax_step": AdamW(port.jax_loss), "torch_step": torch_adamw}
        verdict, written = proved(replace(port, jax_loss=None, torch_loss=None, **own), tmp_path)
        assert verdict.word == "equivalent" and len(written["notes"]) == 1
        assert written["notes"][0].startswith("Gradients and activations are seen where")
        assert written["not_compared"][3:] == ["gradients", "activations"]

    def test_that_cannot_be_traced(self, tmp_path: Path) -> None:
        """A step that branches on values cannot be traced: its traffic is not counted, and a note says so."""

        class Looking(AdamW):
            def step(self, state: Any, batch: Any) -> tuple[Any, jax.Array]:
                state, loss = super().step(state, batch)
                assert float(loss) > 0
                return state, loss

        port = square()
        verdict, written = proved(replace(port, jax_step=Looking(port.jax_loss), torch_step=torch_adamw), tmp_path)
        assert verdict.word == "equivalent" and "traffic" not in {check.level for check in verdict.checks}
        assert written["notes"][-1].startswith("The traffic of a step is not counted, and its dtypes are unknown")

    @pytest.mark.parametrize(
        "mistake", [{"b2": 0.998}, {"lr": 0.010001}, *slow([{"eps": 1e-7}, {"weight_decay": 0.0999}])]
    )
    def test_a_mistake(self, mistake: dict[str, float], tmp_path: Path) -> None:
        port = square()
        step = AdamW(port.jax_loss, **mistake)
        verdict, written = proved(replace(port, jax_step=step, torch_step=torch_adamw), tmp_path)
        assert verdict.word == "not_equivalent"
        # b2 cancels in the first step, which divides m by √v; it shows in the second.
        assert written["parting"]["step"] == (2 if "b2" in mistake else 1)
        assert written["parting"]["tensor"].startswith("weights/")
