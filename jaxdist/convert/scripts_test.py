"""Other programs' training scripts: their number of steps, and all their entries come back."""

import importlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from jaxdist.config import ConfigError, Precision
from jaxdist.conftest import slow
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.entries import entries
from jaxdist.convert.kinds import orbax_files, safetensors_writer
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.stream import Conversion
from jaxdist.formats.companions import is_companion
from jaxdist.formats.hf import experiment_for

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
dcp_files = importlib.import_module("jaxdist.convert.kinds.dcp_files")
dcp = importlib.import_module("torch.distributed.checkpoint")

MODEL = MODELS["Qwen2ForCausalLM"]
EXPERIMENT = experiment_for(MODEL.model_dump(), "test")


def config(folder: Path) -> list[str]:
    file = folder / "model.toml"
    file.write_text(tomli_w.dumps(EXPERIMENT.model_dump(exclude_unset=True)))
    return ["--model", str(file)]


def script(folder: Path, steps: int = 5, epochs: int = 1) -> tuple[dict[str, Any], Any]:
    """A script's model and optimizer after some steps, and its schedule, which counts epochs."""
    weights = torch.load(written(folder / "weights.pt", "torch", content_of(MODEL)), weights_only=True)["model"]
    (folder / "weights.pt").unlink()
    shapes = entries("huggingface", MODEL)
    parameters = {name: torch.nn.Parameter(weights[name]) for name in shapes}
    groups = [[(n, p) for n, p in parameters.items() if (p.ndim >= 2) == wide] for wide in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    for _ in range(epochs):
        for _ in range(steps):
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        schedule.step()
    tree = {"model": {name: p.detach().clone() for name, p in parameters.items()}, "optimizer": optimizer.state_dict()}
    return tree, schedule.state_dict()


def saved_dcp(folder: Path, tree: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


# Settings that a script may store under a key of a state, and the state's key in that case.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"name": "llama", "dim": 8}, "state_dict"),
    "optimizer": ({"name": "adamw", "betas": (0.9, 0.95)}, "optimizer_state_dict"),
    "scheduler": ({"name": "cosine"}, "lr_scheduler"),
    "scaler": ({"enabled": True}, "grad_scaler"),
    "experiment": ({"model": {"family": "llama"}, "optimizer": {"lr": 1e-3}, "seed": 3}, ""),
}


@pytest.mark.parametrize("part", SETTINGS)
def test_settings_under_the_key_of_a_state(part: str, tmp_path: Path) -> None:
    """A state is recognized by its content; all entries come back, updated by later steps."""
    found, schedule = script(tmp_path)
    scaler = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 1}
    states = found | {"scheduler": schedule | {"last_epoch": 5}, "scaler": scaler}
    settings, key = SETTINGS[part]
    saved = {part: settings} | {key if name == part else name: state for name, state in states.items()} | {"step": 5}
    torch.save(saved, tmp_path / "a.pt")
    content = torch_files.read_content(
        tmp_path / "a.pt", EXPERIMENT.model_copy(update={"precision": Precision(policy="fp16")})
    )
    assert (content.step, content.updates, content.scaling and float(content.scaling.scale)) == (5, 5, 4.0)
    written(tmp_path / "b.pt", "torch", content)
    same(torch.load(tmp_path / "b.pt", weights_only=True), saved)
    later = replace(content, step=25, updates=25)
    back = torch.load(written(tmp_path / "c.pt", "torch", later), weights_only=True)
    assert back[part] == settings
    assert back["lr_scheduler" if part == "scheduler" else "scheduler"]["last_epoch"] == 25


