"""The proof for a user's own model: a JAX function, a torch module, a key mapping and batches; no config, no family.

    Port(
        jax_loss=lambda parameters, batch: ..., jax_parameters=parameters,
        torch_loss=lambda module, batch: ..., torch_module=module,
        mapping=KeyMapping.load(Path("mapping.toml")), batches=[{"images": ..., "labels": ...}, ...],
    ).prove(Path("runs/port"))

As the end of a script `.main()` takes the folder from the command line, and ends with the exit code of a proof.

Both sides start from JAX's weights, carried over by the mapping, and train on the batches: in float64, where they must
agree to rounding, and in float32, where they may differ by what float32 costs them. Each leaves a run folder; only the
files are compared. Steps are taken by `optimizer`, or by the user's own step.
"""

import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import tomli_w
import torch
from rich.progress import track
from torch import nn

from jaxdist.config import ConfigError, Optimizer, TrainingError, check_finite, exit_codes, write_record
from jaxdist.config.errors import writes_to
from jaxdist.convert.mappings.mapping import LAYER, KeyMapping
from jaxdist.convert.mappings.suggest import Suggestion, suggest
from jaxdist.convert.mappings.trees import flatten, shapes
from jaxdist.runs.display import console, say
from jaxdist.runs.folder import make_new
from parity_tests.port import port_levels
from parity_tests.port.port_levels import Findings, PortRun
from parity_tests.port.sharded import Sharded, ShardedSide
from parity_tests.port.trainers import (
    Batch,
    JaxLoss,
    JaxSide,
    JaxStep,
    Narrow,
    Recipe,
    Side,
    TorchLoss,
    TorchSide,
    TorchStep,
    Values,
    base,
)
from parity_tests.proof import bisect, digits, levels
from parity_tests.proof.bisect import Divergence
from parity_tests.proof.causes import cause_of
from parity_tests.proof.verdict import Verdict
from parity_tests.report import report
from parity_tests.runs import compare

PERTURBED = 4  # roundings of the starting weights where a model computes in one dtype whatever it is given
# The widest bounds of a model that computes in float32 whatever it is given: that costs more, and may hide more.
NARROW = levels.WIDEST | {"mathematics": 1e-3, "distribution": 1e-3}
DECIDES = dict.fromkeys(("mathematics", "distribution"), "a proof of fewer batches") | {
    "precision": "one of other batches"
}
Runs = tuple[PortRun, PortRun]
# (side, dtype, whether the start is perturbed) of every run
RUNS = {
    "jax-float64": ("jax", "float64", False),
    "torch-float64": ("torch", "float64", False),
    "perturbed": ("jax", "float64", True),
    "jax-float32": ("jax", "float32", False),
    "torch-float32": ("torch", "float32", False),
}
ON_MESH = {"mesh-float64": ("mesh", "float64", False), "mesh-float32": ("mesh", "float32", False)}


