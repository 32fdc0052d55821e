"""The models compute what transformers' models do, from weights that both read from files."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.registry import FAMILIES, resolve
from jaxdist.conftest import often
from jaxdist.convert import experiment_for, read_hf
from jaxdist.families import layers
from jaxdist.families.gpt2 import model as gpt2
from jaxdist.families.gpt2.config import GPT2 as GPT2_CONFIG
from jaxdist.families.gpt2.huggingface import GELUS
from jaxdist.families.llama import model as llama
from jaxdist.families.mixtral import model as mixtral
from jaxdist.formats.hf import from_settings, to_settings
from jaxdist.formats.tables import HUGGINGFACE, Table
from jaxdist.ops import attention, rotary
from jaxdist.parallel import context, sharding
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.mesh import make_mesh
from jaxdist.runtime.xla import Jitted
from jaxdist.training.program import Program

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BOUND = 2e-6  # relative L2 distance of float32 logits
TOKENS = np.random.default_rng(1).integers(0, 97, (2, 40), dtype=np.int32)

# Distinct sizes, which hide no mistake: 6 query heads on 2 kv heads, H·C = 48 ≠ D, an odd vocabulary.
SIZES = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"vocab_size": 97, "n_embd": 36, "n_layer": 3, "n_head": 6, "n_positions": 48, "n_inner": 44}
# Equal shapes, which do not reveal a wrong mapping.
SQUARE = {"intermediate_size": 36, "num_key_value_heads": 6, "head_dim": 6}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
MIXTRAL = {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {
    **SIZES,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "output_router_logits": True,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "llama3": ("Llama", {**SIZES, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 7}),
    "mistral no window": ("Mistral", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2 tied window": ("Qwen2", {**SIZES, **WINDOW, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES),
    "qwen3 biases window": ("Qwen3", {**SIZES, **WINDOW, "attention_bias": True}),
    "qwen3 square": ("Qwen3", {**SIZES, **SQUARE}),
    "gpt2": ("GPT2", GPT2),
    "gpt2 square": ("GPT2", {**GPT2, "n_inner": 36}),
    "gpt2 exact": ("GPT2", {**GPT2, "activation_function": "gelu"}),
    "gpt2 untied": ("GPT2", {**GPT2, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {**MIXTRAL, "sliding_window": 7}),
    "mixtral square": ("Mixtral", {**MIXTRAL, **SQUARE}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3_moe biases": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "attention_bias": True}),
}

# Each family, and one case for each field that changes its mathematics.
QUICK = (
    "llama", "llama biases", "llama3", "mistral", "qwen2", "qwen3 biases window", "gpt2", "gpt2 exact", "gpt2 untied",
    "mixtral", "qwen3_moe",
)  # fmt: skip


class HFReference(NamedTuple):
    """A Hugging Face folder, our reading of it, and transformers' logits [B, T, V]."""

    folder: Path
    experiment: Experiment
    parameters: dict[str, np.ndarray]
    logits: np.ndarray


@pytest.fixture(scope="module")
def hf_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HFReference]:
    """The reference of a case, made once."""
    references: dict[str, HFReference] = {}

    def make(case: str) -> HFReference:
        if case not in references:
            references[case] = _hf_reference(*CASES[case], tmp_path_factory.mktemp("hf"))
        return references[case]

    return make


def _hf_reference(family: str, settings: dict[str, Any], path: Path) -> HFReference:
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation="eager")
    model = getattr(transformers, family + head)(config).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():  # norms far from 1 and biases far from 0, so that omitting one shows
            p.copy_(
                torch.randn(p.shape, generator=random) * 0.2 + float("norm" in name or "ln_" in name) * (p.ndim == 1)
            )
        logits = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    model.save_pretrained(path)
    read, parameters = read_hf(path)
    return HFReference(path, experiment_for(read.model_dump(), "test"), parameters, logits)


def error(hf_reference: HFReference, **changes: Any) -> float:
    """Relative L2 distance of our logits from the reference's; `changes` are fields of the model."""
    _, experiment, parameters, logits = hf_reference
    experiment = experiment.model_copy(update={"model": experiment.model.model_copy(update=changes)})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    ours = program.logits({n: jnp.asarray(p) for n, p in parameters.items()}, TOKENS)
    assert ours.dtype == np.float32 and ours.shape == logits.shape
    return float(np.linalg.norm(ours - logits) / np.linalg.norm(logits))