class TestSteps:
    def tree(self, folder: Path, **more: Any) -> dict[str, Any]:
        """The same for torch.distributed.checkpoint: the optimizer's state by names."""
        found, _ = script(folder)
        names = [name for group in found["optimizer"]["param_groups"] for name in group["param_names"]]
        state = {name: found["optimizer"]["state"][i] for i, name in enumerate(names)}
        return {"model": found["model"], "optimizer": {"state": state}} | more

    @pytest.mark.parametrize(
        "step", [5000.0, torch.tensor([5000]), *slow([5000, np.int64(5000), torch.tensor(5000.0)])]
    )
    def test_of_any_type(self, step: Any, tmp_path: Path) -> None:
        folder = saved_dcp(tmp_path / "dcp", self.tree(tmp_path, step=step))
        content = dcp_files.read_content(folder, EXPERIMENT)
        assert (content.step, content.updates) == (5000, 5)
        if not isinstance(step, torch.Tensor):
            later = replace(content, step=5020)
            dcp_files.write(tmp_path / "back", Conversion(later, KINDS["dcp"].naming_of(later)))
            (back,) = (tmp_path / "back" / "checkpoints").iterdir()
            again = dcp_files.Tensors(back).extras()["step"]
            assert (type(again), again) == (type(step), 5020)

    def test_of_an_optimizer_of_numpys_type(self, tmp_path: Path) -> None:
        tree, _ = script(tmp_path)
        for entry in tree["optimizer"]["state"].values():
            entry["step"] = np.int64(5)
        torch.save(tree, tmp_path / "a.pt")
        assert torch_files.read_content(tmp_path / "a.pt", EXPERIMENT).updates == 5

    def test_that_is_no_count(self, tmp_path: Path) -> None:
        """The optimizer's count is used; the entry comes back unchanged."""
        content = dcp_files.read_content(saved_dcp(tmp_path / "dcp", self.tree(tmp_path, step=7.5)), EXPERIMENT)
        assert content.step == 5
        dcp_files.write(tmp_path / "back", Conversion(content, KINDS["dcp"].naming_of(content)))
        (back,) = (tmp_path / "back" / "checkpoints").iterdir()
        assert dcp_files.Tensors(back).extras()["step"] == 7.5

    def test_of_two_numbers(self, tmp_path: Path) -> None:
        """A script's entry is no count, and comes back; a parameter's state has no other count, and is refused."""
        saved = saved_dcp(tmp_path / "two", self.tree(tmp_path, step=torch.ones(2)))
        content = dcp_files.read_content(saved, EXPERIMENT)
        assert content.step == 5
        dcp_files.write(tmp_path / "back", Conversion(content, KINDS["dcp"].naming_of(content)))
        (back,) = (tmp_path / "back" / "checkpoints").iterdir()
        assert dcp_files.Tensors(back).extras()["step"].tolist() == [1, 1]
        tree = self.tree(tmp_path)
        name = next(iter(tree["optimizer"]["state"]))
        tree["optimizer"]["state"][name]["step"] = torch.ones(2)
        with pytest.raises(ConfigError, match=r"dcp: step.* is a tensor \[2\]; give one whole number"):
            dcp_files.read_content(saved_dcp(tmp_path / "dcp", tree), EXPERIMENT)

    @pytest.mark.parametrize("more", [0, 20])
    def test_a_schedule_of_epochs(self, more: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Its counter does not count steps, and stays unchanged."""
        tree, schedule = script(tmp_path, steps=50, epochs=2)
        torch.save(tree | {"scheduler": schedule}, tmp_path / "a.pt")
        content = torch_files.read_content(tmp_path / "a.pt", EXPERIMENT)
        assert (content.step, content.updates, schedule["last_epoch"]) == (100, 100, 2)
        assert "its optimizer made 100 steps, its scheduler 2, of epochs" in capsys.readouterr().out
        later = replace(content, step=100 + more, updates=100 + more)
        torch_files.write(tmp_path / "b.pt", Conversion(later, "huggingface"))
        assert torch.load(tmp_path / "b.pt", weights_only=True)["scheduler"] == schedule
        assert ("counts other than steps" in capsys.readouterr().out) == bool(more)


def lightning(tree: dict[str, Any], schedule: Any) -> dict[str, Any]:
    """The same in Lightning's form."""
    return {
        "epoch": 1, "global_step": 5, "pytorch-lightning_version": "2.5.0", "state_dict": tree["model"],
        "loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": {"ready": 5}}}}, "callbacks": {},
        "optimizer_states": [tree["optimizer"]], "lr_schedulers": [schedule],
    }  # fmt: skip


