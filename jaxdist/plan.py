"""Memory, traffic and time of an experiment on a mesh of named devices, without the devices: `python -m jaxdist.plan
--mesh 64x8`."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from jaxdist.accounting.forms import UPDATE
from jaxdist.command_line.arguments import Parser, add_fields, count, load, load_before_fields, user_path
from jaxdist.command_line.plugins import add_plugins
from jaxdist.config import ConfigError, Experiment, exit_codes
from jaxdist.config.errors import CODES, DoesNotFit, writes_to
from jaxdist.config.hardware import Hardware, hardware, shipped
from jaxdist.planner.compiled import Compiled, compile_plan
from jaxdist.planner.overlap import Overlap
from jaxdist.planner.plans import USABLE, Plan, flags, neighbours, smallest_change
from jaxdist.planner.recommend import reasons, recommend
from jaxdist.planner.time import Time
from jaxdist.runs.display import aside, console, megabytes, microbatches, say
from jaxdist.runs.folder import make

many = partial(count, most=1_000_000)
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "TIB": 2**40, "GIB": 2**30, "MIB": 2**20}
TIMES = {
    "products": "matrix products", "attention": "attention", "moved": "all else that computes",
    "parameters": "parameters and gradients on the links", "activations": "activations on the links",
    "latency": "latency of collectives", "host": "to the host's memory and back",
    "hidden": "overlapped with computation",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Arguments -> a plan, or many -> tables, or with --json one object."""
    a = arguments(sys.argv[1:] if argv is None else argv)
    device = hardware(a.hardware)
    if a.memory:
        device = device.model_copy(update={"memory": a.memory})
    experiment = load(a.config, a.fields)
    if a.output and (missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]):
        raise ConfigError(f"--output {a.output}: draws with {' and '.join(missing)}: pip install 'jaxdist[report]'")
    if a.output:
        make(a.output, f"--output {a.output}")
    with aside(a.json):
        fits, found = (recommended if a.recommend else planned)(experiment, device, a)
    if a.json:
        print(json.dumps(found))
    if not fits:
        sys.exit(CODES[DoesNotFit])


def planned(e: Experiment, device: Hardware, a: Any) -> tuple[bool, dict[str, Any]]:
    """One plan, shown and drawn: whether it may fit, and what --json prints. Raises ConfigError where what is to be
    drawn is unknown."""
    plan = Plan(e, device)
    compiled = compile_plan(e, device) if a.compiled else None
    fits = plan.if_known("fits")
    change = smallest_change(plan) if fits is False else None
    found = printed(plan) | ({"compiled": asdict(compiled)} if compiled else {})
    found["smallest_change"] = flags(change.experiment, e) if change else ""
    lines = [unknown(plan, compiled)] if plan.unknown else []
    found |= {"unknown": plan.unknown} if plan.unknown else {}
    lines += [verdict(plan, change)] if fits is not None else []
    if not a.json:
        show(plan, compiled, lines)
    if a.output:
        draw(a.output, neighbours(plan), lines, found)
    return fits is not False, found


def recommended(e: Experiment, device: Hardware, a: Any) -> tuple[bool, dict[str, Any]]:
    """The fastest plans, shown and drawn: whether any fits, and what --json prints. Raises ConfigError."""
    found: dict[str, Any] = {"hardware": device.name, "devices": a.devices, "fits": True}
    try:
        plans = recommend(e, a.devices, device)
    except DoesNotFit as error:
        say(f"does not fit: {error}")
        return False, found | {"fits": False, "plans": [], "reasons": [str(error)]}
    best, why = plans[: a.top], reasons(plans[0])
    found |= {"plans": [printed(plan) for plan in best], "reasons": why}
    if not a.json:
        show_ranking(best, len(plans), why)
        say(f"to train so, add to the command line: {flags(plans[0].experiment, e)}")
    if a.output:
        draw(a.output, plans, why, found)
    return True, found


def draw(folder: Path, plans: Sequence[Plan], notes: Sequence[str], found: Any) -> None:
    """Write plan.html and plan.json, and say where. Raises TrainingError where the disk refuses."""
    with writes_to(f"--output {folder}"):
        say(f"drawn in {drawn(folder, plans, notes, found)}")


