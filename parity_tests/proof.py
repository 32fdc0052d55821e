"""A proof: the runs that it needs, made by their command lines, and the verdict over what they left behind."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError, Experiment, TrainingError
from parity_tests import bisect, compare, levels
from parity_tests.bisect import Parting
from parity_tests.run import JAX, REFERENCES, Run, command
from parity_tests.verdict import Check, Verdict

STEPS = 20
RECORDED = (1, 2, 5, 10, 20)  # steps of which gradients are kept, and the last one

# What tells a run from the one to be proved: other sections, and fields of `parallel` and `train`.
DOUBLE = {"policy": "fp64"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "one": {"precision": DOUBLE, "parallel": {"mesh": "1x1"}},
    "perturbed": {"precision": DOUBLE, "parallel": {"mesh": "1x1"}},
    "mesh": {"precision": DOUBLE},
    "policy": {},
    "reordered": {"parallel": {"mesh": "1x1"}},
}
PERTURBATION = 64 * 2.0**-53
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9}


class Comparison(NamedTuple):
    """Two float64 runs that must agree."""

    level: str
    what: str
    a: tuple[str, str]
    b: tuple[str, str]


@dataclass
class Proof:
    """One config on two sides. Runs are made when they are asked for, each once, in `folder`."""

    experiment: Experiment
    folder: Path
    device: str = "auto"
    reference: str = "torch"
    done: dict[tuple[str, str], Run] = field(default_factory=dict)

    @classmethod
    def of(cls, experiment: Experiment, folder: Path, device: str = "auto", reference: str = "torch") -> "Proof":
        """The proof of the first steps of a run: at most STEPS, under the schedule of them all."""
        values = experiment.model_dump(exclude_none=True)
        values["optimizer"]["decay_steps"] = experiment.optimizer.decay_steps or experiment.train.steps
        steps = min(experiment.train.steps, STEPS)
        values["train"] |= {"steps": steps, "validation_batches": 0}
        values["checkpoint"]["every"] = 0
        values["record"] = {"steps": sorted({step for step in RECORDED if step < steps} | {steps})}
        return cls(Experiment.parse(values, source="arguments"), folder, device, reference)

    @property
    def sides(self) -> tuple[str, str]:
        return JAX, REFERENCES[self.reference]

    @property
    def kinds(self) -> list[str]:
        """The noise of reordered sums is measured where float32 would not show a mistake."""
        noisy = self.experiment.precision.compute == "bfloat16"
        return [kind for kind in KINDS if kind != "reordered" or noisy]

    @property
    def zero_gradient(self) -> bool:
        return self.experiment.model.family == "gpt2"

    def needed(self) -> list[tuple[str, str]]:
        """(side, kind) of every run, in the order in which they are made."""
        return [(side, kind) for kind in self.kinds for side in self.sides if kind != "perturbed" or side == JAX]

    def config(self, kind: str, **more: dict[str, Any]) -> str:
        """The resolved config of a kind of run, as TOML; `more` are fields by section."""
        values = self.experiment.model_dump(exclude_none=True)
        if kind == "reordered" and values["parallel"]["mesh"] == "1x1":  # one device already: other microbatches
            more = {**more, "train": {"accumulation": 1 if values["train"]["accumulation"] > 1 else 2}}
        for section, fields in [*KINDS[kind].items(), *more.items()]:
            values[section] = fields if section == "precision" else values[section] | fields
        return Experiment.parse(values, source="arguments").to_toml()

    def start(self, init: Path | None = None) -> Path:
        """The weights that all runs start from, as a Hugging Face folder: `init`, or drawn from the seed."""
        if init is not None and (init / "config.json").exists():
            return init
        if init is None:
            init = self.folder / "seed"
            self.train(JAX, self.config("policy"), init, "--precision", "fp32", "--mesh", "1x1", "--steps", "0")
        start = self.folder / "start"
        finish("jaxdist.convert", str(init), str(start), "--to", "hf")
        return start

    def perturbed(self, start: Path) -> Path:
        """The starting weights in float64, each off by about 64 roundings: as a sum of 4096 terms may be."""
        folder = self.folder / "perturbed"
        if not folder.exists():
            shutil.copytree(start, folder)
            random = np.random.default_rng(0)
            for file in folder.glob("*.safetensors"):
                arrays = {name: w.astype(np.float64) for name, w in load_file(file).items()}
                off = {n: w * (1 + PERTURBATION * random.standard_normal(w.shape)) for n, w in arrays.items()}
                save_file(off, file)
        return folder

    def train(self, side: str, config: str, path: Path, *arguments: str) -> Run:
        """One run by its command line, from a config file of its own."""
        file = self.folder / "configs" / f"{path.name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(config, encoding="utf-8")
        line = ["--config", str(file), "--device", self.device, "--output", str(path), *arguments]
        finish(f"{side}.train", *line)
        return Run(side, path)

    def run(self, side: str, kind: str, start: Path) -> Run:
        """One run of one side. Raises ConfigError with its own message when it fails."""
        init = self.perturbed(start) if kind == "perturbed" else start
        others = (k for (s, k) in self.done if s == side and k != "perturbed" and init is start)
        same = next((k for k in others if self.config(k) == self.config(kind)), None)
        if same is not None:
            self.done[side, kind] = self.done[side, same]
        else:
            path = self.folder / "runs" / f"{side}-{kind}"
            self.done[side, kind] = self.train(side, self.config(kind), path, "--init", str(init))
        return self.done[side, kind]

    def pair(self, kind: str) -> tuple[Run, Run]:
        """Both sides' runs of a kind, which have been made."""
        return self.done[self.sides[0], kind], self.done[self.sides[1], kind]

    # ---- what they show

    def comparisons(self) -> list[Comparison]:
        """Mathematics: both sides on one device. Distribution: each side on the mesh and on one device."""
        jax, reference = self.sides
        between = Comparison("mathematics", f"{jax} and {reference} on one device", (jax, "one"), (reference, "one"))
        alone = [
            Comparison("distribution", f"{side} on the mesh and on one device", (side, "mesh"), (side, "one"))
            for side in self.sides
        ]
        return [between, *alone]

    @property
    def noise(self) -> levels.Noise:
        return levels.Noise(self.done[JAX, "one"], self.done[JAX, "perturbed"], self.zero_gradient)

    def checks(self) -> Iterator[Check]:
        """All levels."""
        for level, what, a, b in self.comparisons():
            yield from levels.agreement(level, what, self.done[a], self.done[b], self.noise)
        policy, double = self.pair("policy"), self.pair("mesh")
        yield from levels.precision(policy, double, self.pair("reordered") if "reordered" in self.kinds else None)
        yield from levels.memory(*policy, self.experiment)
        yield from levels.traffic(*policy, self.experiment)

    def verdict(self) -> Verdict:
        """What the runs show."""
        return Verdict(list(self.checks()), notes=list(self.notes()))

    def notes(self) -> Iterator[str]:
        """What a reader must know of a verdict's reach."""
        if "reordered" in self.kinds:
            floor = levels.reordering(self.pair("policy"), self.pair("reordered"))
            yield (
                f"{self.experiment.precision.policy}: each side moves its own loss by {floor / 2:.1g} when its sums "
                "are taken in another order. The curves of this policy exclude what moves the loss by more than "
                f"{levels.K * floor:.1g}; what is smaller, as a learning rate, eps or clip that is a little off, they "
                "cannot show and only the float64 levels exclude."
            )

    # ---- where they part

    def parting(self, verdict: Verdict, start: Path) -> Parting | None:
        """The first tensor by which the runs of the first failed level part; None where no tensor shows it.

        Runs are made anew, with all tensors of few steps recorded. Memory and traffic have no tensors.
        """
        failed = {(check.level, check.about) for check in verdict.failed}
        for comparison in self.comparisons():
            if (comparison.level, comparison.what) in failed:
                a, b = self.done[comparison.a], self.done[comparison.b]
                look = partial(self.look, comparison, start)
                bounds = {name: self.noise.curve(name) for name in compare.FLOOR}
                return bisect.search(look, bisect.first_step(a, b, bounds))
        if any(level == "precision" for level, _ in failed):
            return bisect.search(partial(self.look_at_policy, start), 1)
        return None

    def recorded(self, key: tuple[str, str], steps: list[int], start: Path) -> Run:
        """A run like that of `key`, up to the last of `steps`, of which everything is kept."""
        side, kind = key
        path = self.folder / "bisect" / f"{side}-{kind}-{'-'.join(map(str, steps))}"
        config = self.config(kind, record={"steps": steps, "tensors": "all"}, train={"steps": steps[-1]})
        return Run(side, path) if path.exists() else self.train(side, config, path, "--init", str(start))

    def look(self, comparison: Comparison, start: Path, steps: list[int]) -> list[Parting | None]:
        """Where two float64 runs part in each of `steps`."""
        a, b = (self.recorded(key, steps, start) for key in (comparison.a, comparison.b))
        return [bisect.exact(a, b, step, self.noise.tensors(step), self.zero_gradient) for step in steps]

    def look_at_policy(self, start: Path, steps: list[int]) -> list[Parting | None]:
        """Where, in each of `steps`, one side loses more than the policy explains."""

        def runs(side: str) -> tuple[Run, Run]:
            return self.recorded((side, "policy"), steps, start), self.recorded((side, "mesh"), steps, start)

        a, b = map(runs, self.sides)
        precision = self.experiment.precision
        rounding, stored = ROUNDING[precision.compute], ROUNDING[precision.parameters]
        return [bisect.cost(a, b, step, rounding, stored, self.zero_gradient) for step in steps]


def finish(module: str, *arguments: str) -> None:
    """A command to its end. Raises ConfigError where its input is bad, TrainingError where it fails otherwise."""
    done = command(module, *arguments)
    if done.returncode:
        message = done.stderr.strip().removeprefix("error: ")
        raise (ConfigError if done.returncode == 2 else TrainingError)(f"python -m {module}: {message}")