@dataclass
class Port:
    """A pair of models to compare. `jax_parameters` is any pytree; each batch maps names to arrays; a step takes one
    batch.

    Without a `mapping` it is suggested from names and shapes. Where that leaves names over, or rows unsure,
    `suggest(shapes(parameters), torch_shapes(module)).save(path)` writes the file to edit.

    With `jax_step` and `torch_step`, the user's own, `optimizer` is not used, and the losses, if given, serve to see
    gradients and activations. With `sharded`, a model in jaxdist's own sharding, which is its own `jax_loss`, what one
    device does is compared with its mesh as well. Parts that do not fit together raise ConfigError in `prove`.
    """

    jax_parameters: Any
    torch_module: nn.Module
    mapping: KeyMapping | Suggestion | None
    batches: Sequence[Batch]
    jax_loss: JaxLoss | None = None
    torch_loss: TorchLoss | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    jax_step: JaxStep | None = None
    torch_step: TorchStep | None = None
    sharded: Sharded | None = None

    def __post_init__(self) -> None:
        self.batches = list(self.batches)  # of a generator, which gives them once

    def check(self) -> None:
        """Raises ConfigError where the parts do not fit together."""
        if (self.jax_step is None) != (self.torch_step is None):
            raise ConfigError("jax_step and torch_step belong together; give both, or neither for `optimizer`")
        if self.jax_step is None:
            self.check_optimizer()
        if self.sharded is not None and (self.jax_step is not None or self.jax_loss is not None):
            raise ConfigError("sharded has its own loss and step; leave out jax_loss, jax_step and torch_step")
        if self.sharded is not None and self.torch_loss is None:
            raise ConfigError("torch_loss is missing; give it with sharded")
        if self.jax_step is None and not (self.shows_inside and self.torch_loss):
            raise ConfigError("jax_loss and torch_loss are missing; give both, or the steps of both sides")
        if torch.distributed.is_initialized():
            raise ConfigError(
                "torch.distributed is initialized, and a port is proved on one device; end it by "
                "torch.distributed.destroy_process_group(), or start a plain process"
            )
        if not self.batches or not all(isinstance(batch, Mapping) for batch in self.batches):
            raise ConfigError("batches: give one mapping of names to arrays for each step, and at least one")
        for number, batch in enumerate(self.batches, 1):
            check_batch(number, batch, self.batches[0])
        ours = shapes(self.jax_parameters)
        mapped = {pair.theirs for pair in self.keys.pairs(ours)}
        self.keys.check(ours, torch_shapes(self.torch_module, mapped))
        if self.sharded is not None:
            self.sharded.check(self.start, self.batches, self.optimizer)

    def check_optimizer(self) -> None:
        """Raises ConfigError where both sides' own steps by `optimizer` cannot be compared."""
        if self.optimizer.ema:
            raise ConfigError(f"optimizer.ema = {self.optimizer.ema}: a port compares no averages; leave it out")
        if self.optimizer.depends_on_role:
            steps = "" if self.sharded else ", or give jax_step and torch_step"
            raise ConfigError(
                f"optimizer.name = {self.optimizer.name}: a port declares no parameter roles, which its rule asks for; "
                f"choose another, as adamw{steps}"
            )

    @property
    def shows_inside(self) -> bool:
        """Whether JAX's gradients and activations can be seen."""
        return self.jax_loss is not None or self.sharded is not None

    @property
    def kinds(self) -> dict[str, tuple[str, str, bool]]:
        """The runs to make: name -> (side, dtype, whether its start is perturbed)."""
        return {k: run for k, run in RUNS.items() if k != "jax-float32"} | ON_MESH if self.sharded else RUNS

    @cached_property
    def known(self) -> KeyMapping | Suggestion:
        """The mapping, suggested where none is given."""
        return self.mapping or suggest(shapes(self.jax_parameters), torch_shapes(self.torch_module))

    @property
    def keys(self) -> KeyMapping:
        return self.known.mapping if isinstance(self.known, Suggestion) else self.known

    # ---- runs

    @cached_property
    def start(self) -> dict[str, np.ndarray]:
        """Our parameters as float64, by name."""
        return {n: as_float64(np.asarray(a)) for n, a in flatten(self.jax_parameters).items()}

    def perturbed(self) -> dict[str, np.ndarray]:
        random, size = np.random.default_rng(0), PERTURBED * self.rounding or compare.PERTURBATION

        def off(array: np.ndarray) -> np.ndarray:
            return array * (1 + size * random.standard_normal(array.shape)) if array.dtype == np.float64 else array

        return {name: off(array) for name, array in self.start.items()}

    def jax_side(self, dtype: str, modules: Mapping[str, str] | None, alone: bool = True) -> JaxSide:
        if self.sharded:
            recipe = Recipe[Any, Any](None, self.optimizer, len(self.batches), modules=modules)
            program = self.sharded.program(alone, dtype, recipe.optimizer, recipe.steps, self.batches[0])
            return ShardedSide(self.sharded, program, dtype, self.keys, recipe)
        recipe = Recipe(self.jax_loss, self.optimizer, len(self.batches), self.jax_step, modules)
        return JaxSide(self.jax_parameters, dtype, self.keys, recipe)

    def torch_side(self, dtype: str, modules: Mapping[str, str] | None) -> TorchSide:
        recipe = Recipe(self.torch_loss, self.optimizer, len(self.batches), self.torch_step, modules)
        param_specs = self.sharded.param_specs if self.sharded else {}
        pairs = self.keys.pairs(shapes(self.jax_parameters)) if param_specs else []
        decays = {pair.theirs: param_specs[pair.ours].decays for pair in pairs}
        return TorchSide(self.torch_module, self.keys.to_theirs(self.start), dtype, recipe, decays)

    @cached_property
    def compiled(self) -> dict[tuple[str, str], JaxSide]:
        """JAX on one device and on the mesh, by dtype, compiled once for all runs."""
        wanted = {(name, dtype) for name, dtype, _ in self.kinds.values() if name != "torch"}
        sides = {}
        for name, dtype in sorted(wanted):
            with jax.enable_x64(dtype == "float64"):
                sides[name, dtype] = self.jax_side(dtype, self.modules[0], alone=name == "jax")
        return sides

    def side(self, kind: str) -> Side:
        """One side, ready for its first step; for float64 in JAX, with 64-bit numbers enabled."""
        name, dtype, perturbed = self.kinds[kind]
        if name != "torch":
            return self.compiled[name, dtype].begin(self.perturbed() if perturbed else self.start)
        return self.torch_side(dtype, self.modules[0])

    @cached_property
    def modules(self) -> tuple[dict[str, str], list[str]]:
        """Modules whose outputs both sides show, ours -> theirs, and those of ours of which they do not."""
        with noting("batch 1"):
            with jax.enable_x64(False):
                jax_side = self.jax_side("float32", None).begin(self.start)
                ours = jax_side.seen(self.batches[0])
            theirs = self.torch_side("float32", None).seen(self.batches[0])
        candidates = jax_side.modules if self.shows_inside and self.torch_loss else {}
        found, missed = {}, []
        for path, name in candidates.items():
            here, there = ({n: s for n, s in seen.items() if base(n) == name} for seen in (ours, theirs))
            if here != there:
                missed.append(path)
            elif here:
                found[path] = name
        if candidates:  # layers of a scan, which share one trace, cannot be seen one by one
            stacked = {path: module.theirs for path, module in jax_side.module_pairs.items() if module.stacked}
            if self.sharded is None:
                missed += [path for path, name in stacked.items() if name.replace(LAYER, "0") in theirs]
        return found, missed

    @cached_property
    def narrow(self) -> dict[str, Narrow]:
        """Losses and steps that compute in less than float64 in the float64 runs, and the operation that first does."""
        with jax.enable_x64(True):
            jax_side = self.compiled["jax", "float64"].begin(self.start)
            ours = jax_side.narrow(self.batches[0])
        theirs = self.torch_side("float64", None).narrow(self.batches[0])
        return {f"{side}_{n}": op for side, found in (("jax", ours), ("torch", theirs)) for n, op in found.items()}

    @property
    def rounding(self) -> float:
        """Rounding of the narrowest dtype; 0 where all compute in float64."""
        return max((narrow.rounding for narrow in self.narrow.values()), default=0.0)

    def run(self, kind: str, folder: Path, steps: Sequence[int], until: int | None = None) -> PortRun:
        """Train one side on the batches, of which `steps` are recorded, into a run folder."""
        name, dtype, _ = self.kinds[kind]
        until = until or len(self.batches)
        folder.mkdir(parents=True)
        settings = {"optimizer": self.optimizer.model_dump()} if self.jax_step is None else {}
        config = {"train": {"steps": len(self.batches)}, "precision": {"parameters": dtype}, **settings}
        (folder / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        with jax.enable_x64(dtype == "float64"), (folder / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
            side = self.side(kind)
            for step, batch in enumerate(self.batches[:until], 1):
                with noting(f"batch {step}, in the run {kind}"):
                    before = self.before(side, batch) if step in steps else {}
                    began = time.perf_counter()
                    values = side.step(batch)
                seconds = time.perf_counter() - began
                check_finite(step, f"{kind}, ", **values)
                metrics.write(json.dumps({"step": step, **values, "step_seconds": seconds}) + "\n")
                if step in steps:
                    write_record(folder, step, before | self.after(side, values))
            summary = {
                "backend": "torch" if name == "torch" else "jax",
                "precision": dtype,
                "versions": {"jax": jax.__version__, "torch": torch.__version__, "numpy": np.__version__},
                "parameters": sum(w.size for w in side.weights().values()),
                "devices": 1,
            } | side.measured(self.batches[0])
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return PortRun(name, folder)

    def before(self, side: Side, batch: Batch) -> dict[str, np.ndarray]:
        """Records of a step, before it is taken."""
        fields = {f"batch/{n}": as_float64(np.asarray(a)) for n, a in batch.items()}
        return fields | {f"start/{n}": w for n, w in side.weights().items()} | side.observe(batch)

    def after(self, side: Side, values: Values) -> dict[str, np.ndarray]:
        """Results of a step, in the order in which they arise."""
        record = {f"scalar/{name}": np.asarray(value) for name, value in values.items() if value is not None}
        rate = {"scalar/learning_rate": record.pop("scalar/learning_rate")} if "scalar/learning_rate" in record else {}
        return record | side.moments() | rate | {f"weights/{name}": w for name, w in side.weights().items()}

    # ---- the proof

    def prove(self, folder: Path) -> Verdict:
        """Make the runs in `folder`, which must be new or empty, and judge. Writes verdict.json and report.html there.

        Where the mathematics differ, the first step and tensor that do are found. Raises ConfigError, TrainingError.
        """
        self.check()
        make_new(folder, f"folder {folder}")
        recorded = sorted({1, len(self.batches)})
        runs = {}
        for kind in track(self.kinds, "runs", console=console, disable=not console.is_terminal):
            runs[kind] = self.run(kind, folder / "runs" / kind, recorded)
        ours, perturbed = ("mesh" if self.sharded else "jax"), runs["perturbed"]
        double, single = ((runs[f"{ours}-{dtype}"], runs[f"torch-{dtype}"]) for dtype in ("float64", "float32"))
        compared = {"mathematics": ("jax-float64", "torch-float64")}
        if self.sharded:
            compared["distribution"] = ("jax-float64", "mesh-float64")
        least = compare.K * self.rounding
        findings = {level: Findings(runs[a], runs[b], perturbed, least=least) for level, (a, b) in compared.items()}
        checks = [check for level, found in findings.items() for check in found.agreement(level)]
        still = [f"/{name}" for name in findings["mathematics"].still or ()]
        checks += levels.precision(single, double, "float32", still, self.rounding)
        kept = ((run.side, digits.states(run, exact, "float32")) for run, exact in zip(single, double, strict=True))
        checks += [levels.digits(side, narrow) for side, narrow in kept]
        if self.sharded:
            checks += port_levels.memory(*single)
        checks += port_levels.traffic(*single)
        notes = [*self.notes(), *port_levels.untraced(double[0])]
        undecided = self.too_narrow() or levels.too_wide(checks, NARROW if self.narrow else levels.WIDEST)
        decay = self.optimizer.weight_decay if self.jax_step is None else None
        if reason := findings["mathematics"].hardly_moved(decay):
            undecided.setdefault("mathematics", reason)
        verdict = Verdict(checks, undecided, notes, not_compared=[*self.not_compared()], decides=DECIDES)
        differ = next((level for level in findings if any(c.level == level for c in verdict.failed)), None)
        divergence = self.divergence(folder / "bisection", findings[differ], compared[differ]) if differ else None
        if any(check.level == "precision" for check in verdict.failed) and not differ:
            divergence = self.costing(single, double, recorded)
        if verdict.failed and not divergence:
            verdict = replace(verdict, notes=[*verdict.notes, bisect.UNFOUND])
        verdict = replace(verdict, divergence=divergence, cause=cause_of(divergence) if divergence else None)
        verdict.write(folder)
        devices = str(double[0].summary["devices"])
        facts = {"model": type(self.torch_module).__name__, "steps": str(len(self.batches)), "devices": devices}
        alone = runs["jax-float64"], runs["torch-float64"]
        pairs = {"one": alone, "mesh": double, "policy": single}
        bounds = {step: findings["mathematics"].most(step) for step in recorded}
        report.write(folder / "report.html", verdict, pairs, facts, bounds)
        for line in (verdict.sentence, *verdict.notes):
            say(line)
        return verdict

    def main(self) -> NoReturn:
        """`prove` in the folder that the command line names; ends the process as `python -m parity_tests` does."""

        def command() -> None:
            if {"-h", "--help"} & {*sys.argv[1:]}:
                print(f"usage: {Path(sys.argv[0]).name} FOLDER\n\nFOLDER gets runs, verdict.json and report.html")
                return
            if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
                raise ConfigError("give one argument, the folder for the runs, verdict.json and report.html")
            with writes_to("folder"):
                try:
                    verdict = self.prove(Path(sys.argv[1]))
                except TrainingError as error:  # a run that diverges is bad input of a proof
                    raise ConfigError(str(error)) from None
            verdict.exit()

        exit_codes(command)

    def not_compared(self) -> Iterator[str]:
        """Parts of the user's own steps that can't be seen."""
        if self.jax_step is not None:
            yield from ("the optimizer's moments", "gradient norm", "learning rate")
        if not (self.shows_inside and self.torch_loss):
            yield from ("gradients", "activations")

    def notes(self) -> Iterator[str]:
        """Limits of the checks."""
        if len(self.batches) < levels.FEWEST:
            yield f"The cost of float32 to the loss is not judged: that takes {levels.FEWEST} batches or more."
        if self.sharded:
            yield "On the mesh JAX is compared with itself on one device, torch runs on one device alone."
            if self.sharded.experiment().parallel.axes()["tensor"] > 1:
                yield "Traffic over tensor is not checked: how often activations cross it, only the model knows."
        if not (self.shows_inside and self.torch_loss):
            yield "Gradients and activations are seen where jax_loss and torch_loss are given too."
        for name, operation in self.narrow.items():
            yield (
                f"{name} computes in less than float64 whatever it is given, first by {operation}: the bounds of the "
                f"mathematics are those of {operation.dtype}. Let the model keep the dtype of its input to have more "
                "excluded."
            )
        if self.modules[1]:
            yield (
                f"Outputs of {len(self.modules[1])} modules are not compared, since one side does not show them, or in "
                f"another shape: {', '.join(self.modules[1])}."
            )
        for name, side in (("JAX", self.keys.ours_only), ("torch", self.keys.theirs_only)):
            if side:
                yield f"In {name} alone, and not compared: {', '.join(side)}."
        if isinstance(self.known, Suggestion) and self.known.unsure:
            rows = ", ".join(f"{row.ours} -> {row.theirs}" for row in self.known.unsure)
            yield f"The mapping was suggested, and these rows are unsure: {rows}."

    def too_narrow(self) -> dict[str, str]:
        """Levels that cannot be decided, with the reason, as a side computes in less than float32: by rounding alone
        equal runs differ by more than mistakes do."""
        name, narrow = max(self.narrow.items(), key=lambda item: item[1].rounding, default=("", None))
        if narrow is None or narrow.rounding <= levels.ROUNDING["float32"]:
            return {}
        reason = (
            f"{name} computes in {narrow.dtype} whatever it is given, first by {narrow.operation}, and rounding alone "
            "is more than mistakes are there; let the model keep the dtype of its input, or compute in float32"
        )
        return dict.fromkeys(("mathematics", *["distribution"] * bool(self.sharded), "precision"), reason)

    def divergence(self, folder: Path, findings: Findings, pair: tuple[str, str]) -> Divergence | None:
        """The first tensor of the first step that differs: found in what is recorded, else by bisection of the steps.

        A step that begins with equal weights and differs is the first. Each look makes the float64 runs anew up to a
        step, with that step recorded.
        """
        agrees, differs = 0, len(self.batches)
        found = findings.first_difference(differs)
        known = {1: findings.first_difference(1), differs: found}
        while differs - agrees > 1:
            middle = 1 if agrees == 0 and differs == len(self.batches) else (agrees + differs) // 2
            if middle not in known:
                known[middle] = self.look(folder / str(middle), middle, findings, pair)
            if known[middle] is None:
                agrees = middle
            else:
                differs, found = middle, known[middle]
        return found

    def costing(
        self, single: tuple[PortRun, PortRun], double: tuple[PortRun, PortRun], recorded: Sequence[int]
    ) -> Divergence | None:
        """The first recorded tensor that float32 costs one side far more than the other."""
        ours, theirs = zip(single, double, strict=True)
        limit, rounding = levels.LIMIT["float32"], levels.ROUNDING["float32"]
        looks = (bisect.cost(ours, theirs, step, limit, (rounding, rounding)) for step in recorded)
        return next(filter(None, looks), None)

    def look(self, folder: Path, step: int, findings: Findings, pair: tuple[str, str]) -> Divergence | None:
        a, b, perturbed = (self.run(kind, folder / kind, [step], until=step) for kind in (*pair, "perturbed"))
        return replace(findings, a=a, b=b, perturbed=perturbed).first_difference(step)


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Errors of the user's code keep their traceback, with a note on `what` it was doing; a missing file becomes a
    ConfigError."""
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    except OSError as error:
        raise ConfigError(f"{what}: {error}; it is raised by the losses or steps, which have to find it") from error
    except Exception as error:
        error.add_note(f"This was raised at {what}.")
        raise


def check_batch(number: int, batch: Batch, first: Batch) -> None:
    """Raises ConfigError for other fields than the first batch has, or for what is not an array of finite reals."""
    if batch.keys() != first.keys():
        ours, firsts = (", ".join(map(str, fields)) or "nothing" for fields in (batch, first))
        raise ConfigError(f"batches: batch {number} has {ours}, and batch 1 has {firsts}; give all the same fields")
    for name, array in batch.items():
        if isinstance(array, Mapping | list | tuple):
            raise ConfigError(
                f"batches: {name} is a {type(array).__name__}, no array of numbers; give nested ones flat, and put "
                "them together in jax_loss and torch_loss"
            )
        values = np.asarray(array)
        if not (values.dtype.kind in "iub" or jnp.issubdtype(values.dtype, jnp.floating)):
            raise ConfigError(
                f"batches: {name} of batch {number} is of dtype {values.dtype}; give whole or floating-point numbers, "
                "and leave out what the losses do not need"
            )
        if not np.isfinite(as_float64(values)).all():
            raise ConfigError(f"batches: {name} of batch {number} has NaN or infinite numbers; give finite ones")
        if values.dtype.kind in "iu" and (values != values.astype(np.int32)).any():
            raise ConfigError(f"batches: {name} of batch {number} has whole numbers beyond 32 bits; give smaller ones")


def torch_shapes(module: nn.Module, named: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """name -> shape of a module's state dict: what `suggest` asks for.

    A tensor of several names, as a tied head, counts under those of them that are `named`, else under the first.
    """
    tensors = module.state_dict(keep_vars=True)
    seen, found = set(), {}
    for name in sorted(tensors, key=lambda name: name not in named):
        if name in named or id(tensors[name]) not in seen:
            found[name] = tuple(tensors[name].shape)
        seen.add(id(tensors[name]))
    return found


def as_float64(array: np.ndarray) -> np.ndarray:
    """A floating-point array as float64; others unchanged."""
    return array.astype(np.float64) if array.dtype.kind not in "iub" else array
