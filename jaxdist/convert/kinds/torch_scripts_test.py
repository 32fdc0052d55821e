"""Training scripts' files in torch: optimizer, schedule and step come along, and back unchanged."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.config.optimizer import MOMENTS
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import PARAMETERS
from jaxdist.convert.entries import entries
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.torch_files_test import TorchFiles, same
from jaxdist.convert.stream import Conversion
from jaxdist.formats.hf import experiment_for, to_settings
from jaxdist.formats.orbax import read_experiment
from jaxdist.training import checkpoint
from jaxdist.training.optim import learning_rate

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")


class TestScripts(TorchFiles):
    def script(self, file: Path, rule: Any = None, **keys: str) -> tuple[dict[str, Any], Any]:
        """A script's file after five steps; `keys` are its names of the parts."""
        written(file, "torch", content_of(self.model))
        weights = torch.load(file, weights_only=True)["model"]
        shapes = entries("huggingface", self.model)
        parameters = [(n, torch.nn.Parameter(weights[n])) for n in shapes]
        groups = [[(n, p) for n, p in parameters if (p.ndim >= 2) == wide] for wide in (True, False)]
        optimizer = torch.optim.AdamW(
            [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
            lr=1e-3, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.03,
        )  # fmt: skip
        schedule = rule and rule(optimizer)
        for _ in range(5):
            for _, parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            if schedule:
                schedule.step()
        name = {key: keys.get(key, key) for key in ("model", "optimizer", "step", "scheduler")}
        tree = {"args": {"seed": 3}, name["model"]: dict(weights), name["optimizer"]: optimizer.state_dict()}
        tree[name["model"]] |= {n: p.detach().clone() for n, p in parameters}
        tree |= {name["step"]: 5} | ({name["scheduler"]: schedule.state_dict()} if schedule else {})
        torch.save(tree, file)
        return torch.load(file, weights_only=True), optimizer

    @pytest.mark.parametrize(
        "rule",
        [
            None,
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50, 1e-4),
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o,
                [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)],
                [3],
            ),
        ],
        ids=["none", "cosine", "sequential"],
    )
    @pytest.mark.parametrize("through", often(["orbax", "dcp", "torch"], ["dcp"]))
    def test_a_script_gets_back_its_entries(self, through: str, rule: Any, tmp_path: Path) -> None:
        """All entries under their keys in order, and none of ours: groups, schedule, step."""
        saved, optimizer = self.script(
            tmp_path / "a.pt", rule, model="state_dict", step="global_step", scheduler="lr_scheduler"
        )
        config = ["--model", self.config(tmp_path)]
        main([str(tmp_path / "a.pt"), str(tmp_path / "there"), "--to", through, *config])
        main([str(tmp_path / "there"), str(tmp_path / "b.pt"), *(config if through == "torch" else [])])
        back = torch.load(tmp_path / "b.pt", weights_only=True)
        assert list(back) == list(saved)
        same(back, saved)
        optimizer.load_state_dict(back["optimizer"])

    def test_the_optimizer_goes_along(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The run has its settings and its peak; the schedule is that of --model."""

        def of(rule: Any, *arguments: str) -> Any:
            self.script(tmp_path / "a.pt", rule)
            line = ["--model", self.config(tmp_path, schedule=True), *arguments]
            main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--force", *line])
            return read_experiment(checkpoint.locate(tmp_path / "run")).optimizer

        with pytest.raises(ConfigError, match=r"its current rate is 0.001, and the schedule of --model has 0.00125 at"):
            of(None)
        o, default = of(None, "--peak", "now"), experiment_for(self.model.model_dump(), "test").optimizer
        assert (o.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay) == (1e-3, 0.8, 0.99, 1e-7, 0.03)
        assert (o.decay, o.warmup) == (default.decay, default.warmup)
        assert "scheduler" not in capsys.readouterr().out
        assert of(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)).learning_rate == 1e-3
        message = "its peak, 0.001, continues by the schedule of --model, whose own is 0.005; --peak schedule takes"
        assert message in capsys.readouterr().out
        exponential = of(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9), "--peak", "schedule")
        assert exponential.learning_rate == default.learning_rate

    def test_without_a_scheduler_the_rate_stays(self, tmp_path: Path) -> None:
        """A config may say otherwise."""
        self.script(tmp_path / "a.pt")
        (tmp_path / "config.json").write_text(json.dumps(to_settings(self.model, "float32")))
        o = torch_files.read_content(tmp_path / "a.pt").experiment.optimizer
        assert (o.learning_rate, o.decay, o.warmup) == (1e-3, "constant", 0)

    def test_more_steps_change_the_groups(self, tmp_path: Path) -> None:
        """Rate and counters are current after more steps, under the script's names."""
        self.script(tmp_path / "a.pt", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50, 1e-4))
        content = torch_files.read_content(tmp_path / "a.pt", experiment_for(self.model.model_dump(), "test"))
        later = replace(content, step=25, updates=25)
        torch_files.write(tmp_path / "b.pt", Conversion(later, "huggingface"))
        back = torch.load(tmp_path / "b.pt", weights_only=True)
        rate = float(learning_rate(content.experiment.optimizer, content.experiment.train.steps, jnp.asarray(26)))
        rates = [group["lr"] for group in back["optimizer"]["param_groups"]]
        assert "experiment" in back  # it says how the run continued
        assert rates == pytest.approx([rate] * 2, rel=1e-6) and back["scheduler"]["_last_lr"] == rates
        assert (back["step"], back["scheduler"]["last_epoch"], back["scheduler"]["T_max"]) == (25, 25, 50)
        assert {float(state["step"]) for state in back["optimizer"]["state"].values()} == {25.0}

    @pytest.mark.parametrize("step", [7.0, np.int64(7), np.float64(7.0), torch.tensor(7), torch.tensor(7.0)], ids=repr)
    def test_a_step_of_any_type(self, step: Any, tmp_path: Path) -> None:
        saved, _ = self.script(tmp_path / "a.pt")
        torch.save(saved | {"step": step}, tmp_path / "a.pt")
        experiment = experiment_for(self.model.model_dump(), "test")
        assert torch_files.read_content(tmp_path / "a.pt", experiment).step == 7
        torch.save(saved | {"step": 7.5}, tmp_path / "a.pt")
        assert torch_files.read_content(tmp_path / "a.pt", experiment).step == 5  # the optimizer's count

    def test_an_optimizer_before_its_first_step(self, tmp_path: Path) -> None:
        """Comes back unchanged; with our state once there are moments."""
        saved, _ = self.script(tmp_path / "a.pt")
        saved["optimizer"]["state"], saved["step"] = {}, 0
        torch.save(saved, tmp_path / "a.pt")
        content = torch_files.read_content(tmp_path / "a.pt", experiment_for(self.model.model_dump(), "test"))
        torch_files.write(tmp_path / "b.pt", Conversion(content, "huggingface"))
        back = torch.load(tmp_path / "b.pt", weights_only=True)
        same(back, saved)
        moments = dict.fromkeys(MOMENTS, content.groups[PARAMETERS])
        later = replace(content, groups={**content.groups, **moments}, step=3, updates=3)
        torch_files.write(tmp_path / "c.pt", Conversion(later, "huggingface"))
        state = torch.load(tmp_path / "c.pt", weights_only=True)["optimizer"]
        assert len(state["state"]) == sum(len(group["params"]) for group in state["param_groups"])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"amsgrad": True}, "is AMSGrad"),
            ({"maximize": True}, "has maximize = True"),
            ({"decoupled_weight_decay": False, "weight_decay": 0.1}, "has decoupled_weight_decay = False"),
            ({"lr": 1e-2}, "learning_rate of its optimizer's groups are"),
            ({"betas": (0.1, 0.2)}, "beta1 of its optimizer's groups are"),
        ],
    )
    def test_settings_that_our_optimizer_lacks(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        saved, _ = self.script(tmp_path / "a.pt")
        saved["optimizer"]["param_groups"][0] |= change
        torch.save(saved, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=f"a.pt: .*{message}"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", self.config(tmp_path)])
        assert not (tmp_path / "run").exists()

    def test_a_rate_that_is_a_tensor(self, tmp_path: Path) -> None:
        saved, _ = self.script(tmp_path / "a.pt")
        for group in saved["optimizer"]["param_groups"]:
            group["lr"] = torch.tensor(2e-3)
        torch.save(saved, tmp_path / "a.pt")
        main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", self.config(tmp_path)])
        kept = read_experiment(checkpoint.locate(tmp_path / "run")).optimizer
        assert kept.learning_rate == pytest.approx(2e-3, rel=1e-7)

    @pytest.mark.parametrize("step", [float("nan"), float("inf"), 1e30, 2.0**40, 0.5, -1.0])
    def test_an_impossible_step(self, step: float, tmp_path: Path) -> None:
        saved, _ = self.script(tmp_path / "a.pt")
        for state in saved["optimizer"]["state"].values():
            state["step"] = torch.tensor(step)
        torch.save(saved, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"a.pt: step = .* of its optimizer; give a whole number"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", self.config(tmp_path)])

    def test_other_parts_of_the_same_name(self, tmp_path: Path) -> None:
        """A model's name, a script's own `experiment`, and another program's config.json."""
        saved, _ = self.script(tmp_path / "a.pt", model="state_dict")
        (tmp_path / "config.json").write_text('{"batch": 3}')
        torch.save({"model": "qwen"} | saved | {"experiment": {"name": "run1"}}, tmp_path / "a.pt")
        main([str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--model", self.config(tmp_path)])
        back = torch.load(tmp_path / "b.pt", weights_only=True)
        same(back, {"model": "qwen"} | saved | {"experiment": {"name": "run1"}})
