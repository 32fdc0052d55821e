"""The report of a proof: one HTML file without scripts or references, for a screen, a phone and paper."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from markupsafe import Markup, escape

from jaxdist.config import state_kinds
from jaxdist.runs.drawing import pages
from parity_tests.expected.memory_causes import UNEXPLAINED, Cause
from parity_tests.proof.verdict import LEVELS, Check, Verdict
from parity_tests.report import figures
from parity_tests.report.figures import Curve, digits, short
from parity_tests.runs import compare

# The kinds of runs; curves, memory and traffic are those of the first that there is.
KINDS = {
    "policy": "the run’s own precision and mesh",
    "mesh": "float64 on the run’s mesh",
    "one": "float64 on one device",
}
FIELDS = {"loss": ("Loss", "nats per token"), "grad_norm": ("Gradient norm", "before the clip")}
MEMORY = ("parameters", "gradients", "optimizer_state", "temporary", "peak")
HOST = "host"  # of runs that offload
ALLOCATOR = "allocator_peak"  # on GPUs alone
MODULES = ("embed", "positions", "layers", "norm", "lm_head")  # from the tokens to the logits
GRADIENT = "gradient/"
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
SHOWN = 1e-3  # beyond it states of runs in less than float64 are drawn red
LONGEST = 16  # characters of a word that are kept together
TEMPLATE = "report.html.j2"


class Run(Protocol):
    """The part of a `parity_tests.runs.run.Run` that the report reads."""

    @property
    def side(self) -> str: ...
    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def summary(self) -> Mapping[str, Any]: ...
    @property
    def records(self) -> Mapping[int, Mapping[str, np.ndarray]]: ...
    def kept_states(self, kind: str) -> Mapping[str, np.ndarray]: ...


Pair = tuple[Run, Run]


@dataclass(frozen=True)
class Plot:
    """A figure, if there is anything to draw, and the text below it."""

    title: str
    svg: Markup | None
    notes: Sequence[str]


def write(
    file: Path, verdict: Verdict, pairs: Mapping[str, Pair], facts: Mapping[str, str], bounds: Mapping[int, float]
) -> None:
    """Write the report of a verdict on `pairs`, by kind of run; `facts` are rows of the table of the environment.

    `bounds`: what gradients of the runs in the heat map may differ by, by step; elsewhere the contract's.
    """
    environment = pages(Path(__file__).parent)
    environment.filters |= {"short": short, "breakable": breakable, "unbroken": unbroken}
    kind = next((kind for kind in KINDS if kind in pairs), None)
    shown = pairs[kind] if kind else ()
    mapped = [k for k in ("one", "mesh") if k in pairs] or ([kind] if kind else [])
    if len(mapped) == 2 and all(x is y for x, y in zip(pairs["one"], pairs["mesh"], strict=True)):
        mapped.pop()  # the mesh is one device
    page = environment.get_template(TEMPLATE).render(
        verdict=verdict,
        levels=[level(name, verdict) for name in dict.fromkeys([*LEVELS, *(c.level for c in verdict.checks)])],
        kind=KINDS[kind] if kind else None,
        curves=[curves(field, kind, pairs) for field in FIELDS] if kind else [],
        differs=list(differs(verdict)),
        heat=[heat(k, pairs[k], bounds) for k in mapped],
        memory=memory(pairs[kind]) if kind else None,
        causes=causes(verdict.memory),
        traffic=traffic(shown),
        facts=facts,
        sides=[run.side for run in shown],
        environment=environment_rows(shown),
    )
    file.write_text(page, encoding="utf-8")


def breakable(name: str) -> Markup:
    """A tensor's name, or a path, that a narrow column may break between its parts, and within very long ones."""
    parts = re.findall(rf"\s*[^/._\s]{{1,{LONGEST}}}[/._]?|\s+|[/._]", name)
    return Markup("<wbr>").join(parts)


def unbroken(text: str) -> Markup:
    """A text whose numbers are not broken after the hyphen of their exponent."""
    return Markup(re.sub(r"\d\S*e-\d+", r"<span>\g<0></span>", str(escape(text))))


