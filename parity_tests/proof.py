"""The levels of a proof: the runs that it needs, and what is asked of each pair of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ConfigError, Experiment, TrainingError
from parity_tests import compare
from parity_tests.run import SIDES, Run, command
from parity_tests.verdict import Check, Verdict

STEPS = 20
K = 4  # a run may leave the other's by k times what both lose against their own float64 runs

# What tells a run from the one to be proved: other sections, and fields of `parallel`.
DOUBLE = {"precision": {"policy": "fp64"}}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": (DOUBLE, {"mesh": "1x1"}),
    "mesh": (DOUBLE, {}),
    "policy": ({}, {}),
}

EXACT = "float64: both sides round alike to 1e-15; none of the planted mistakes is smaller"
NUMBERS = 256  # bytes of the few scalars that cross devices
DERIVED = f"{K} times what both runs differ from their own float64 runs until then"


@dataclass
class Proof:
    """One config on both sides. Runs are made when they are asked for, each once, in `folder`."""

    experiment: Experiment
    folder: Path
    device: str = "auto"
    done: dict[tuple[str, str], Run] = field(default_factory=dict)

    @classmethod
    def of(cls, experiment: Experiment, folder: Path, device: str = "auto") -> "Proof":
        """The proof of the first steps of a run: at most STEPS, under the schedule of them all."""
        values = experiment.model_dump(exclude_none=True)
        values["optimizer"]["decay_steps"] = experiment.optimizer.decay_steps or experiment.train.steps
        values["train"] |= {"steps": min(experiment.train.steps, STEPS), "validation_batches": 0}
        values["checkpoint"]["every"] = 0
        return cls(Experiment.parse(values, source="arguments"), folder, device)

    def needed(self) -> list[tuple[str, str]]:
        """(side, kind) of every run, in the order in which they are made."""
        return [(side, kind) for kind in KINDS for side in SIDES]

    def config(self, kind: str) -> str:
        """The resolved config of a kind of run, as TOML."""
        sections, parallel = KINDS[kind]
        values = self.experiment.model_dump(exclude_none=True) | sections
        values["parallel"] = values["parallel"] | parallel
        return Experiment.parse(values, source="arguments").to_toml()

    def start(self, init: Path | None = None) -> Path:
        """The weights that all runs start from, as a Hugging Face folder: `init`, or drawn from the seed."""
        if init is not None and (init / "config.json").exists():
            return init
        if init is None:
            init = self.folder / "seed"
            self.train("jaxdist", "policy", init, "--precision", "fp32", "--mesh", "1x1", "--steps", "0")
        start = self.folder / "start"
        finish("jaxdist.convert", str(init), str(start), "--to", "hf")
        return start

    def train(self, side: str, kind: str, path: Path, *arguments: str) -> Run:
        """One run by its command line, from a config file of its own."""
        file = self.folder / "configs" / f"{kind}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.config(kind), encoding="utf-8")
        line = ["--config", str(file), "--device", self.device, "--output", str(path), *arguments]
        finish(f"{side}.train", *line)
        return Run(side, path)

    def run(self, side: str, kind: str, start: Path) -> Run:
        """One run of one side. Raises ConfigError with its own message when it fails."""
        same = next((k for (s, k) in self.done if s == side and self.config(k) == self.config(kind)), None)
        if same is not None:
            self.done[side, kind] = self.done[side, same]
        else:
            path = self.folder / "runs" / f"{side}-{kind}"
            self.done[side, kind] = self.train(side, kind, path, "--init", str(start))
        return self.done[side, kind]

    def pair(self, kind: str) -> tuple[Run, Run]:
        """Both sides' runs of a kind, which have been made."""
        return self.done[SIDES[0], kind], self.done[SIDES[1], kind]

    def verdict(self) -> Verdict:
        """What the runs show."""
        levels = (self.mathematics, self.distribution, self.precision, self.memory, self.traffic)
        return Verdict([check for level in levels for check in level()])

    def mathematics(self) -> Iterator[Check]:
        """Both sides on one device, in float64."""
        yield from self.agreement("mathematics", "JAX and torch on one device", *self.pair("one"))

    def distribution(self) -> Iterator[Check]:
        """Each side on the mesh against itself on one device, in float64."""
        for side in SIDES:
            alone, mesh = self.done[side, "one"], self.done[side, "mesh"]
            yield from self.agreement("distribution", f"{side} on the mesh and on one device", mesh, alone)

    def agreement(self, level: str, what: str, a: Run, b: Run) -> Iterator[Check]:
        """Curves and states of two float64 runs."""
        for name, bound in (("loss", compare.LOSS), ("grad_norm", compare.GRAD_NORM), ("learning_rate", compare.LOSS)):
            yield Check(level, f"{name}, {what}", float(compare.curve(a.metrics, b.metrics, name).max()), bound, EXACT)
        states = compare.states(a.states, b.states, zero_gradient=self.experiment.model.family == "gpt2")
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            name, value = compare.worst({n: v for n, v in states.items() if n.startswith(f"{kind}/")})
            yield Check(level, f"{name}, {what}", value, compare.STATE, EXACT)

    def precision(self) -> Iterator[Check]:
        """Both sides under the policy: each step's losses against what the policy costs either side."""
        (a, b), (a64, b64) = self.pair("policy"), self.pair("mesh")
        between = compare.curve(a.metrics, b.metrics, "loss")
        lost = compare.curve(a.metrics, a64.metrics, "loss") + compare.curve(b.metrics, b64.metrics, "loss")
        bound = np.maximum(K * np.maximum.accumulate(lost), compare.LOSS)
        worst = int(np.argmax(between / bound))
        yield Check("precision", f"loss at step {worst + 1}", float(between[worst]), float(bound[worst]), DERIVED)

    def memory(self) -> Iterator[Check]:
        """Bytes that the fullest device holds of each kind, torch's against JAX's, less the causes known by name."""
        (a, b), parallel = self.pair("policy"), self.experiment.parallel
        n, t = b.summary["mesh"]["fsdp"], b.summary["mesh"]["tensor"]
        item = np.dtype(self.experiment.precision.parameters).itemsize
        tensors = [w for name, w in b.states.items() if name.startswith("weights/")]
        padding = sum(w[0].size for w in tensors if len(w) % (n * t)) * item
        largest = max(w.size for w in tensors) * item

        share = {"parameters": 1, "gradients": 1, "optimizer_state": 1}
        bound = {"parameters": padding, "gradients": padding, "optimizer_state": 2 * padding + 4 * len(tensors) + 8}
        why = dict.fromkeys(share, "FSDP2 splits whole rows: less than one for each tensor whose rows do not divide")
        why["optimizer_state"] += "; torch counts steps in 4 bytes a tensor, optax in 8 for all"
        if parallel.strategy == "zero2":
            share["parameters"] = n
            why["parameters"] += "; FSDP2's zero2 keeps 1/fsdp of them at rest, ours the whole"
        if (
            parallel.strategy in ("zero2", "fsdp")
            and parallel.reduce == "step"
            and self.experiment.train.accumulation == 1
        ):
            share["gradients"] = n
            why["gradients"] += "; FSDP2 has nothing to keep whole for a single microbatch"
        if parallel.strategy == "zero1":
            bound["optimizer_state"] += 2 * largest
            why["optimizer_state"] += "; ZeroRedundancyOptimizer deals out whole tensors"
        for kind, parts in share.items():
            jax, torch = a.summary["memory"][kind] / parts, b.summary["memory"][kind]
            yield Check("memory", f"{kind}, bytes between the sides", abs(jax - torch), float(bound[kind]), why[kind])

    def traffic(self) -> Iterator[Check]:
        """Bytes a device sends per step over each mesh axis, against the least that the strategy could send."""
        a, b = self.pair("policy")
        least: dict[str, float] = a.summary["least_bytes"]
        for side, run in zip(SIDES, (a, b), strict=True):
            sent: dict[str, float] = {}
            for collective in run.summary["collectives"]:
                axis = "data" if collective["axis"] == "data+fsdp" else collective["axis"]
                sent[axis] = sent.get(axis, 0) + collective["bytes"]
            for axis, expected in least.items():
                whole = side == "torch_ref" and self.experiment.parallel.strategy == "zero1" and axis == "fsdp"
                why = "the closed form and 5 %" + (
                    "; DDP reduces whole gradients for zero1: 1.5 times" if whole else ""
                )
                away = sent.get(axis, 0) / (expected * (1.5 if whole else 1)) - 1
                yield Check("traffic", f"{side}, {axis}: share from the least", abs(away), 0.05, why)
            numbers = sum(size for axis, size in sent.items() if axis not in least)
            yield Check(
                "traffic", f"{side}, bytes over other axes", numbers, NUMBERS, "the norm, the loss and the count"
            )


def finish(module: str, *arguments: str) -> None:
    """A command to its end. Raises ConfigError where its input is bad, TrainingError where it fails otherwise."""
    done = command(module, *arguments)
    if done.returncode:
        message = done.stderr.strip().removeprefix("error: ")
        raise (ConfigError if done.returncode == 2 else TrainingError)(f"python -m {module}: {message}")
