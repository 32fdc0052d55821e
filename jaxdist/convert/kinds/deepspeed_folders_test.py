"""DeepSpeed's ZeRO checkpoints, laid out as its optimizers and engine save them: shards become full tensors."""

import importlib
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import PARAMETERS, Content
from jaxdist.convert.convert_test import MODELS, draw
from jaxdist.convert.kinds.hf import write_hf
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.weights import source_experiment
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.sources import kind_of
from jaxdist.training.optim import learning_rate

torch = pytest.importorskip("torch")
load_torch = importlib.import_module("safetensors.torch").load_file

LLAMA, TIED = MODELS["LlamaForCausalLM"], MODELS["Qwen3ForCausalLM"]
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-7, "bias_correction": True}
STEP = 120


class ZeroStageEnum(int, Enum):
    """Copy of deepspeed.runtime.zero.config's."""

    optimizer_states, gradients, weights = 1, 2, 3


class LossScaler:
    """Copy of deepspeed.runtime.fp16.loss_scaler's."""

    def __init__(self) -> None:
        self.cur_scale, self.dynamic, self.dtype = 1.0, False, torch.bfloat16


class fragment_address:
    """Copy of deepspeed.utils.tensor_fragment's."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


@contextmanager
def deepspeed() -> Iterator[None]:
    """DeepSpeed's modules with its small classes, for pickles to name."""
    homes = {
        "deepspeed.runtime.zero.config": ZeroStageEnum,
        "deepspeed.runtime.fp16.loss_scaler": LossScaler,
        "deepspeed.utils.tensor_fragment": fragment_address,
    }
    around = {home[:end] for home in homes for end in range(len(home) + 1) if home[end : end + 1] in (".", "")}
    try:
        sys.modules.update({name: ModuleType(name) for name in around})
        for home, kind in homes.items():
            setattr(sys.modules[home], kind.__name__, kind)
            kind.__module__ = home
        yield
    finally:
        for name in around:
            del sys.modules[name]


class Trained:
    """Random fp32 weights and moments, in groups of parameters with and without decay."""

    def __init__(self, folder: Path, model: Any = LLAMA) -> None:
        write_hf(folder / "first", model, draw(model))
        self.config = (folder / "first/config.json").read_bytes()
        self.tensors = load_torch(folder / "first/model.safetensors")
        torch.manual_seed(1)
        self.moments = {
            "exp_avg": {name: torch.randn_like(t) for name, t in self.tensors.items()},
            "exp_avg_sq": {name: torch.rand_like(t) for name, t in self.tensors.items()},
        }
        names = [*self.tensors][::-1]  # any order: param_shapes gives it
        self.groups = [[n for n in names if self.tensors[n].ndim >= 2], [n for n in names if self.tensors[n].ndim < 2]]

    def shapes(self, groups: list[list[str]]) -> list[dict[str, Any]]:
        return [{name: self.tensors[name].shape for name in group} for group in groups]

    def engine(self, groups: list[list[str]], ranks: int, **changed: Any) -> dict[str, Any]:
        """State that DeepSpeed's engine saves besides its optimizer."""
        return {
            "module": {name: tensor.bfloat16() for name, tensor in self.tensors.items()},
            "buffer_names": [], "optimizer": None, "param_shapes": self.shapes(groups), "frozen_param_shapes": None,
            "shared_params": {}, "frozen_param_fragments": None, "lr_scheduler": None, "data_sampler": None,
            "random_ltd": None, "sparse_tensor_module_names": set(), "skipped_steps": 0, "global_steps": STEP,
            "global_samples": 3840, "dp_world_size": ranks, "mp_world_size": 1, "ds_version": "0.16.4",
            "ds_config": {"zero_optimization": {"stage": 2}},
        } | changed  # fmt: skip


def pieces(flat: Any, ranks: int, unit: int) -> list[Any]:
    """A vector split over the ranks, padded with a number that must not be read."""
    size = unit * math.ceil(len(flat) / unit)
    return list(torch.cat([flat, torch.full((size - len(flat),), 77.0)]).chunk(ranks))