@pytest.mark.parametrize("case", often(CASES, QUICK))
def test_logits(case: str, hf_reference: Callable[[str], HFReference]) -> None:
    assert error(hf_reference(case)) < BOUND


def balance(hf_reference: HFReference) -> float:
    """Our balance loss, over its weight, on two devices with a row of TOKENS each."""
    _, experiment, parameters, _ = hf_reference
    parallel = experiment.parallel.model_copy(update={"mesh": "data=2", "strategy": "ddp"})
    experiment = experiment.model_copy(update={"parallel": parallel})
    program = Program(experiment, make_mesh(experiment, "cpu")[0])

    def function(parameters: Any, tokens: jax.Array) -> Any:
        return jax.lax.psum(program.step_function.forward(None, parameters, tokens).added, sharding.LOSS_AXES)

    specs = (program.partition_specs.parameters, program.batch_specs[0])
    mapped = jax.shard_map(function, mesh=program.mesh, in_specs=specs, out_specs=P())
    added = Jitted(jax.jit(mapped), program.mesh)
    weight: float = experiment.model.balance
    return float(added({n: jnp.asarray(p) for n, p in parameters.items()}, TOKENS)) / weight


def test_load_balance(hf_reference: Callable[[str], HFReference], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' load_balancing_loss_func, over all blocks and tokens at once."""
    reference = hf_reference("qwen3_moe")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, attn_implementation="eager")
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS, dtype=torch.long), output_router_logits=True).aux_loss
    assert balance(reference) == pytest.approx(float(expected), rel=BOUND)
    monkeypatch.setattr(Parallel, "sum_over_tokens", lambda self, sums: sums)  # planted: each row separately
    assert balance(reference) != pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama", {"norm_eps": 2e-5}),
        ("gpt2", {"norm_eps": 2e-5}),
        ("llama", {"rope_theta": 10001.0}),
        ("llama3", {"rope_high_freq_factor": 3.9}),
        ("mistral", {"window": 8}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        pytest.param("llama3", {"rope_scaling": "none"}, marks=pytest.mark.slow),
        pytest.param("llama3", {"rope_original_positions": 17}, marks=pytest.mark.slow),
        pytest.param("mistral", {"window": 6}, marks=pytest.mark.slow),
        pytest.param("qwen2 tied window", {"window": 0}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"norm_topk_prob": False}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"capacity": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_wrong_field_is_caught(
    case: str, changes: dict[str, Any], hf_reference: Callable[[str], HFReference]
) -> None:
    assert error(hf_reference(case), **changes) > 5 * BOUND


def interleaved(x: jax.Array, rotation: rotary.Rotation) -> jax.Array:
    """Planted: rotated pairs are neighbours, as in Meta's files."""
    (cos, sin), (even, odd) = rotation, (x[..., ::2], x[..., 1::2])
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def other_head_order(q: jax.Array, k: jax.Array, v: jax.Array, window: int = 0) -> jax.Array:
    """Planted: query head h reads kv head h mod K."""
    B, T, H, C = q.shape
    groups = q.reshape(B, T, H // k.shape[2], k.shape[2], C).swapaxes(2, 3).reshape(q.shape)
    out = attention.attend(groups, k, v, window)
    return out.reshape(B, T, k.shape[2], H // k.shape[2], C).swapaxes(2, 3).reshape(q.shape)


def unscaled(q: jax.Array, k: jax.Array, v: jax.Array, window: int = 0) -> jax.Array:
    """Planted: scaled by 1/sqrt(D/H) though head_dim differs."""
    return attention.attend(q * (8 / 6) ** 0.5, k, v, window)


def unnormalized(norm: layers.RMSNorm, x: jax.Array) -> jax.Array:
    """Planted: queries and keys are not normalized."""
    return x if norm.scale[...].shape == (8,) else _rms(norm, x)


_rms = layers.RMSNorm.__call__


def exact_gelu(x: jax.Array, approximate: bool) -> jax.Array:
    """Planted: the error function instead of its tanh approximation."""
    return _gelu(x, approximate=False)


_gelu = jax.nn.gelu


GELUS_OF_TRANSFORMERS = [name for name in transformers.activations.ACT2FN if "gelu" in name]


@pytest.mark.parametrize("name", GELUS_OF_TRANSFORMERS)
def test_every_gelu_of_transformers_is_decided(name: str) -> None:
    """Accepted names compute the function and the slope that they mean; others are refused."""
    settings = to_settings(GPT2_CONFIG(family="gpt2"), "float32") | {"activation_function": name}
    if name not in GELUS:
        with pytest.raises(ConfigError, match=rf"activation_function = '{name}'; jaxdist computes 'gelu_new'"):
            from_settings(settings)
        return
    ours = gpt2.exact_gelu if from_settings(settings)["gelu"] == "exact" else partial(_gelu, approximate=True)
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    inputs = torch.tensor(x, requires_grad=True)
    right = transformers.activations.ACT2FN[name](inputs)
    right.sum().backward()
    slope = jax.grad(lambda x: ours(x).sum())(jnp.asarray(x))
    np.testing.assert_allclose(ours(jnp.asarray(x)), right.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(slope, inputs.grad.numpy(), atol=1e-5)
    assert np.abs(np.asarray(_gelu(x, approximate=ours is gpt2.exact_gelu)) - right.detach().numpy()).max() > 1e-4


def the_least_probable(probabilities: jax.Array, k: int) -> jax.Array:
    """Planted: sorted in ascending order."""
    return jnp.argsort(probabilities, axis=-1)[..., :k]


@pytest.mark.parametrize(
    ("case", "owner", "name", "mistake"),
    [
        ("llama", llama, "rotate", interleaved),
        ("llama", context, "attend", other_head_order),
        ("llama", context, "attend", unscaled),
        ("qwen3", layers.RMSNorm, "__call__", unnormalized),
        ("llama", jax.nn, "silu", jax.nn.gelu),
        ("gpt2", jax.nn, "gelu", exact_gelu),
        ("mixtral", mixtral, "choose", the_least_probable),
    ],
)
def test_a_planted_mistake_is_caught(
    case: str,
    owner: Any,
    name: str,
    mistake: Any,
    hf_reference: Callable[[str], HFReference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = hf_reference(case)
    monkeypatch.setattr(owner, name, mistake)
    assert error(right) > 5 * BOUND


def swapped(*pairs: tuple[str, str]) -> Callable[[Table], Table]:
    """Planted: two of our names are swapped."""
    names = dict(pairs) | {b: a for a, b in pairs}

    def plant(table: Table) -> Table:
        rows = []
        for row in table.rows:
            ours = tuple(
                next((name.replace(a, b) for a, b in names.items() if f".{a}." in name), name) for name in row.ours
            )
            rows.append(row._replace(ours=ours))
        return table._replace(rows=rows)

    return plant


def flipped(part: str) -> Callable[[Table], Table]:
    """Planted: a transpose is missing or superfluous."""
    return lambda table: table._replace(
        rows=[
            row._replace(transpose=not row.transpose) if part in row.theirs and row.theirs.endswith(".weight") else row
            for row in table.rows
        ]
    )


@pytest.mark.parametrize(
    ("case", "plant"),
    [
        ("qwen3 square", swapped(("gate_proj", "up_proj"))),
        ("qwen3 square", swapped(("q_norm", "k_norm"))),
        ("qwen3 square", flipped("q_proj")),
        ("mixtral square", swapped(("gate_proj", "up_proj"))),
        ("gpt2 square", swapped(("q_proj", "k_proj"))),
        ("gpt2 square", flipped("c_fc")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3 square", swapped(("q_proj", "k_proj"))),
                ("qwen3 square", swapped(("k_proj", "v_proj"))),
                ("qwen3 square", swapped(("attention_norm", "mlp_norm"))),
                ("qwen3 square", flipped("o_proj")),
                ("qwen3 square", flipped("down_proj")),
                ("gpt2 square", swapped(("k_proj", "v_proj"))),
                ("gpt2 square", swapped(("attention_norm", "mlp_norm"))),
                ("gpt2 square", flipped("attn.c_proj")),
            )
        ),
    ],
)
def test_a_mistaken_mapping_is_caught(
    case: str,
    plant: Callable[[Table], Table],
    hf_reference: Callable[[str], HFReference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = hf_reference(case)
    tables = resolve(FAMILIES[right.experiment.model.family].tables)
    monkeypatch.setitem(tables, HUGGINGFACE, plant(tables[HUGGINGFACE]))
    _, parameters = read_hf(right.folder)
    assert error(right._replace(parameters=parameters)) > 5 * BOUND