def drawn(folder: Path, plans: Sequence[Plan], notes: Sequence[str], found: Any) -> Path:
    """Write plan.html, and plan.json with what --json prints."""
    from jaxdist.planner import report

    e = plans[0].experiment
    title = f"{e.model.family} with {e.model.layers} layers on {plans[0].devices:,} × {plans[0].hardware.name}"
    page = report.write(folder, plans, title, notes)
    (folder / "plan.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return page


def printed(plan: Plan) -> dict[str, Any]:
    """A plan as --json prints it: bytes of a device, seconds of a step; null what no closed form has."""
    e, time = plan.experiment, plan.if_known("time")
    return {
        "hardware": plan.hardware.name,
        "devices": plan.devices,
        "mesh": plan.mesh,
        "strategy": e.parallel.strategy,
        "sequence": e.parallel.sequence,
        "remat": e.memory.remat,
        "accumulation": e.train.accumulation,
        "precision": e.precision.policy,
        "memory": memory(plan),
        "fits": plan.if_known("fits"),
        "least_bytes": plan.if_known("traffic"),
        "flops_per_token": plan.if_known("flops_per_token"),
        "time": time and vars(time),
        "step_seconds": time and time.step,
        "tokens_per_second": plan.if_known("tokens_per_second"),
        "mfu": plan.if_known("mfu"),
    }


def verdict(plan: Plan, change: Plan | None) -> str:
    """Whether a plan fits, and if not, the smallest `change` by which it would."""
    held, limit = megabytes(plan.memory["peak"]), f"{USABLE:.0%} of {megabytes(plan.hardware.memory)}"
    if plan.fits:
        return f"fits: {held} of {limit}"
    fix = "no single change makes it fit, see --recommend"
    if change:
        devices = f" on {change.devices:,} devices" if change.devices != plan.devices else ""
        fix = f"the smallest change that makes it fit{devices}: {flags(change.experiment, plan.experiment)}"
    return f"does not fit: {held} of {limit}; {fix}"


def unknown(plan: Plan, compiled: Compiled | None) -> str:
    """Closed forms that the family or the optimizer lacks, and where to read the measured numbers."""
    e, forms = plan.experiment, {"footprint": "memory and time", "exchanges": "traffic and time", "flops": "MFU"}
    found = []
    if lacking := ", ".join(f"{form} ({forms[form]})" for form in plan.unknown if form in forms):
        found.append(f"the closed form of family {e.model.family} is unknown: its accounting lacks {lacking}")
    if UPDATE in plan.unknown:
        found.append(
            f"the closed form of optimizer {e.optimizer.name} is unknown: its row lacks traffic (traffic and time)"
        )
    measured = "the compiled step is measured above" if compiled else "--compiled measures the compiled step"
    return "; ".join([*found, measured])


def show(plan: Plan, compiled: Compiled | None, lines: Sequence[str]) -> None:
    """Three tables of what is known, and whether it fits."""
    e = plan.experiment
    say(
        f"{e.model.family}, {' × '.join(f'{a} {n}' for a, n in plan.mesh.items() if n > 1) or 'one device'}, "
        f"{e.parallel.strategy}, {e.precision.policy}, remat {e.memory.remat}, {e.train.batch} rows of the batch in "
        f"{microbatches(e)}, on {plan.devices:,} × {plan.hardware.name}"
    )
    target = plan.hardware.known_as if compiled and compiled.platform == "gpu" else "CPUs"
    held = Table("memory of a device", "closed form", *[f"compiled for {target}"] * bool(compiled))
    for name, size in memory(plan).items():
        if size != 0 or name == "peak":
            cells = compiled_cell(compiled.memory if compiled else None, name)
            held.add_row(name.replace("_", " "), bytes_of(size), *cells)
    console.print(held)
    if compiled and compiled.platform != plan.hardware.platform:
        more = "; jaxdist[cuda12] compiles for NVIDIA GPUs" if plan.hardware.platform == "gpu" else ""
        say(f"CPUs keep attention's scores, and hold 16 bits as 32{more}")
    if sends := traffic(plan, compiled):
        sent = Table("mesh axis", "devices", "sends a step", *["compiled"] * bool(compiled))
        for axis, size in sends.items():
            cells = compiled_cell(compiled.traffic if compiled else None, axis)
            sent.add_row(axis, str(plan.mesh[axis]), bytes_of(size), *cells)
        console.print(sent)
    if compiled and compiled.overlaps:
        show_overlaps(compiled.overlaps)
    if time := plan.if_known("time"):
        show_time(plan, time)
    for line in lines:
        say(line)


def memory(plan: Plan) -> Mapping[str, float | None]:
    """Bytes by category; where the closed form is unknown those of the state alone, and no peak."""
    found: Mapping[str, float | None] = plan.if_known("memory") or plan.state | {"peak": None}
    return found


def traffic(plan: Plan, compiled: Compiled | None) -> Mapping[str, float | None]:
    """Bytes by mesh axis; where the closed form is unknown, the axes over which the compiled step sends."""
    known: Mapping[str, float | None] | None = plan.if_known("traffic")
    return dict.fromkeys(compiled.traffic if compiled else ()) if known is None else known


def bytes_of(size: float | None) -> str:
    """A cell of bytes by a closed form."""
    return "unknown" if size is None else megabytes(size)


def show_time(plan: Plan, time: Time) -> None:
    """Time of a step by part, and the pace."""
    taken = Table("time of a step", "seconds")
    for name, title in TIMES.items():
        if (seconds := getattr(time, name)) > 1e-9:  # less is what rounding leaves
            taken.add_row(title, f"{-seconds if name == 'hidden' else seconds:.4g}")
    taken.add_row("all", f"{time.step:.4g}")
    console.print(taken)
    pace, mfu = plan.tokens_per_second, plan.if_known("mfu")
    share = "MFU unknown" if mfu is None else f"{mfu:.1%} of the data sheet's rate (MFU)"
    say(f"{pace:,.0f} {plan.experiment.model.input_kind}/s, {pace / plan.devices:,.0f} a device, {share}")


def show_overlaps(overlaps: Sequence[Overlap]) -> None:
    """The collectives of a GPU's program by what runs while they are under way."""
    table = Table("collective", "dtype", "in a loop", "how many", "over products", "over other kernels", "alone")
    alike = Counter((o.op, o.dtype, o.looped) for o in overlaps)
    hidden = Counter((o.op, o.dtype, o.looped) for o in overlaps if o.products)
    alone = Counter((o.op, o.dtype, o.looped) for o in overlaps if not o.beside)
    for kind, total in alike.items():
        counts = total, hidden[kind], total - hidden[kind] - alone[kind], alone[kind]
        table.add_row(kind[0], kind[1], "yes" if kind[2] else "", *map(str, counts))
    console.print(table)


def compiled_cell(compiled: Mapping[str, float] | None, name: str) -> list[str]:
    """The cell of what was compiled, where anything was."""
    return [] if compiled is None else [megabytes(compiled[name]) if name in compiled else ""]


def show_ranking(plans: Sequence[Plan], count: int, why: Sequence[str]) -> None:
    """The plans, of `count` that fit, as a table, and why the first is first."""
    names = ("strategy", "remat", "parts", "step, s", "MFU", "memory")
    say(f"the fastest {len(plans)} of {count} that fit; parts are microbatches")
    table = Table("mesh", *(Column(name, no_wrap=True) for name in names))
    for plan in plans:
        e = plan.experiment
        table.add_row(
            e.parallel.mesh.replace(",", ", "), e.parallel.strategy, e.memory.remat, str(e.train.accumulation),
            f"{plan.time.step:.3g}", f"{plan.mfu:.1%}", megabytes(plan.memory["peak"]),
        )  # fmt: skip
    console.print(table)
    for reason in why:
        say(f"- {reason}")


def size_of(text: str) -> float:
    """Bytes, as 80GB or 79GiB."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", text.strip().upper())
    if not parts or parts[2] not in UNITS or not float(parts[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give it as 80GB")
    return float(parts[1]) * UNITS[parts[2]]


def arguments(argv: Sequence[str]) -> Any:
    """The command line; `fields` are those of the config by dotted name. Raises ConfigError."""
    load_before_fields(argv)
    parser = Parser(
        prog="python -m jaxdist.plan",
        usage="%(prog)s [--config PATH|NAME] [--mesh 64x8] [--hardware h100] [--compiled] [--section.field VALUE ...]\n"
        "       %(prog)s --recommend --devices N [--memory 80GB] ...",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", type=user_path, metavar="PATH|NAME", help="a TOML file, or the name of a shipped config"
    )
    parser.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME|FILE",
        help=f"{', '.join(shipped())}, or a TOML file that describes a device (default h100)",
    )
    parser.add_argument("--memory", type=size_of, metavar="80GB", help="memory of a device (default: the hardware's)")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="also compile the step, for the GPU with jaxdist[cuda12], else for CPUs",
    )
    parser.add_argument("--recommend", action="store_true", help="rank the meshes and strategies for --devices N")
    parser.add_argument("--devices", type=many, metavar="N", help="with --recommend: number of devices")
    parser.add_argument(
        "--top", type=many, default=10, metavar="N", help="with --recommend: plans to show (default 10)"
    )
    parser.add_argument(
        "--output", type=user_path, metavar="DIR", help="also write plan.html, with drawings, and plan.json"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; print everything else to stderr")
    add_plugins(parser)
    add_fields(parser)
    options = vars(parser.parse_args(argv))
    own = {name: options.pop(name) for name in (
        "config", "hardware", "memory", "compiled", "recommend", "devices", "top", "output", "json"
    )}  # fmt: skip
    a = argparse.Namespace(**own, fields=options)
    if a.recommend != bool(a.devices):
        raise ConfigError("--recommend and --devices N go together; give both, or --mesh alone")
    if a.recommend and (a.compiled or "parallel.mesh" in options):
        raise ConfigError("--recommend chooses the mesh and compiles nothing; leave --mesh and --compiled out")
    return a


if __name__ == "__main__":
    exit_codes(main)
