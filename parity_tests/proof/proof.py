"""A proof: the runs that it needs, made by their command lines, and the verdict over what they left behind."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from jaxdist.config import ConfigError, Experiment, TrainingError
from jaxdist.config.registry import FAMILIES
from jaxdist.convert.kinds.hf import read_hf
from jaxdist.families import models
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.runs.folder import differences
from parity_tests.expected import collectives, memory_model
from parity_tests.expected.memory_causes import Cause
from parity_tests.expected.memory_model import Scratch
from parity_tests.proof import bisect, caveats, digits, levels, nearness, starts
from parity_tests.proof.bisect import Divergence
from parity_tests.proof.causes import diagnose
from parity_tests.proof.caveats import GELU, OTHERS, RECORDED
from parity_tests.proof.gathering import Gathering
from parity_tests.proof.verdict import Check, Verdict
from parity_tests.runs import compare, names
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import JAX, REFERENCES, RUN_BY_PROOF, SIDES, Run, command

STEPS = 20

# Differences of a run from the run to prove: other sections, and fields of `parallel` and `train`.
DOUBLE = {"policy": "fp64"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "policy": {},
    "one": {"precision": DOUBLE, "parallel": {"mesh": "1x1"}},
    "perturbed": {"precision": DOUBLE, "parallel": {"mesh": "1x1"}},
    "mesh": {"precision": DOUBLE},
    "reordered": {"parallel": {"mesh": "1x1"}},
    "norm_eps": {"precision": DOUBLE},
    "eps": {"precision": DOUBLE},
    "gelu": {"precision": DOUBLE},
}

ASKED = "the mesh of the config, by the sizes that a run's own mesh says it has"
NO_NUMBER = re.compile(r"= -?(nan|inf)\b|not finite")  # of a run that diverged, which is bad input of a proof
REPLACED = [("precision", name) for name in ("parameters", "compute", "reduce")]  # by those of another policy


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
    xla_flags: str = ""
    total_steps: int | None = None  # steps of the run, where the proof is of its first ones
    init: Path | None = None  # the Hugging Face folder that all runs start from
    done: dict[tuple[str, str], Run] = field(default_factory=dict)  # by side and kind
    known: dict[tuple[str, ...], Run] = field(default_factory=dict)  # by what made them: module, config, arguments

    @classmethod
    def of(
        cls, experiment: Experiment, folder: Path, device: str = "auto", reference: str = "torch", first: int = STEPS
    ) -> Self:
        """The proof of the `first` steps of a run, under the schedule of them all."""
        steps = min(experiment.train.steps, first)
        recorded = {step for step in RECORDED if step < steps} | {steps}
        short = cls.shortened(experiment, steps, recorded)
        return cls(short, folder, device, reference, total_steps=experiment.train.steps)

    @classmethod
    def against(cls, reference: Run, experiment: Experiment, folder: Path, device: str = "auto") -> "Proof":
        """The proof that `experiment` trains as the run folder of another loop did, over all of its steps.

        Raises ConfigError when it is one of another experiment.
        """
        theirs = reference.experiment
        steps = theirs.train.steps
        if experiment.train.steps != steps:
            raise ConfigError(
                f"--against {reference.path} is a run of {steps} steps, not {experiment.train.steps}; give --steps "
                f"{steps}, or leave out --steps and --config"
            )
        if not experiment.data.fingerprint:
            experiment = experiment.on_data(theirs.data.fingerprint)
        for name, value, ours in differences(theirs, experiment):
            raise ConfigError(
                f"--against {reference.path} is a run with {name} = {value!r}, not {ours!r}; leave out --config and "
                f"the proof takes that of the run, or give --{name} {value}"
            )
        proof = cls(cls.shortened(experiment, steps, reference.gradient_steps), folder, device, reference.side)
        proof.done[reference.side, "policy"] = reference
        return proof

    @staticmethod
    def shortened(experiment: Experiment, steps: int, recorded: Iterable[int]) -> Experiment:
        """The first steps of an experiment under the schedule of them all, gradients of some kept, nothing else."""
        values = experiment.model_dump(exclude_none=True)
        values["optimizer"]["decay_steps"] = experiment.optimizer.decay_steps or experiment.train.steps
        values["train"] |= {"steps": steps, "validation_batches": 0}
        values["checkpoint"]["every"] = 0
        values["record"] = {"steps": sorted(recorded)}
        return Experiment.parse(values, source="arguments")

    @property
    def sides(self) -> tuple[str, str]:
        return JAX, REFERENCES.get(self.reference, self.reference)

    @property
    def noisy(self) -> bool:
        """Whether the policy's own noise would hide a mistake: then that of reordered sums is measured as well."""
        return self.experiment.precision.narrow

    @property
    def kinds(self) -> list[str]:
        reordered = self.noisy and self.reference in REFERENCES and self.other_sums is not None
        alone = self.reference not in REFERENCES and self.experiment.precision.compute == "float32"
        hidden = {kind for kind in OTHERS if not alone or (kind == "eps" and not self.experiment.optimizer.has_eps)}
        if not alone or not self.experiment.model.gelu:
            hidden.add("gelu")
        left_out = {*(() if reordered else ("reordered",)), *hidden}
        return [kind for kind in KINDS if kind not in left_out]

    @property
    def other_sums(self) -> dict[str, Any] | None:
        """Fields of `train` by which a step on one device sums in another order; None where no field does."""
        train, model = self.experiment.train, self.experiment.model
        if math.prod(self.experiment.parallel.axes().values()) > 1:
            return {}  # it is the mesh that sums otherwise
        if model.input_kind == "images" or model.balance:
            return None  # other microbatches would be normalized, or balanced, otherwise
        if train.accumulation > 1:
            return {"accumulation": 1}
        parts = next((n for n in range(2, train.batch + 1) if train.batch % n == 0), None)
        return {"accumulation": parts} if parts else None

    @property
    def zero_gradients(self) -> tuple[str, ...]:
        """Suffixes of weights that only rounding moves."""
        return FAMILIES[self.experiment.model.family].zero_gradients

    def needed(self) -> list[tuple[str, str]]:
        """(side, kind) of every run, in the order in which they are made."""
        makes = self.sides if self.reference in REFERENCES else self.sides[:1]
        return [(side, kind) for kind in self.kinds for side in makes if kind != "perturbed" or side == JAX]

    def config(self, kind: str, **more: dict[str, Any]) -> str:
        """The resolved config of a kind of run, as TOML; `more` are fields by section."""
        values = self.experiment.model_dump(exclude_none=True)
        if kind == "reordered":
            more = {**more, "train": self.other_sums or {}}
        scaled = self.experiment.precision.loss_scale and (JAX, "policy") in self.done
        if scaled and KINDS[kind].get("precision") == DOUBLE:
            # In float64 nothing overflows: what it is to be a yardstick for passed over these steps.
            skip = {*self.experiment.train.skip, *self.done[JAX, "policy"].overflown}
            more = {**more, "train": {"skip": sorted(skip)}}
        if kind in OTHERS:
            more = {**more, OTHERS[kind]: {kind: values[OTHERS[kind]][kind] / 10}}
        if kind == "gelu":
            more = {**more, "model": {"gelu": GELU[values["model"]["gelu"]]}}
        for section, fields in [*KINDS[kind].items(), *more.items()]:
            values[section] = {n: x for n, x in values[section].items() if (section, n) not in REPLACED} | fields
        return Experiment.parse(values, source="arguments").to_toml()

    def start(self, init: Path | None = None) -> Path:
        """The weights that all runs start from, as a Hugging Face folder: `init`, or drawn from the seed."""
        if init is not None and (init / "config.json").exists():
            return init
        if init is None:
            init = self.folder / "seed"
            self.train(JAX, self.config("policy"), init, "--precision", "fp32", "--mesh", "1x1", "--steps", "0")
        start = self.folder / "start"
        start.parent.mkdir(parents=True, exist_ok=True)
        plugins = [text for name in self.experiment.plugins or () for text in ("--plugins", name)]
        self.finish("jaxdist.convert", str(init), str(start), "--to", "hf", *plugins)
        return start

    def entry(self, side: str) -> tuple[str, ...]:
        """The module that trains a side, and what its command line begins with."""
        return (TRAIN[side],)

    def train(self, side: str, config: str, path: Path, *arguments: str) -> Run:
        """One run by its command line, from a config file of its own; the same one is not made again."""
        key = (*self.entry(side), config, *arguments)
        if key not in self.known:
            file = self.folder / "configs" / f"{path.name}.toml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(config, encoding="utf-8")
            line = ["--config", str(file), "--device", self.device, "--output", str(path), *arguments]
            self.finish(*self.entry(side), *line)
            self.known[key] = Run(side, path)
        return self.known[key]

    def finish(self, module: str, *arguments: str) -> None:
        """Run a command to its end. Raises ConfigError if it refuses its input or diverges, TrainingError if it fails
        otherwise."""
        done = command(module, *arguments, xla_flags=self.xla_flags)
        if done.returncode:
            _, prefix, message = f"\n{done.stderr.strip()}".rpartition("\nerror: ")
            message = message.strip() or f"ended with {done.returncode}, without a word"
            error = ConfigError if prefix and (done.returncode == 2 or NO_NUMBER.search(message)) else TrainingError
            raise error(f"python -m {module}: {message}")

    def run(self, side: str, kind: str, start: Path) -> Run:
        """One run of one side. Raises ConfigError or TrainingError with its own message when it fails."""
        self.init = start
        init = start
        if kind == "perturbed":
            init = starts.perturbed(start, self.folder / kind)
        elif kind in ("norm_eps", "gelu"):
            init = starts.with_changed_field(start, self.folder / kind, kind)
        path = self.folder / "runs" / f"{side}-{kind}"
        self.done[side, kind] = self.train(side, self.config(kind), path, "--init", str(init))
        return self.done[side, kind]

    def pair(self, kind: str) -> tuple[Run, Run]:
        """Both sides' runs of a kind, which have been made."""
        return self.done[self.sides[0], kind], self.done[self.sides[1], kind]

    @cached_property
    def started(self) -> dict[str, np.ndarray]:
        """The weights that all runs start from, under the names of a record."""
        if self.init is None:
            raise ValueError("a proof whose runs were made elsewhere needs the weights that they start from, as `init`")
        _, parameters = read_hf(self.init)
        return {f"weights/{name}": w for name, w in names.as_torch(parameters).items()}

    # ---- what they show

    def comparisons(self) -> list[Comparison]:
        """Mathematics: both sides on one device. Distribution: each side on the mesh and on one device."""
        jax, reference = self.sides
        found = []
        if (reference, "one") in self.done:
            what = f"{jax} and {reference} on one device"
            found.append(Comparison("mathematics", what, (jax, "one"), (reference, "one")))
        elif self.experiment.precision.compute == "float64":
            found.append(Comparison("mathematics", f"{jax} and {reference}", (jax, "policy"), (reference, "policy")))
        for side in self.sides:
            if (side, "mesh") in self.done and self.done[side, "mesh"].mesh != self.done[side, "one"].mesh:
                what = f"{side} on the mesh and on one device"
                found.append(Comparison("distribution", what, (side, "mesh"), (side, "one")))
        return found

    def mesh_of(self, side: str, kind: str, devices: int) -> dict[str, int]:
        """The mesh that a run of ours is to have; transformers' has the axes of it that split the batch."""
        axes = self.experiment.parallel.model_copy(update=KINDS[kind].get("parallel", {})).axes(devices)
        return axes if side in SIDES else axes | {axis: 1 for axis in axes if axis not in ("data", "fsdp")}

    def elsewhere(self) -> Iterator[Check]:
        """Check that each run used the requested mesh."""
        for side in (side for side in self.sides if side in RUN_BY_PROOF):
            found = {kind: run.mesh for (of, kind), run in self.done.items() if of == side and "mesh" in run.summary}
            asked = {kind: self.mesh_of(side, kind, math.prod(mesh.values())) for kind, mesh in found.items()}
            wrong = [kind for kind in found if found[kind] != asked[kind]]
            if wrong or any(max(mesh.values()) > 1 for mesh in asked.values()):  # else nothing is distributed
                name = f"{side}, mesh matches the request"
                yield Check("distribution", name, len(wrong), 0, ASKED, of=", ".join(wrong))

    @property
    def exact(self) -> bool:
        """Whether the sides are compared in float64."""
        return any(comparison.level == "mathematics" for comparison in self.comparisons())

    @property
    def noise(self) -> levels.Noise:
        return levels.Noise(self.done[JAX, "one"], self.done[JAX, "perturbed"])

    @property
    def bounds(self) -> dict[int, float]:
        """Bounds on gradients, by recorded step: of float64 runs, or of the policy's if theirs has no float64 run."""
        if self.exact:
            return {step: self.noise.most(step) for step in self.done[JAX, "one"].gradient_steps}
        ours, double = self.done[JAX, "policy"], self.done[JAX, "mesh"]
        both = 1 + levels.LIMIT[self.experiment.precision.compute]  # ours, and theirs up to this factor
        kept = {step: (ours.kept("gradient", step), double.kept("gradient", step)) for step in ours.gradient_steps}
        return {step: both * compare.joint_error(*pair) for step, pair in kept.items()}

    @property
    def overflows_by_chance(self) -> int:
        """The first step that overflows on one side alone, if by then one of them does or does not by the order of its
        sums: what comes after is another run. Else 0."""
        differ = levels.scales_differ(*self.pair("policy"))
        kept = [(self.done[side, "policy"], self.done.get((side, "reordered"))) for side in self.sides]
        own = [step for run, other in kept if other for step in levels.scales_differ(run, other)]
        return differ[0] if differ and own and min(own) <= differ[0] else 0

    @property
    def other_gelu(self) -> Run | None:
        """Our float64 run with the other GELU, where it was made."""
        return self.done.get((JAX, "gelu"))

    @property
    def named_gelu(self) -> str:
        """Field and value of the GELU."""
        return f"model.gelu = {GELU[self.experiment.model.gelu]}"

    @property
    def double(self) -> tuple[Run, Run]:
        """The float64 runs on the mesh that the policy is held against; ours alone, where the other side has none."""
        ours = self.done[JAX, "mesh"]
        return ours, self.done.get((self.sides[1], "mesh"), ours)

    def checks(self) -> Iterator[Check]:
        """All levels."""
        yield from self.elsewhere()
        for level, what, a, b in self.comparisons():
            yield from levels.agreement(level, what, self.done[a], self.done[b], self.noise)
        policy = self.pair("policy")
        if not self.overflows_by_chance:
            yield from levels.precision(policy, self.double, self.experiment.precision.compute, self.zero_gradients)
        if self.other_gelu:
            yield from nearness.nearer(policy, self.double[0], self.other_gelu, self.named_gelu, self.zero_gradients)
        for run, run64 in zip(policy, self.double, strict=True):
            yield levels.numbers(run)
            for narrow in digits.narrow(run, run64, self.experiment.precision):
                yield levels.digits(run.side, narrow)
            yield from levels.arithmetic(run, self.experiment.precision.compute)
        if self.measured("memory"):
            yield from levels.memory(*policy, self.experiment)
        for run in policy if self.measured("memory") else policy[:1]:
            if run.side in memory_model.SIDES and not self.scratch.unknown:
                yield from levels.peak(run, self.scratch)
        mesh = policy[0].mesh
        for run in policy if self.measured("collectives") else policy[:1]:
            known = run.side in RUN_BY_PROOF
            asked = self.experiment, self.param_specs, mesh, run.summary.get("platform", "cpu")
            counts = collectives.expected(run.side, *asked) if known else None
            like = run.side if known else JAX if run.summary.get("backend") == "jax" else "torch_ref"
            least = collectives.least(like, *asked)
            if least is not None:
                yield from levels.traffic(run, least, counts, collectives.unknown(like, mesh, self.experiment))

    def measured(self, what: str) -> bool:
        """Whether the reference's run reports `memory` or `collectives`, on the same mesh as ours."""
        ours, theirs = (run.summary for run in self.pair("policy"))
        meshes = [{axis: n for axis, n in s.get("mesh", {"none": 2}).items() if n > 1} for s in (ours, theirs)]
        return theirs.get(what) is not None and meshes[0] == meshes[1]

    def verdict(self) -> Verdict:
        """The verdict on the runs."""
        checks = list(self.checks())
        open_levels, notes = dict(caveats.open_levels(self, checks)), list(caveats.notes(self, checks))
        lacking, decides = caveats.not_compared(self), caveats.decides(self)
        return Verdict(checks, open_levels, notes, memory=self.causes(), not_compared=lacking, decides=decides)

    @property
    def scratch(self) -> Scratch:
        """The closed form of what a step of either side takes beside its state."""
        ours, theirs = self.pair("policy")
        gpu, workspaces = ours.summary.get("platform") == "gpu", theirs.memory.get("workspaces", 0)
        return Scratch(self.experiment, self.param_specs, ours.mesh, gpu, workspaces)

    @property
    def param_specs(self) -> dict[str, ParamSpec]:
        """ParamSpecs of the model, by name."""
        return models.param_specs(models.build(self.experiment.model))

    def causes(self) -> list[Cause]:
        """Causes of each side's peak; none if the reference is another loop, of unknown formulas."""
        memory = {run.side: run.memory for run in self.pair("policy")}
        peaks = self.measured("memory") and all(m.get("peak") for m in memory.values())
        explained = self.sides == memory_model.SIDES and peaks and not self.scratch.unknown
        return self.scratch.causes(memory) if explained else []

    # ---- where they part, and why

    def explained(self, verdict: Verdict, start: Path | None = None) -> Verdict:
        """The verdict with the cause of what fails, where it is recognized.

        With `start`, batches are looked for whose loss under our weights is theirs, for which a run may be made anew.
        """
        evidence = Gathering(self, verdict, start).evidence() if verdict.failed else None
        return replace(verdict, cause=diagnose(evidence) if evidence else None)

    def divergence(self, verdict: Verdict, start: Path) -> Divergence | None:
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
        costly = {check.name for check in verdict.failed if check.level == "precision"}
        if costly:
            steps = [s for s in self.pair("policy")[0].gradient_steps if f"cost to gradients at step {s}" in costly]
            suspects = dict.fromkeys((1, min(steps, default=self.experiment.train.steps)))
            # The first step is the clearest, as noise has not grown yet; what is right in it may go wrong later.
            found = (bisect.search(partial(self.look_at_policy, start), suspect) for suspect in suspects)
            return next(filter(None, found), None)
        return None

    @property
    def unfound(self) -> str:
        """Why the search may have found nothing."""
        if self.reference in REFERENCES:
            return bisect.UNFOUND
        theirs = self.pair("policy")[1]
        kept = ", ".join(map(str, theirs.records)) or "none"
        return (
            f"No tensor that {theirs.side} kept (of steps: {kept}) shows where they differ first; record its first and "
            "last step with all tensors, as jaxdist/config/record.py says, and try again."
        )

    def recorded(self, key: tuple[str, str], steps: list[int], start: Path) -> Run:
        """A run like that of `key`, up to the last of `steps`, of which everything is kept."""
        side, kind = key
        if side not in RUN_BY_PROOF:
            return self.done[key]
        path = self.folder / "bisect" / f"{side}-{kind}-{'-'.join(map(str, steps))}"
        config = self.config(kind, record={"steps": steps, "tensors": "all"}, train={"steps": steps[-1]})
        return self.train(side, config, path, "--init", str(start))

    def look(self, comparison: Comparison, start: Path, steps: list[int]) -> list[Divergence | None]:
        """First difference of two float64 runs in each of `steps`."""
        a, b = (self.recorded(key, steps, start) for key in (comparison.a, comparison.b))
        return [bisect.exact(a, b, s, self.noise.most(s)) for s in steps if s in b.records]

    def look_at_policy(self, start: Path, steps: list[int]) -> list[Divergence | None]:
        """First tensor, in each of `steps`, in which one side loses more than the policy explains."""

        def runs(side: str) -> tuple[Run, Run]:
            double = (side, "mesh") if (side, "mesh") in self.done else (JAX, "mesh")
            return self.recorded((side, "policy"), steps, start), self.recorded(double, steps, start)

        a, b = map(runs, self.sides)
        precision = self.experiment.precision
        limit = levels.LIMIT[precision.compute]
        roundings = levels.ROUNDING[precision.compute], levels.ROUNDING[precision.parameters]
        common = [step for step in steps if step in b[0].records]
        return [bisect.cost(a, b, step, limit, roundings) for step in common]
