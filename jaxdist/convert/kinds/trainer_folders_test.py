"""Folders of transformers' Trainer and of Accelerate: weights, optimizer, step and schedule come along."""

import importlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import PARAMETERS, Content
from jaxdist.convert.convert_test import MODELS, draw
from jaxdist.convert.entries import trainable
from jaxdist.convert.kinds.formats_test import content_of
from jaxdist.convert.kinds.hf import write_hf
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.optimizers.trainer_schedule import found_schedule
from jaxdist.convert.stream import Conversion
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.sources import kind_of
from jaxdist.training.optim import learning_rate

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
dcp = importlib.import_module("torch.distributed.checkpoint")
load_torch = importlib.import_module("safetensors.torch").load_file
get_scheduler = pytest.importorskip("transformers.optimization").get_scheduler

LLAMA = MODELS["LlamaForCausalLM"]
STEPS, DONE, WARMUP = 20, 9, 4


class Trained:
    """A trainer's state after a few steps of AdamW with random gradients."""

    def __init__(
        self, folder: Path, model: Any = LLAMA, schedule: str = "linear", warmup: int = WARMUP, rule: Any = None
    ) -> None:
        write_hf(folder / "first", model, draw(model))
        tensors = load_torch(folder / "first/model.safetensors")
        self.parameters = {name: torch.nn.Parameter(tensors[name]) for name in trainable("huggingface", model)}
        decayed = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.99), eps=1e-7)
        self.scheduler = get_scheduler(schedule, self.optimizer, warmup, STEPS, rule)
        self.log: list[dict[str, Any]] = []
        torch.manual_seed(1)
        for step in range(1, DONE + 1):
            for p in self.parameters.values():
                p.grad = torch.randn_like(p)
            self.optimizer.step()
            rate = self.scheduler.get_last_lr()[0]
            self.scheduler.step()
            self.log.append({"step": step, "learning_rate": rate, "loss": float("nan")})
        self.config = (folder / "first/config.json").read_bytes()

    @property
    def tensors(self) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def by_name(self) -> dict[str, Any]:
        """The optimizer's state as FSDP returns it."""
        names = list(self.parameters)
        order = [name for name in names if self.parameters[name].ndim >= 2]
        order += [name for name in names if name not in order]
        state = self.optimizer.state_dict()
        groups = [{**group, "params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
        return {"state": {order[i]: entry for i, entry in state["state"].items()}, "param_groups": groups}


def huggingface(folder: Path, trained: Trained, binary: bool = False) -> Path:
    """`checkpoint-9` as the Trainer writes it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(trained.config)
    if binary:
        torch.save(trained.tensors, folder / "pytorch_model.bin")
    else:
        importlib.import_module("safetensors.torch").save_file(trained.tensors, folder / "model.safetensors")
    torch.save(trained.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(trained.scheduler.state_dict(), folder / "scheduler.pt")
    state = {"global_step": DONE, "max_steps": STEPS, "epoch": 0.5, "log_history": trained.log}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    (folder / "training_args.bin").write_bytes(b"a pickle that nobody may load")
    torch.save({"python": 0}, folder / "rng_state.pth")
    return folder


def accelerate(folder: Path, trained: Trained) -> Path:
    """A folder written by `save_state` in one process: no config.json."""
    huggingface(folder, trained)
    (folder / "optimizer.pt").rename(folder / "optimizer.bin")
    (folder / "scheduler.pt").rename(folder / "scheduler.bin")
    for name in ("config.json", "trainer_state.json", "training_args.bin", "rng_state.pth"):
        (folder / name).unlink()
    (folder / "random_states_0.pkl").write_bytes(b"a pickle that nobody may load")
    return folder


def sharded(folder: Path, trained: Trained) -> Path:
    """A folder of FSDP's SHARDED_STATE_DICT."""
    accelerate(folder, trained)
    for name in ("model.safetensors", "optimizer.bin"):
        (folder / name).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        dcp.save({"model": trained.tensors}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": trained.by_name()}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder


def full(folder: Path, trained: Trained) -> Path:
    """A folder of FSDP's FULL_STATE_DICT."""
    accelerate(folder, trained)
    (folder / "model.safetensors").unlink()
    torch.save(trained.tensors, folder / "pytorch_model_fsdp.bin")
    torch.save(trained.by_name(), folder / "optimizer.bin")
    return folder


def config(folder: Path, **optimizer: Any) -> Path:
    file = folder / "model.toml"
    values = experiment_for(LLAMA.model_dump(), "test").model_dump(exclude_none=True)
    experiment = experiment_for(LLAMA.model_dump(), "test").parse(values | {"optimizer": optimizer}, "test")
    file.write_text(experiment.to_toml())
    return file


def check_state(content: Content, trained: Trained) -> None:
    """Weights and moments match their own parameter to the bit."""
    assert content.groups[PARAMETERS].keys() == trained.parameters.keys()
    for name, p in trained.parameters.items():
        assert np.array_equal(content.groups[PARAMETERS][name].read(), p.detach().numpy()), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(content.groups[kind][name].read(), trained.optimizer.state[p][kind].numpy()), name
    assert content.updates == DONE
    o = content.experiment.optimizer
    assert (o.name, o.beta1, o.beta2, o.eps, o.weight_decay) == ("adamw", 0.9, 0.99, 1e-7, 0.05)


def rates(content: Content, steps: range) -> list[float]:
    e = content.experiment
    return [float(learning_rate(e.optimizer, e.train.steps, jnp.asarray(step))) for step in steps]


def scheduled(trained: Trained, steps: range) -> list[float]:
    """Learning rates of these steps, counted from 1."""
    (base, _), (rule, _) = trained.scheduler.base_lrs, trained.scheduler.lr_lambdas
    return [base * rule(step - 1) for step in steps]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("binary", [False, True])
def test_checkpoint_of_the_trainer(name: str, binary: bool, tmp_path: Path) -> None:
    trained = Trained(tmp_path, MODELS[name])
    folder = huggingface(tmp_path / "checkpoint-9", trained, binary)
    assert kind_of(folder) == "trainer"
    content = KINDS["trainer"].format.read_content(folder)
    check_state(content, trained)
    assert content.step == DONE
    future = range(DONE + 1, STEPS + 3)
    assert rates(content, future) == pytest.approx(scheduled(trained, future), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("layout", [accelerate, sharded, full])
def test_folder_of_accelerate(layout: Callable[..., Path], tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    folder = layout(tmp_path / "state", trained)
    with pytest.raises(ConfigError, match="does not say what model it is; give --model"):
        KINDS[kind_of(folder)].format.read_content(folder)
    wanted = experiment_for(LLAMA.model_dump(), "test")
    content = KINDS[kind_of(folder)].format.read_content(folder, wanted)
    check_state(content, trained)
    assert content.step == DONE
    out = tmp_path / "run"
    main([str(folder), str(out), "--model", str(config(tmp_path, name="adamw")), "--verify"])


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_mixture(name: str, tmp_path: Path) -> None:
    """Its optimizer numbers the parameters of transformers 5, whose experts are stacked; its files hold single
    experts."""
    transformers, model = importlib.import_module("transformers"), MODELS[name]
    content = content_of(model)
    folder = tmp_path / "checkpoint-7"
    write_hf(folder, model, {n: np.array(leaf.read()) for n, leaf in content.groups[PARAMETERS].items()})
    with torch.device("meta"):
        theirs = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(folder))
    dims = {n: p.ndim for n, p in theirs.named_parameters()}
    groups = [[n for n in dims if dims[n] >= 2], [n for n in dims if dims[n] < 2]]
    order = [n for group in groups for n in group]
    stacked = Conversion(content, "transformers in memory").groups
    state = {
        i: {kind: torch.from_numpy(np.array(stacked[kind][n].read())) for kind in ("exp_avg", "exp_avg_sq")}
        for i, n in enumerate(order)
    }
    settings = {"lr": 1e-3, "initial_lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    tree = {
        "state": {i: {"step": torch.tensor(6.0), **entry} for i, entry in state.items()},
        "param_groups": [
            {**settings, "weight_decay": decay, "params": [order.index(n) for n in group]}
            for group, decay in zip(groups, (0.1, 0.0), strict=True)
        ],
    }
    torch.save(tree, folder / "optimizer.pt")
    found, right = KINDS[kind_of(folder)].format.read_content(folder), Conversion(content, "huggingface").groups
    assert found.experiment.optimizer.weight_decay == 0.1
    for kind, leaves in right.items():
        assert found.groups[kind].keys() == leaves.keys()
        for n, leaf in leaves.items():
            assert np.array_equal(found.groups[kind][n].read(), leaf.read()), (kind, n)
    main([str(folder), str(tmp_path / "run")])


def test_a_half_of_a_sharded_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights alone mention the optimizer beside them; an optimizer alone names its folder, which works."""
    folder, model = sharded(tmp_path / "state", Trained(tmp_path)), str(config(tmp_path, name="adamw"))
    with pytest.raises(ConfigError, match=r"has no weights, .* optimizer alone; give its folder (\S+)") as error:
        main([str(folder / "optimizer_0"), str(tmp_path / "run"), "--model", model])
    main([str(error.value).rpartition(" ")[2], str(tmp_path / "run"), "--model", model])
    capsys.readouterr()
    main([str(folder / "pytorch_model_fsdp_0"), str(tmp_path / "weights"), "--model", model])
    assert "what stays behind: optimizer_0, scheduler.bin" in capsys.readouterr().out


DAMAGED_GROUPS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no parameters": lambda group: group.pop("params"),
    "a number for its parameters": lambda group: group.update(params=-1),
    "a parameter without a name": lambda group: group.update(params=[None]),
    "one number for two betas": lambda group: group.update(betas=0.9),
}


@pytest.mark.parametrize("damage", DAMAGED_GROUPS)
def test_a_damaged_group_of_a_sharded_optimizer(damage: str, tmp_path: Path) -> None:
    """One message, whose fix leads to the weights."""
    trained = Trained(tmp_path)
    folder, optimizer = sharded(tmp_path / "run", trained), trained.by_name()
    DAMAGED_GROUPS[damage](optimizer["param_groups"][0])
    shutil.rmtree(folder / "optimizer_0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    command = [str(folder), str(tmp_path / "out"), "--model", str(config(tmp_path))]
    with pytest.raises(
        ConfigError, match=r"its optimizer (is not as torch saves it: |has 'model.0', which the).*; leave it out"
    ):
        main(command)
    shutil.rmtree(folder / "optimizer_0")  # the advice
    main(command)


COPIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "master_weights": dict,
    "ema": dict,
    "swa_model": lambda w: {"n_averaged": torch.tensor(3), **{f"module.{name}": tensor for name, tensor in w.items()}},
    "master_params": lambda w: [list(w.values())],
    "fp32_params": lambda w: list(w.values()),
    "flat_master": lambda w: torch.cat([tensor.flatten() for tensor in w.values()]),
}


@pytest.mark.parametrize("key", COPIES)
def test_a_second_copy_of_the_weights_is_named(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fp32 masters beside bf16 weights, for instance."""
    trained = Trained(tmp_path)
    half = {name: tensor.bfloat16() for name, tensor in trained.tensors.items()}
    torch.save({"model": half, key: COPIES[key](trained.tensors)}, tmp_path / "a.pt")
    main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", str(config(tmp_path))])
    assert f"what stays behind: '{key}', a copy of the weights in float32" in capsys.readouterr().out


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    """scaler.pt is the state of torch's GradScaler, with its rule."""
    folder = huggingface(tmp_path / "checkpoint-9", Trained(tmp_path))
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 500}
    torch.save({"scale": 4096.0, "_growth_tracker": 7, **rule}, folder / "scaler.pt")
    content = KINDS["trainer"].format.read_content(folder)
    assert content.scaling is not None
    assert (float(content.scaling.scale), int(content.scaling.good)) == (4096.0, 7)
    assert (content.experiment.precision.policy, content.experiment.precision.growth_interval) == ("fp16", 500)


def test_a_folder_of_checkpoints_names_the_last(tmp_path: Path) -> None:
    """Ordered by number: 10 comes after 9."""
    trained = Trained(tmp_path)
    for name in ("checkpoint-9", "checkpoint-10"):
        huggingface(tmp_path / "output" / name, trained)
    with pytest.raises(
        ConfigError, match=r"not a checkpoint, and has 2 in it; give one, as (\S+checkpoint-10)"
    ) as error:
        main([str(tmp_path / "output"), str(tmp_path / "run")])
    main([str(error.value).rpartition(" ")[2], str(tmp_path / "run")])


def test_within_the_warm_up_no_schedule_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All schedules warm up alike, so the shape is not known yet."""
    trained = Trained(tmp_path, warmup=12)
    folder = huggingface(tmp_path / "checkpoint-9", trained)
    now = trained.optimizer.param_groups[0]["lr"]
    assert rates(KINDS["trainer"].format.read_content(folder), range(DONE + 1, STEPS)) == pytest.approx([now] * 10)
    assert "the rule of its scheduler is not in it; its current rate, 0.0015, stays" in capsys.readouterr().out


def test_files_left_behind_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = huggingface(tmp_path / "checkpoint-9", Trained(tmp_path))
    main([str(folder), str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert "step 9, with the state of adamw" in output
    assert "what stays behind: rng_state.pth, training_args.bin" in output
    assert "decay = linear over 20 steps, 4 of them warm-up" in output
    main([str(folder), str(tmp_path / "hf"), "--to", "hf"])
    assert "what stays behind: optimizer.pt, rng_state.pth, scheduler.pt, training_args.bin" in capsys.readouterr().out
    assert not (tmp_path / "hf/trainer_state.json").exists()


def test_weights_alone_name_the_state_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = huggingface(tmp_path / "checkpoint-9", Trained(tmp_path), binary=True)
    main([str(folder / "pytorch_model.bin"), str(tmp_path / "run")])
    assert "what stays behind: optimizer.pt, scheduler.pt, trainer_state.json" in capsys.readouterr().out


def test_weights_alone_are_a_checkpoint_too(tmp_path: Path) -> None:
    """`save_only_model` still records the step."""
    folder = huggingface(tmp_path / "checkpoint-9", Trained(tmp_path))
    (folder / "optimizer.pt").unlink()
    (folder / "scheduler.pt").unlink()
    content = KINDS[kind_of(folder)].format.read_content(folder)
    assert (content.step, content.updates, [*content.groups]) == (DONE, None, [PARAMETERS])


def test_another_order_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    """Planted: moments of the wrong parameter have the wrong shape."""
    folder = huggingface(tmp_path / "checkpoint-9", Trained(tmp_path))
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    entries = [*state["state"].values()]
    state["state"] = dict(enumerate(entries[1:] + entries[:1]))
    torch.save(state, folder / "optimizer.pt")
    with pytest.raises(ConfigError, match=r"optimizer.pt: its optimizer has .* in no order"):
        KINDS["trainer"].format.read_content(folder)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"])
def test_a_part_names_its_folder(name: str, tmp_path: Path) -> None:
    folder = huggingface(tmp_path / "checkpoint-9", Trained(tmp_path))
    with pytest.raises(ConfigError, match=r"give its folder") as error:
        main([str(folder / name), str(tmp_path / "run")])
    main([str(error.value).rpartition(" ")[2], str(tmp_path / "run")])


@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 0), ("linear", 4), ("cosine", 3), ("constant", 0)])
@pytest.mark.parametrize("late", [0, 1])
def test_the_schedule_is_found(schedule: str, warmup: int, late: int, tmp_path: Path) -> None:
    """The rate may be logged before the scheduler's step or after it."""
    trained = Trained(tmp_path, schedule=schedule, warmup=warmup)
    base, rule = trained.scheduler.base_lrs[0], trained.scheduler.lr_lambdas[0]
    rate = rule if schedule != "constant" else lambda k: 1.0
    log = [{"step": k, "learning_rate": base * rate(k - late)} for k in range(1, DONE + 1)] + [{"eval_loss": 1.0}]
    found = found_schedule(base, STEPS, (DONE, base * rate(DONE)), log)
    assert found is not None
    assert (found["decay"], found["warmup"]) == (schedule, warmup + 1)


@pytest.mark.parametrize("rule", ["polynomial", "cosine_with_restarts", "inverse_sqrt"])
def test_another_schedule_is_not_taken_for_one(rule: str, tmp_path: Path) -> None:
    rates = {"polynomial": lambda k: (1 - k / 20) ** 2, "cosine_with_restarts": lambda k: 1 - (k % 5) / 5}
    rate = rates.get(rule, lambda k: (1 + k) ** -0.5)
    log = [{"step": k, "learning_rate": rate(k - 1)} for k in range(1, 10)]
    assert found_schedule(1.0, 20, (9, rate(9)), log) is None


@pytest.mark.parametrize(("key", "value"), [("global_step", "9"), ("global_step", -1), ("max_steps", 2.5)])
def test_an_invalid_count_of_steps_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    """The message's fix works: the optimizer counts steps too."""
    folder = huggingface(tmp_path / "checkpoint-9", Trained(tmp_path))
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"global_step": DONE, "max_steps": STEPS, key: value}))
    with pytest.raises(ConfigError, match=rf"trainer_state.json: {key} = .* is not a count of steps; .* leave it out"):
        KINDS["trainer"].format.read_content(folder)
    file.unlink()
    assert KINDS["trainer"].format.read_content(folder).step == DONE