def level(name: str, verdict: Verdict) -> dict[str, Any]:
    """State of a level, and its checks, failed ones first, grouped by reason."""
    checks = sorted((check for check in verdict.checks if check.level == name), key=lambda check: check.holds)
    groups: dict[tuple[bool, str], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.holds, check.why), []).append(check)
    failed = sum(not check.holds for check in checks)
    if failed:
        state, words = "fails", f"{failed} of {len(checks)} {'fails' if failed == 1 else 'fail'}"
    elif checks and name not in verdict.open:
        state, words = "holds", "holds" if len(checks) == 1 else f"all {len(checks)} hold"
        if name in verdict.not_compared:  # these are of one side alone
            state, words = "open", f"{words}, not compared"
    else:
        state, words = "open", "undecided" if name in verdict.open else "not checked"
    return {"name": name, "state": state, "words": words, "groups": groups.values()}


def listed(steps: Iterable[int]) -> str:
    """Steps in words, the first eight by number: "step 3", "steps 1, 2 and 3", "steps 1, 2, ... and 12 more"."""
    numbers = [str(step) for step in steps]
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if len(numbers) > 9:
        numbers = [*numbers[:8], f"{len(numbers) - 8} more"]
    return f"steps {', '.join(numbers[:-1])} and {numbers[-1]}"


def numbers(run: Run, field: str) -> list[dict[str, Any]]:
    """Each step of a run once, with one field alone: NaN where it is missing."""
    values = {record["step"]: record.get(field) for record in run.metrics}
    return [{"step": step, field: np.nan if value is None else value} for step, value in sorted(values.items())]


def curves(field: str, kind: str, pairs: Mapping[str, Pair]) -> Plot:
    """A field of metrics.jsonl on both sides, and their difference over the steps that all runs have."""
    runs, title, unit = pairs[kind], *FIELDS[field]
    judges = pairs.get("mesh", ()) if (kind, field) == ("policy", "loss") else ()
    all_steps = [numbers(run, field) for run in (*runs, *judges)]
    shared = set.intersection(*({record["step"] for record in records} for records in all_steps))
    cut = [[record for record in records if record["step"] in shared] for records in all_steps]
    steps = [record["step"] for record in cut[0]]
    between = compare.curve(cut[0], cut[1], field)
    bound, why = _bound(field, in_float64(kind, runs), cut)
    sides = [Curve(run.side, *_columns(records, field)) for run, records in zip(runs, all_steps, strict=False)]
    names = [run.side for run in runs] + [f"{run.side} in float64" for run in judges]
    lengths = dict(zip(names, map(len, all_steps), strict=True))
    notes = [
        *_largest(steps, between, bound),
        f"Bound: {why}.",
        *_equal(steps, between),
        *_gaps(sides),
        *_uneven(lengths, len(steps)),
    ]
    label = f"{title} per step of {names[0]} and {names[1]}, and their relative difference. {notes[0]}"
    return Plot(title, figures.curves(field, label, unit, sides, Curve("", steps, between), bound), notes)


def in_float64(kind: str, runs: Pair) -> bool:
    """Whether runs are of those that have to agree to rounding."""
    return kind != "policy" or runs[0].summary.get("precision") == "fp64"


def _bound(field: str, exact: bool, runs: Sequence[compare.Records]) -> tuple[np.ndarray | None, str]:
    """Bounds on the difference of the two sides' `runs`, derived from their float64 runs if there are any, and the
    reasons."""
    floor = compare.FLOOR[field]
    if exact:
        return np.full(len(runs[0]), floor), f"{short(floor)}, in float64"
    if len(runs) == 4:
        a, b, a64, b64 = runs
        until = f"{compare.K} × the most that both sides lost until then against their own float64 runs on the mesh"
        drawn = "drawn for the eye: two right float64 runs keep the sides within it, judged is what either side loses"
        return compare.derived_bound(a, a64, b, b64, field), f"{until}, at least {short(floor)}; {drawn}"
    if field == "loss":
        return None, "none here, as there are no float64 runs of both sides to derive it from; see the checks"
    return None, "none here, in this precision; see the checks"