def group_settings(decays: list[float], numbers: list[list[int]]) -> list[dict[str, Any]]:
    return [SETTINGS | {"weight_decay": d, "params": held} for d, held in zip(decays, numbers, strict=True)]


def save(file: Path, tree: Mapping[str, Any]) -> None:
    with deepspeed():
        torch.save(dict(tree), file)


def zero_2(folder: Path, trained: Trained, ranks: int = 3, stage: Any = 2, aligned: int = 1, **changed: Any) -> Path:
    """Stages 1 and 2: each group is one vector, split over the ranks; the last ones drop their padding. Each parameter
    begins at a multiple of `aligned`."""
    tag = folder / f"global_step{STEP}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(f"{tag.name}\n")
    (tag / "config.json").write_bytes(trained.config)
    save(tag / "mp_rank_00_model_states.pt", trained.engine(trained.groups, ranks, **changed))

    paddings = [[-trained.tensors[name].numel() % aligned for name in group[:-1]] + [0] for group in trained.groups]

    def flat(tensors: Mapping[str, Any], group: list[str]) -> Any:
        padded = zip(group, paddings[trained.groups.index(group)], strict=True)
        return torch.cat([part for name, n in padded for part in (tensors[name].flatten(), torch.full((n,), 77.0))])

    for rank in range(ranks):
        masters, state = [], {}
        for number, group in enumerate(trained.groups):
            vector = flat(trained.tensors, group)
            piece = pieces(vector, ranks, 2 * ranks)
            start = rank * len(piece[0])
            masters.append(piece[rank][: max(0, len(vector) - start)])
            moments = {kind: pieces(flat(t, group), ranks, 2 * ranks)[rank] for kind, t in trained.moments.items()}
            state[number] = {"step": torch.tensor(float(STEP)), **moments}
        held = {
            "loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False, "clip_grad": 1.0,
            "base_optimizer_state": {"state": state, "param_groups": group_settings([0.1, 0.0], [[0], [1]])},
            "single_partition_of_fp32_groups": masters, "group_paddings": [0, 0], "ds_version": "0.16.4",
            "zero_stage": ZeroStageEnum(stage), "partition_count": [ranks, ranks], "param_alignment_paddings": paddings,
            "param_slice_mappings": [{name: fragment_address(4, 0) for name in group} for group in trained.groups],
        }  # fmt: skip
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save(tag / name, {"optimizer_state_dict": held, "ds_config": {}, "ds_version": "0.16.4"})
    return tag