class TestOptimizers:
    @pytest.mark.parametrize("more", [0, 20])
    def test_of_lightning(self, more: int, tmp_path: Path) -> None:
        """States are in lists, and come back so, with updated counters."""
        tree, schedule = script(tmp_path, steps=1, epochs=5)
        torch.save(lightning(tree, schedule), tmp_path / "a.ckpt")
        main([str(tmp_path / "a.ckpt"), str(tmp_path / "run"), *config(tmp_path)])
        content = orbax_files.read_content(tmp_path / "run")
        assert (content.step, content.updates) == (5, 5)
        later = replace(content, step=5 + more, updates=5 + more)
        torch_files.write(tmp_path / "b.ckpt", Conversion(later, "huggingface"))
        before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("a.ckpt", "b.ckpt"))
        if not more:
            same(after, before)
        assert [len(after[key]) for key in ("optimizer_states", "lr_schedulers")] == [1, 1]
        assert after["lr_schedulers"][0]["last_epoch"] == after["global_step"] == 5 + more

    @pytest.mark.parametrize("key", ["opt", "optimizers", "optimizer_states", "optimizer"])
    def test_that_are_not_read(self, key: str, tmp_path: Path) -> None:
        """States under a custom key, per model, several, or nested."""
        tree, _ = script(tmp_path)
        state = tree.pop("optimizer")
        tree[key] = {
            "opt": state, "optimizers": {"a": state}, "optimizer_states": [state, state], "optimizer": {"inner": state}
        }[key]  # fmt: skip
        torch.save(tree, tmp_path / "a.pt")
        line = [str(tmp_path / "a.pt"), str(tmp_path / "there"), *config(tmp_path)]
        with pytest.raises(ConfigError, match=f"a.pt: its '{key}' has an optimizer that is not read; .*--to hf"):
            main(line)
        main([*line, "--to", "hf"])


def no_step(tree: dict[str, Any]) -> None:
    """Leaves the count to the optimizer."""


def whole_float(tree: dict[str, Any]) -> None:
    tree["step"] = 7.0


def tensor_step(tree: dict[str, Any]) -> None:
    tree["global_step"] = torch.tensor(7)


def ints(tree: dict[str, Any]) -> None:
    """Counts as in torch before 1.12."""
    for entry in tree["optimizer"]["state"].values():
        entry["step"] = 5


def of_groups(tree: dict[str, Any]) -> None:
    """Counts as in Apex's FusedAdam."""
    for entry in tree["optimizer"]["state"].values():
        del entry["step"]
    for group in tree["optimizer"]["param_groups"]:
        group["step"] = 5


def rates_as_tensors(tree: dict[str, Any]) -> None:
    for group in tree["optimizer"]["param_groups"]:
        group["lr"] = torch.tensor(1e-3)


def no_tensors(tree: dict[str, Any]) -> None:
    tree["model"] = {"first": None} | tree["model"] | {"_extra_state": 5, "more": {"x": torch.ones(2), "y": [1]}}


def of_a_module(tree: dict[str, Any]) -> None:
    """Names as from Module.state_dict."""
    tree["model"] = with_versions(tree["model"])
    tree["ema"] = with_versions({"a": torch.ones(2, 3).T})


def with_versions(tensors: dict[str, Any]) -> Any:
    ordered: Any = OrderedDict(reversed(tensors.items()))
    ordered._metadata = OrderedDict({"": {"version": 1}, "norm": {"version": 2}})
    return ordered


def counted(tree: Any) -> set[Any]:
    """Every step in a tree, as numbers."""
    entries = tree["optimizer"]["state"].values()
    kept = [entry["step"] for entry in entries if "step" in entry]
    kept += [group["step"] for group in tree["optimizer"]["param_groups"] if "step" in group]
    return {float(step) for step in (*kept, *(tree[key] for key in ("step", "global_step") if key in tree))}