def _columns(records: Sequence[Mapping[str, Any]], field: str) -> tuple[list[int], np.ndarray]:
    return [record["step"] for record in records], np.array([record[field] for record in records], np.float64)


def _largest(steps: Sequence[int], between: np.ndarray, bound: np.ndarray | None) -> list[str]:
    """The step closest to its bound, or with the largest difference where there is none; and all not within it."""
    finite = np.flatnonzero(np.isfinite(between)).tolist()
    if not finite:
        return ["There is no step at which both runs have a number to compare."]
    if bound is None or not np.isfinite(bound[finite]).any():
        worst = max(finite, key=lambda i: between[i])
        return [f"Largest relative difference {short(between[worst])}, at step {steps[worst]}."]
    worst = max((i for i in finite if np.isfinite(bound[i])), key=lambda i: between[i] / bound[i])
    near = (
        f"Closest to its bound at step {steps[worst]}: {short(between[worst])}, where {short(bound[worst])} is allowed."
    )
    beyond = [step for step, holds in zip(steps, between <= bound, strict=True) if not holds]
    return [near, f"Not within the bound at {listed(beyond)}."] if beyond else [near]


def _equal(steps: Sequence[int], between: np.ndarray) -> list[str]:
    equal = [step for step, difference in zip(steps, between, strict=True) if difference == 0]
    return [f"Equal to the last bit at {listed(equal)}: on the lower edge."] if equal else []


def _gaps(sides: Sequence[Curve]) -> list[str]:
    notes = []
    for side in sides:
        gaps = [i for i, value in enumerate(side.values) if not np.isfinite(value)]
        if gaps:
            kinds = ", ".join(dict.fromkeys(short(side.values[i]) for i in gaps))
            notes.append(f"{side.side} has no finite number at {listed(side.steps[i] for i in gaps)} ({kinds}): a gap.")
    return notes


def _uneven(lengths: Mapping[str, int], shared: int) -> list[str]:
    if all(length == shared for length in lengths.values()):
        return []
    has = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return [f"The runs are of unequal length ({has} steps): the difference covers the {shared} that all have."]


def differs(verdict: Verdict) -> Iterator[str]:
    """Differences of the runs, in words: the cause, the first tensor, and the first check of each level that fails."""
    if not verdict.failed:
        return
    if verdict.cause:
        yield f"Cause: {verdict.cause}"
    if verdict.divergence:
        yield str(verdict.divergence)
    firsts = {check.level: check for check in reversed(verdict.failed)}
    for level in (level for level in LEVELS if level in firsts):
        check = firsts[level]
        yield f"{level.capitalize()}: {check.title}: {short(check.value)}, where {short(check.bound)} is allowed."


def layer_of(name: str) -> str:
    """The layer that a recorded tensor, as a gradient, belongs to: embed, layers.0, norm, lm_head."""
    first, *rest = name.partition("/")[2].split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first


def layer_key(layer: str) -> tuple[int, int, str]:
    """The key that sorts layers as a token meets them, by number and not by text."""
    first, _, number = layer.partition(".")
    return MODULES.index(first) if first in MODULES else len(MODULES), int(number or 0), layer


def layer_errors(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], kind: str = GRADIENT) -> dict[str, float]:
    """Relative error of each layer's gradients, or tensors of another kind, as one vector; infinite where the two sides
    have others.

    As one vector, because a tensor whose true gradient is zero (GPT-2's key bias) is rounding alone by itself.
    """
    names = defaultdict(list)
    for name in sorted(a.keys() | b.keys()):
        if name.startswith(kind):
            names[layer_of(name)].append(name)
    errors = {}
    for layer, tensors in names.items():
        same = all(name in a and name in b and a[name].shape == b[name].shape for name in tensors)
        flat = [np.concatenate([side[name].ravel() for name in tensors]) for side in (a, b)] if same else []
        errors[layer] = compare.relative(*flat) if same else np.inf
    return errors