def zero_3(folder: Path, trained: Trained, ranks: int = 3, **changed: Any) -> Path:
    """Stage 3: each rank holds a shard of every parameter, in vectors of some parameters."""
    tag = folder / f"global_step{STEP}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    (folder / "config.json").write_bytes(trained.config)
    matrices, others = trained.groups
    groups = [matrices[:5], matrices[5:], others]

    def flat(tensors: Mapping[str, Any], group: list[str], rank: int) -> Any:
        return torch.cat([pieces(tensors[name].flatten(), ranks, ranks)[rank] for name in group])

    for rank in range(ranks):
        placeholders = {"module": {name: torch.empty(0, dtype=torch.bfloat16) for name in trained.tensors}}
        engine = trained.engine(groups, ranks, **placeholders | changed)
        save(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", engine)
        state = {
            number: {"step": STEP, **{kind: flat(t, group, rank) for kind, t in trained.moments.items()}}
            for number, group in enumerate(groups)
        }
        held = {
            "zero_stage": ZeroStageEnum.weights, "loss_scaler": LossScaler(), "dynamic_loss_scale": False,
            "overflow": False, "partition_count": ranks,
            "optimizer_state_dict": {"state": state, "param_groups": group_settings([0.1, 0.0], [[0, 1], [2]])},
            "fp32_flat_groups": [flat(trained.tensors, group, rank) for group in groups],
        }  # fmt: skip
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save(tag / name, {"optimizer_state_dict": held, "ds_config": {}, "ds_version": "0.16.4"})
    return tag


def check(content: Content, trained: Trained) -> None:
    """All fp32 weights and moments to the bit, and the optimizer's settings and steps."""
    assert content.groups[PARAMETERS].keys() == trained.tensors.keys()
    for kind, tensors in {PARAMETERS: trained.tensors, **trained.moments}.items():
        for name, tensor in tensors.items():
            assert np.array_equal(content.groups[kind][name].read(), tensor.numpy()), (kind, name)
    assert (content.step, content.updates) == (STEP, STEP)
    o = content.experiment.optimizer
    assert (o.name, o.beta2, o.eps, o.weight_decay, o.learning_rate) == ("adamw", 0.99, 1e-7, 0.1, 1e-4)


def read_content(path: Path, **options: Any) -> Content:
    return KINDS[kind_of(path)].format.read_content(path, **options)


@pytest.mark.long
@pytest.mark.parametrize("layout", [zero_2, zero_3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
def test_shards_become_full_tensors(layout: Any, ranks: int, tmp_path: Path) -> None:
    """Names of 11 ranks do not sort by number."""
    trained = Trained(tmp_path)
    tag = layout(tmp_path / "run", trained, ranks)
    check(read_content(tag), trained)
    check(read_content(tag.parent), trained)  # found by its file `latest`


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("by", ["parameter group", "all"])
def test_sub_groups(by: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 3 splits a group beyond sub_group_size into several vectors, which param_shapes may not show: it has one
    table per group, or one for all as older versions wrote. Each parameter has its own group's decay."""
    trained = Trained(tmp_path)
    groups = trained.groups if by == "parameter group" else [[name for group in trained.groups for name in group]]
    shapes = trained.shapes(groups)
    tag = zero_3(tmp_path / "run", trained, ranks, param_shapes=shapes if by == "parameter group" else shapes[0])
    check(read_content(tag), trained)
    assert "decay of" not in capsys.readouterr().out  # reported if a vector's decays differ


def test_stage_1(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    check(read_content(zero_2(tmp_path / "run", trained, stage=1)), trained)


@pytest.mark.long
@pytest.mark.parametrize("layout", [zero_2, zero_3])
def test_the_way_to_a_run_and_to_transformers(layout: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tied head is a shared parameter there."""
    trained = Trained(tmp_path, TIED)
    shared: dict[str, Any] = {"shared_params": {"lm_head.weight": "model.embed_tokens.weight"}}
    tag = layout(tmp_path / "run", trained, **shared)
    main([str(tag), str(tmp_path / "out"), "--verify"])
    output = capsys.readouterr().out
    assert f"step {STEP}, with the state of adamw" in output
    assert ("what stays behind: the bfloat16 copy of the fp32 weights" in output) == (layout is zero_2)
    main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"])
    there = load_torch(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(there[name], tensor) for name, tensor in trained.tensors.items())
    assert source_experiment(tag.parent).model == TIED


WARMUP, TOTAL, PEAK, LOW = 10, 200, 3e-4, 3e-5


def cosine_rate(count: int) -> float:
    """DeepSpeed's WarmupCosineLR after its warm-up."""
    share = (1 + math.cos(math.pi * min(1.0, (count - WARMUP + 1) / (TOTAL - WARMUP)))) / 2
    return PEAK * (0.1 + 0.9 * share)


SCHEDULERS = {
    "WarmupLR": ({"warmup_max_lr": PEAK}, lambda count: PEAK),
    "WarmupDecayLR": (
        {"warmup_max_lr": PEAK, "warmup_min_lr": LOW, "total_num_steps": TOTAL},
        lambda count: LOW + (PEAK - LOW) * (TOTAL - count) / (TOTAL - WARMUP),
    ),
    "WarmupCosineLR": ({"total_num_steps": TOTAL, "cos_min_ratio": 0.1}, cosine_rate),
}


def scheduled(folder: Path, kind: str, params: Mapping[str, Any], rate: float, count: int = STEP - 1) -> Path:
    """A checkpoint with one of DeepSpeed's schedulers after `count` + 1 calls."""
    settings = {"type": kind, "params": {"warmup_num_steps": WARMUP, **params}}
    config = {"optimizer": {"params": {"lr": PEAK}}, "scheduler": settings}
    extra: dict[str, Any] = {"lr_scheduler": {"last_batch_iteration": count}, "ds_config": config}
    before = SETTINGS["lr"]
    SETTINGS["lr"] = rate
    try:
        return zero_2(folder / "run", Trained(folder), **extra)
    finally:
        SETTINGS["lr"] = before


@pytest.mark.long
@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_its_own_schedule(kind: str, skipped: int, tmp_path: Path) -> None:
    """Later rates by DeepSpeed's formulas, whose count is two behind our step number, and further by each step that
    fp16 skipped."""
    params, rate = SCHEDULERS[kind]
    count = STEP - 1 - skipped
    e = read_content(scheduled(tmp_path, kind, params, rate(count), count)).experiment
    for step in range(STEP + 1, TOTAL):
        assert float(learning_rate(e.optimizer, e.train.steps, jnp.asarray(step))) == pytest.approx(
            rate(step - 2 - skipped), rel=1e-5
        )


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (
            {"bf16": {"enabled": True}, "gradient_clipping": 0.5, "train_batch_size": 32,
             "gradient_accumulation_steps": 4},
            {}, ("bf16", "bfloat16", 0.5, 32, 4),
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {}, ("fp16", "float16", 0.0, 16, 1)),
        ({"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto"}, {},
         ("fp32", "float32", 1.0, 16, 1)),
        ({"bf16": {"enabled": True}}, {"optimizer": {"clip": 2.0}, "precision": {"growth_interval": 9}},
         ("bf16", "bfloat16", 2.0, 16, 1)),
        ({"bf16": {"enabled": True}}, {"precision": {"policy": "fp32"}}, ("fp32", "float32", 0.0, 16, 1)),
    ],
    ids=["all", "fp16", "auto", "partly given", "another policy"],
)  # fmt: skip
def test_settings_of_ds_config_complete_given_ones(
    config: dict[str, Any], given: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    trained = Trained(tmp_path)
    tag = zero_2(tmp_path / "run", trained, ds_config=config)
    wanted = Experiment.parse({"model": LLAMA.model_dump(), "data": {"sequence": 8}, **given}, "x") if given else None
    e = read_content(tag, wanted=wanted).experiment
    found = (e.precision.policy, e.precision.compute, e.optimizer.clip, e.train.batch, e.train.accumulation)
    assert found == expected


@pytest.mark.long
def test_an_unsupported_schedule_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The current rate stays, the reason is reported, and the schedule after warm-up can be given."""
    long = {"warmup_num_steps": 150, "warmup_max_lr": PEAK, "total_num_steps": TOTAL}
    tag = scheduled(tmp_path / "warm", "WarmupDecayLR", long, 2e-4)
    assert read_content(tag).experiment.optimizer.learning_rate == 2e-4
    output = capsys.readouterr().out
    assert "its WarmupDecayLR still warms up" in output
    found = re.search(r"from step 152 on it is (.*), for --model and --peak schedule", output)
    assert found
    fields = found[1].replace("linear", '"linear"').replace(", ", "\n")
    model = tmp_path / "model.toml"
    sections = experiment_for(LLAMA.model_dump(), "test").model_dump(exclude_none=True)
    model.write_text(Experiment.parse(sections | {"optimizer": tomllib.loads(fields)}, "test").to_toml())
    main([str(tag), str(tmp_path / "out"), "--model", str(model), "--peak", "schedule"])  # the fix
    o = read_content(tmp_path / "out").experiment.optimizer
    assert (o.learning_rate, o.warmup, o.decay, o.decay_steps, o.final) == (PEAK, 152, "linear", 202, 0)
    read_content(scheduled(tmp_path / "cycle", "OneCycle", {}, 2e-4))
    assert "jaxdist has no schedule like its OneCycle; its current rate" in capsys.readouterr().out
    read_content(scheduled(tmp_path / "other", "WarmupLR", {"warmup_max_lr": PEAK}, 2e-4))
    assert "its current rate is not that of its WarmupLR: learning_rate = 0.0003" in capsys.readouterr().out


def test_aligned_parameters(tmp_path: Path) -> None:
    """zero_optimization.parameter_alignment leaves gaps after parameters."""
    trained = Trained(tmp_path)
    tag = zero_2(tmp_path / "run", trained, aligned=8)
    content = read_content(tag)
    check(content, trained)
    for file in tag.glob("*_optim_states.pt"):
        with deepspeed():
            tree = torch.load(file, weights_only=False)
        tree["optimizer_state_dict"]["param_alignment_paddings"] = [[0]]
        save(file, tree)
    with pytest.raises(ConfigError, match="param_alignment_paddings are of other parameters than its param_shapes"):
        read_content(tag)


def test_within_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    """`checkpoint-120` with `latest` and `global_step120`: trainer_state.json logs the schedule."""
    trained = Trained(tmp_path)
    log = [{"step": k, "learning_rate": 1e-4 / 0.4 * (1 - k / 200)} for k in range(10, STEP + 1, 10)]
    tag = zero_3(tmp_path / "checkpoint-120", trained)
    state = {"global_step": STEP, "max_steps": 200, "log_history": log}
    (tag.parent / "trainer_state.json").write_text(json.dumps(state))
    for file in tag.glob("*_optim_states.pt"):
        with deepspeed():
            tree = torch.load(file, weights_only=False)
        for group in tree["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
            group["initial_lr"] = 1e-4 / 0.4
        save(file, tree)
    assert kind_of(tag.parent) == "deepspeed"
    e = read_content(tag.parent).experiment
    assert (e.optimizer.decay, e.optimizer.learning_rate, e.train.steps) == ("linear", 1e-4 / 0.4, 200)
    assert float(learning_rate(e.optimizer, 200, jnp.asarray(STEP + 1))) == pytest.approx(1e-4)


def test_frozen_parameters(tmp_path: Path) -> None:
    """Their weights are read; they have no moments."""
    trained = Trained(tmp_path)
    name = "model.norm.weight"
    frozen: dict[str, Any] = {"frozen_param_shapes": {name: trained.tensors[name].shape}}
    frozen["frozen_param_fragments"] = {name: trained.tensors[name]}
    trained.groups[1].remove(name)
    tag = zero_2(tmp_path / "run", trained, **frozen)
    with pytest.raises(ConfigError, match=r"model.norm.weight and 0 more were not trained.*--to hf"):
        read_content(tag)
    main([str(tag), str(tmp_path / "hf"), "--to", "hf"])  # the fix
    assert torch.equal(load_torch(tmp_path / "hf/model.safetensors")[name], trained.tensors[name])


def test_weights_alone_need_no_state_of_a_trainer(tmp_path: Path) -> None:
    tag = zero_2(tmp_path / "run", Trained(tmp_path))
    (tag.parent / "trainer_state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"trainer_state.json: "):
        read_content(tag)
    main([str(tag), str(tmp_path / "hf"), "--to", "hf"])


def test_a_tied_head_may_be_trained_under_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained, embedding, head = Trained(tmp_path, TIED), "model.embed_tokens.weight", "lm_head.weight"
    right = trained.moments["exp_avg"][embedding]
    for tensors in (trained.tensors, *trained.moments.values()):
        tensors[head] = tensors.pop(embedding)
    trained.groups = [[head if name == embedding else name for name in group] for group in trained.groups]
    content = read_content(zero_2(tmp_path / "run", trained, shared_params={embedding: head}))
    assert np.array_equal(content.groups["exp_avg"][embedding].read(), right.numpy())
    assert "decay" not in capsys.readouterr().out