class TestThereAndBack:
    """`torch.load` of the returned file equals that of the script's file."""

    @pytest.mark.parametrize(
        "change",
        [of_groups, rates_as_tensors, no_tensors, *slow([no_step, whole_float, tensor_step, ints, of_a_module])],
    )
    def test_of_a_script(self, change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
        tree, _ = script(tmp_path)
        change(tree)
        before, after = self.converted(tree, tmp_path)
        same(after, before)

    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize(
        "kind", [dict, with_versions, lambda w: {**w, "epoch": 3, "names": ["a"], "best": {"b": 1.5}}]
    )
    def test_of_a_state_dict(self, kind: Callable[[Any], Any], old: bool, tmp_path: Path) -> None:
        """The file itself, also with other values in it, and in the format before torch 1.6."""
        before, after = self.converted(kind(script(tmp_path)[0]["model"]), tmp_path, not old)
        same(after, before)

    def test_of_a_state_dict_with_an_optimizer_in_it(self, tmp_path: Path) -> None:
        tree, _ = script(tmp_path)
        before, after = self.converted({**tree["model"], "optimizer": tree["optimizer"], "epoch": 3}, tmp_path)
        same(after, before)

    @pytest.mark.parametrize("change", [whole_float, tensor_step, ints, of_groups])
    def test_steps_since_then_are_of_the_same_type(
        self, change: Callable[[dict[str, Any]], None], tmp_path: Path
    ) -> None:
        tree, _ = script(tmp_path)
        change(tree)
        torch.save(tree, tmp_path / "a.pt")
        later = replace(torch_files.read_content(tmp_path / "a.pt", EXPERIMENT), step=25, updates=25)
        torch_files.write(tmp_path / "b.pt", Conversion(later, "huggingface"))
        before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
        assert counted(after) == {25.0}
        for key in before.keys() - {"model", "optimizer"}:
            assert type(after[key]) is type(before[key])
        for i, entry in before["optimizer"]["state"].items():
            assert {k: type(v) for k, v in entry.items()} == {
                k: type(v) for k, v in after["optimizer"]["state"][i].items()
            }

    def converted(self, tree: Any, folder: Path, new: bool = True) -> tuple[Any, Any]:
        """The source's tree, and the tree that comes back from a run folder."""
        torch.save(tree, folder / "a.pt", _use_new_zipfile_serialization=new)
        main([str(folder / "a.pt"), str(folder / "run"), *config(folder)])
        main([str(folder / "run"), str(folder / "b.pt")])
        before, after = (torch.load(folder / name, weights_only=True) for name in ("a.pt", "b.pt"))
        return before, after

    def test_of_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Templates in their own folder, and other content of the index."""
        monkeypatch.setattr(safetensors_writer, "SHARD_BYTES", 900)
        source = written(tmp_path / "a", "hf", content_of(MODEL))
        index = source / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["metadata"] = {"total_parameters": 123} | content["metadata"] | {"mine": ["x"]}
        index.write_text(json.dumps(content, indent=2) + "\n")
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool.jinja").write_text("x")
        main([str(source), str(tmp_path / "run")])
        main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf"])
        files = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
        assert files == {f.relative_to(tmp_path / "back") for f in (tmp_path / "back").rglob("*") if f.is_file()}
        assert all((source / name).read_bytes() == (tmp_path / "back" / name).read_bytes() for name in files)

    @pytest.mark.parametrize(
        "name",
        ["../tokenizer.json", "additional_chat_templates/../x", "additional_chat_templates/a/b", "/tokenizer.json"],
    )
    def test_names_that_companion_files_cannot_have(self, name: str) -> None:
        assert is_companion("tokenizer.json") and is_companion("additional_chat_templates/tool.jinja")
        assert not is_companion(name)


def same(a: Any, b: Any) -> None:
    """Assert that two trees of `torch.load` are the same: types, keys in order, dtypes and bits."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    else:
        assert a == b