def heat(kind: str, runs: Pair, bounds: Mapping[int, float]) -> Plot:
    """Each layer's error at each step that both sides recorded; of final states where they recorded no gradients."""
    a, b = (run.records for run in runs)
    title = f"Gradients by layer, {KINDS[kind]}"
    steps = sorted(a.keys() & b.keys())
    columns = [layer_errors(a[step], b[step]) for step in steps]
    rows = sorted({layer for column in columns for layer in column}, key=layer_key)
    if not rows:
        return final(kind, runs)
    errors = np.array([[column.get(layer, np.inf) for column in columns] for layer in rows])
    limits = np.array([bounds.get(step, compare.STATE) for step in steps])
    i, j = np.unravel_index((errors / limits).argmax(), errors.shape)
    error, limit = errors[i, j].item(), limits[j].item()
    notes = [
        f"Closest to its bound: {short(error)} in {rows[i]} at step {steps[j]}, where {short(limit)} is allowed.",
        "Relative error ‖a − b‖ / ‖b‖ of all gradients of a layer as one vector.",
    ]
    if not in_float64(kind, runs):
        notes.append("The colours are only a guide: the levels list the checks and their bounds.")
    if not np.isfinite(errors).all():
        notes.append("∞: the two sides cannot be compared there (a NaN, another shape or a missing tensor).")
    if alone := sorted(a.keys() ^ b.keys()):
        notes.append(f"Recorded on one side alone: {listed(alone)}.")
    label = f"Heat map of the relative error of each layer's gradients over steps, {KINDS[kind]}. {notes[0]}"
    return Plot(title, figures.heat(f"heat-{kind}", label, rows, steps, errors, limits), notes)


def final(kind: str, runs: Pair) -> Plot:
    """Each layer's error in the final weights and in what the optimizer keeps, as far as both sides have them."""
    a, b = runs
    kinds = {k: (a.kept_states(k), b.kept_states(k)) for k in ("weights", *state_kinds())}
    columns = {k: layer_errors(x, y, f"{k}/") for k, (x, y) in kinds.items() if x and y}
    rows = sorted({layer for column in columns.values() for layer in column}, key=layer_key)
    missing = "No gradients were recorded on both sides."
    if not rows:
        return Plot(f"Gradients by layer, {KINDS[kind]}", None, [missing])
    errors = np.array([[column.get(layer, np.inf) for column in columns.values()] for layer in rows])
    limits = np.full(len(columns), compare.STATE if in_float64(kind, runs) else SHOWN)
    i, j = np.unravel_index(errors.argmax(), errors.shape)
    notes = [
        f"The largest: {short(errors[i, j].item())} in {list(columns)[j].replace('_', ' ')} of {rows[i]}.",
        f"{missing} These are relative errors ‖a − b‖ / ‖b‖ of all that a layer has at the end, as one vector.",
    ]
    if not in_float64(kind, runs):
        notes.append("The colours are only a guide: the levels list the checks and their bounds.")
    title = f"Final states by layer, {KINDS[kind]}"
    label = f"Heat map of the relative error of each layer's final states, {KINDS[kind]}. {notes[0]}"
    names = [name.replace("_", " ") for name in columns]
    return Plot(title, figures.heat(f"heat-{kind}", label, rows, names, errors, limits), notes)


def memory(runs: Pair) -> Plot:
    """Bytes on the fullest device by category, in one unit."""
    found = [run.summary.get("memory") or {} for run in runs]
    categories = [*MEMORY, *(more for more in (HOST, ALLOCATOR) if any(side.get(more) for side in found))]
    rows = {category.replace("_", " "): [side.get(category) for side in found] for category in categories}
    unit = unit_of(value for values in rows.values() for value in values)
    scaled = {name: [None if v is None else v / UNITS[unit] for v in values] for name, values in rows.items()}
    sides = [run.side for run in runs]
    label = f"Memory on the fullest device by category in {unit}, {sides[0]} and {sides[1]}. " + "; ".join(
        f"{name} {' and '.join('not reported' if v is None else digits(v) for v in values)}"
        for name, values in scaled.items()
    )
    notes = [
        "On the fullest device. The peak is reached within a step; temporary is the memory of a step beyond its state."
    ]
    if HOST in categories:
        notes.append(
            "Host is the part of parameters and optimizer state in host memory, which the peak does not include."
        )
    if ALLOCATOR in categories:
        notes.append(
            "On a GPU XLA’s peak is the compiler’s, shown with that of its allocator; torch’s is its allocator’s."
        )
    notes += [f"{side}: memory not reported." for side, values in zip(sides, found, strict=True) if not values]
    return Plot("Memory", figures.bars("memory", label, sides, scaled, unit), notes)


