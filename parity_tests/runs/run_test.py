"""A run folder is read completely or refused: its final states, and values that are not finite."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError, Experiment, write_record
from jaxdist.families import models
from jaxdist.runs.folder import RunFolder
from parity_tests.runs import names
from parity_tests.runs.run import Run, environment, settings

STEPS = 2
MEMORY = {"parameters": 1, "gradients": 1, "optimizer_state": 1}
COLLECTIVE = {"op": "all_reduce", "axis": "data", "dtype": "float32", "count": 1, "bytes": 1.0}

STATES = ("weights", "exp_avg", "exp_avg_sq")  # of AdamW


def states(value: float) -> dict[str, np.ndarray]:
    return {f"{kind}/w": np.full(2, value) for kind in STATES}


def folder(path: Path, recorded: tuple[int, ...] = (STEPS,), **summary: Any) -> Run:
    """A run of two steps that keeps the states of the `recorded` steps, filled with the step's number."""
    experiment = Experiment.parse({"train": {"steps": STEPS}}, source="test")
    kept = RunFolder(path, experiment)
    kept.create(experiment)
    for step in range(1, STEPS + 1):
        kept.log({"step": step, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1})
    for step in recorded:
        kept.record(step, states(step))
    if summary:
        kept.summarize(summary)
    return Run("mine", path)


def test_states_are_those_of_the_last_step(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", recorded=(1, STEPS))
    run.check()
    assert all((state == STEPS).all() for state in run.states.values()) and len(run.states) == len(STATES)


def test_an_earlier_record_is_not_the_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"neither a checkpoint nor a record of weights .* at step {STEPS}"):
        folder(tmp_path / "run", recorded=(1,)).check()