def causes(found: Sequence[Cause]) -> dict[str, Any]:
    """The table of what a step takes beside its state: rows by cause, their sum, what was measured, and the rest."""
    rest = [cause for cause in found if cause.name == UNEXPLAINED]
    named = [cause for cause in found if cause.name != UNEXPLAINED]
    unit = unit_of(value for cause in found for value in (cause.jax, cause.torch))

    def row(name: str, causes: Sequence[Cause]) -> tuple[str, list[str]]:
        return name, [
            _bytes(sum(column) / UNITS[unit]) for column in zip(*((c.jax, c.torch) for c in causes), strict=True)
        ]

    named.sort(key=lambda cause: -max(cause.jax, cause.torch))
    ends = [row("closed form", named), row("measured", found), row(UNEXPLAINED, rest)] if rest else []
    return {"rows": [row(cause.name, [cause]) for cause in named], "ends": ends, "unit": unit}


def _bytes(value: float) -> str:
    """A dash for nothing, and a minus for what a closed form has too much."""
    return "–" if not value else f"−{digits(-value)}" if value < 0 else digits(value)


def unit_of(values: Iterable[float | None]) -> str:
    """The largest unit that the largest value fills."""
    most = max((value for value in values if value is not None), default=0)
    return next((unit for unit, size in UNITS.items() if most >= size), "B")


def traffic(runs: Sequence[Run]) -> dict[str, Any]:
    """Each side's collectives by mesh axis, and what each axis carries next to the least that the strategy must send.

    `sides` holds name, collectives by axis (None where not reported) and bytes by axis; `axes` the rows of the table of
    axes, None where neither side says the least.
    """
    least = next((run.summary["least_bytes"] for run in runs if "least_bytes" in run.summary), None)
    sides = []
    for run in runs:
        collectives = run.summary.get("collectives")
        axes = None if collectives is None else by_axis(collectives, least or ())
        sent = {axis: sum(collective["bytes"] for collective in rows) for axis, rows in (axes or {}).items()}
        sides.append((run.side, axes, sent))
    unit = unit_of([*(least or {}).values(), *(size for *_, sent in sides for size in sent.values())])
    table = None if least is None else {
        axis: [(name, *_cells(sent.get(axis), smallest, unit)) for name, _, sent in sides]
        for axis, smallest in least.items()
    }  # fmt: skip
    return {"sides": sides, "axes": table, "unit": unit}


def by_axis(collectives: Iterable[Mapping[str, Any]], axes: Iterable[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Collectives by the axis that they are counted under; `axes` come first, also where nothing is sent."""
    groups: dict[str, list[Mapping[str, Any]]] = {axis: [] for axis in axes}
    for collective in collectives:
        groups.setdefault(compare.billed(collective["axis"]), []).append(collective)
    return groups


def _cells(sent: float | None, least: float, unit: str) -> tuple[str, str, str]:
    """Sent, least and their ratio."""
    known = ("–", "–") if sent is None else (digits(sent / UNITS[unit]), f"{sent / least:.3f}")
    return known[0], digits(least / UNITS[unit]), known[1]


def environment_rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Environment and settings of each side's run: name -> one cell per side, a dash if it is not recorded."""
    keys = ("devices", "mesh", "strategy", "precision", "parameters", "tokens_per_second")
    rows: dict[str, list[str]] = {key.replace("_", " "): [_cell(run.summary.get(key)) for run in runs] for key in keys}
    versions = [run.summary.get("versions") or {} for run in runs]
    packages = dict.fromkeys(package for side in versions for package in side)
    return rows | {package: [_cell(side.get(package)) for side in versions] for package in packages}


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return " × ".join(f"{axis} {size}" for axis, size in value.items())
    return "–" if value is None else f"{value:,.0f}" if isinstance(value, int | float) else str(value)