def test_an_earlier_checkpoint_is_not_the_end(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    (run.path / "checkpoints" / "1" / "parameters").mkdir(parents=True)  # reading this would fail
    assert (run.states["weights/w"] == STEPS).all()
    with pytest.raises(ConfigError, match=f"at step {STEPS}"):
        earlier = folder(tmp_path / "other", recorded=())
        (earlier.path / "checkpoints" / "1" / "parameters").mkdir(parents=True)
        earlier.check()


def nan_in_the_weights(run: Run) -> None:
    write_record(run.path, STEPS, states(np.nan))


def infinity_in_a_record(run: Run) -> None:
    write_record(run.path, 1, {"gradient/w": np.array([1.0, np.inf])})


def order_of_no_names(run: Run) -> None:
    file = run.path / "record" / f"{STEPS}.safetensors"
    save_file(states(1.0), file, metadata={"order": "[1]"})


def named(name: str) -> Callable[[Run], None]:
    """Adds a record with this name."""

    def copy(run: Run) -> None:
        shutil.copy(run.path / "record" / f"{STEPS}.safetensors", run.path / "record" / f"{name}.safetensors")

    return copy


def truth_for_a_loss(run: Run) -> None:
    lines = (run.path / "metrics.jsonl").read_text().replace('"loss": 1.0', '"loss": true', 1)
    (run.path / "metrics.jsonl").write_text(lines)


def loss_beyond_all_floats(run: Run) -> None:
    lines = (run.path / "metrics.jsonl").read_text().replace('"loss": 1.0', '"loss": 1' + 400 * "0", 1)
    (run.path / "metrics.jsonl").write_text(lines)


def weights_in_float8(run: Run) -> None:
    header = b'{"weights/w":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    file = run.path / "record" / f"{STEPS}.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"88")


NO_STEPS = ("final", "0", "3", "02", "٢", "²")  # the run has two steps

BAD: dict[Callable[[Run], None], str] = {
    nan_in_the_weights: f"weights/w of step {STEPS} is not a number",
    infinity_in_a_record: "gradient/w of step 1 is not a number",
    **{named(name): rf"{name}\.safetensors is named by no step of 1 to 2; call it" for name in NO_STEPS},
    truth_for_a_loss: "loss = True at step 1",
    loss_beyond_all_floats: "loss = 10+ at step 1",
    weights_in_float8: "is damaged",
    order_of_no_names: "is damaged",
}


def test_names_that_are_not_the_models(tmp_path: Path) -> None:
    """Reported by tensor before anything is run; the prefixes of DDP, FSDP1 and torch.compile are accepted."""
    small = {"vocab": 8, "dim": 4, "hidden": 4, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 2}
    param_specs = models.param_specs(models.build(Experiment.parse({"model": small}, source="test").model))
    right = names.as_torch({name: np.ones(spec.shape, np.float32) for name, spec in param_specs.items()})
    theirs = {f"model.layers.{i}.self_attn.q_proj.weight": np.ones((4, 4 + i)) for i in range(2)}

    def run_with(weights: dict[str, np.ndarray]) -> Run:
        experiment = Experiment.parse({"train": {"steps": STEPS}, "model": small}, source="test")
        kept = RunFolder(tmp_path / str(len(list(tmp_path.iterdir()))), experiment)
        kept.create(experiment)
        kept.record(STEPS, {f"{kind}/{name}": w for kind in STATES for name, w in weights.items()})
        return Run("mine", kept.path)

    for prefix in ("", "module.", "_orig_mod.", "_fsdp_wrapped_module."):
        run_with({prefix + name: w for name, w in right.items()}).check_names()
    for weights, message in (
        (right | {"more.weight": np.ones(2)}, r"weights at the end: tensor more.weight is \(2,\) there, and absent"),
        (right | {"norm.weight": np.ones(3)}, r"tensor norm.weight is \(3,\) there, and \(4,\) in the model"),
        ({"prefixed." + name: w for name, w in right.items()}, "tensor embed.weight is absent there"),
        ({"embed.embedding": np.ones((4, 4)), "norm.w": np.ones(4)}, "its record does not fit the model: KeyError"),
        (theirs, "its record does not fit the model: ValueError"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_with(weights).check_names()


@pytest.mark.parametrize("damage", BAD)
def test_metrics_that_are_no_number_or_no_step(tmp_path: Path, damage: Callable[[Run], None]) -> None:
    damage(folder(tmp_path / "run"))
    with pytest.raises(ConfigError, match=BAD[damage]):
        Run("mine", tmp_path / "run").check()


GOOD: dict[str, Any] = {
    "memory": MEMORY | {"peak": None, "temporary": 1.5},
    "collectives": [COLLECTIVE],
    "arithmetic": {"rsqrt": "float32"},
    "mesh": {"data": 1},
    "versions": {"torch": "2"},
    "schedule": {"1": 0.1},
}


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ({"memory": {"peak": 1}}, "memory has no parameters that is a number, but None"),
        ({"memory": MEMORY | {"peak": "much"}}, "memory has no value that is a number, but 'much'"),
        ({"memory": MEMORY | {"gradients": True}}, "memory has no gradients that is a number, but True"),
        ({"memory": MEMORY | {"gradients": -5}}, "memory has no gradients that is a number, but -5"),
        ({"memory": 1}, "memory is not a dict"),
        ({"collectives": {}}, "collectives is not a list"),
        ({"collectives": ["all_reduce"]}, "collectives has no op that is a text"),
        ({"collectives": [COLLECTIVE, {"op": "all_reduce"}]}, "collectives has no axis that is a text, but None"),
        ({"collectives": [COLLECTIVE | {"bytes": "1"}]}, "collectives has no bytes that is a number, but '1'"),
        ({"collectives": [COLLECTIVE | {"bytes": np.nan}]}, "collectives has no bytes that is a number, but nan"),
        ({"collectives": [COLLECTIVE | {"bytes": 10**300}]}, "collectives has no bytes that is a number, but 1000"),
        ({"arithmetic": {"rsqrt": ["float32"]}}, "arithmetic has no value that is a text"),
        ({"mesh": "1x1"}, "mesh is not a dict"),
        ({"versions": ["2"]}, "versions is not a dict"),
        ({"schedule": {"1": "slow"}}, "schedule has no value that is a number, but 'slow'"),
    ],
)
def test_a_summary_that_cannot_be_read(tmp_path: Path, summary: dict[str, Any], message: str) -> None:
    folder(tmp_path / "good", **GOOD).check()
    with pytest.raises(ConfigError, match=rf"summary\.json: {message}.*mend it or leave it out"):
        folder(tmp_path / "bad", **GOOD | summary).check()


def test_a_run_inherits_all_but_the_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_gpu_deterministic_ops=true")
    inherited = environment("--xla_backend_optimization_level=0")
    assert "JAX_NUM_CPU_DEVICES" not in inherited and inherited["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"
    assert inherited["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=true --xla_backend_optimization_level=0"
    variables = settings()
    assert (
        variables["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"
        and variables["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=true"
    )
    assert all(inherited[name].startswith(value) for name, value in variables.items())


@pytest.mark.parametrize(
    ("family", "block", "attention", "mlp"),
    [
        *((family, "model.layers.{layer}", "self_attn", "mlp") for family in ("llama", "mixtral", "qwen3_moe")),
        ("gpt2", "transformer.h.{layer}", "attn", "mlp"),
    ],
)
def test_modules_that_hold_others_have_the_names_of_transformers(
    family: str, block: str, attention: str, mlp: str
) -> None:
    theirs = {"layers": block, "layers.attention": f"{block}.{attention}", "layers.mlp": f"{block}.{mlp}"}
    assert names.containers(family) == theirs


@pytest.mark.parametrize("name", ["model.layers.7.self_attn.q_proj.weight", "foo", "norm.weight"])
@pytest.mark.parametrize("kind", [*STATES, "gradient"])
def test_a_parameter_that_the_model_lacks(kind: str, name: str) -> None:
    """Ignoring it would compare a larger model only in part; a tied head is accepted."""
    record = {f"{kind}/model.norm.weight": np.ones(4), f"{kind}/lm_head.weight": np.ones((8, 4))}
    assert f"{kind}/norm.weight" in names.from_hf(record, "llama", 2)
    with pytest.raises(ValueError, match=rf"{name} has no counterpart"):
        names.from_hf(record | {f"{kind}/{name}": np.ones(4)}, "llama", 2)


def test_a_parameter_that_one_layer_lacks() -> None:
    """That layer's parameter is named, and no other."""
    record = {f"weights/model.layers.{i}.self_attn.{n}_proj.weight": np.ones((4, 4)) for i in range(2) for n in "qk"}
    del record["weights/model.layers.0.self_attn.q_proj.weight"]
    with pytest.raises(ValueError, match=r"^model.layers.0.self_attn.q_proj.weight is missing$"):
        names.from_hf(record, "llama", 2)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_as_transformers_holds_it_in_memory(family: str, tmp_path: Path) -> None:
    """The same parameters as in the file that it writes, with a tensor per expert."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 3, "num_local_experts": 3,
        "num_experts_per_tok": 2, "vocab_size": 16,
    }  # fmt: skip
    name = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}[family]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    model.save_pretrained(tmp_path)
    held = {f"weights/{n}": p.detach().numpy() for n, p in model.named_parameters()}
    assert any(n.endswith("experts.gate_up_proj") for n in held)
    stored = {f"weights/{n}": w for n, w in load_file(tmp_path / "model.safetensors").items()}
    found, right = (names.from_hf(record, family, 2) for record in (held, stored))
    assert found.keys() == right.keys() and any("experts" in n for n in found)
    for n, w in right.items():
        np.testing.assert_array_equal(found[n], w, err_msg=n)
    swapped = {n: np.roll(w, 1, axis=0) if n.endswith("gate_up_proj") else w for n, w in held.items()}
    wrong = names.from_hf(swapped, family, 2)
    assert any(not np.array_equal(wrong[n], w) for n, w in right.items())
