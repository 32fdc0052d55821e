"""The schedule of the Hugging Face Trainer, from its arguments or from the learning rates that it logged.

Its scheduler.pt has no rule. training_args.bin names it; without that file the rates show it: of linear, cosine and
constant after a linear warm-up (transformers' `get_scheduler`), the one that fits all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

CLOSE = 1e-6  # relative; rates are logged as float64 or float32
MOST_LOGGED = 200  # rates that are looked at


class Shape(NamedTuple):
    """A share of the peak rate after warm-up, and its inverse: the warm-up that a share shows.

    `share(k, w, steps)`: after k steps, with w steps of warm-up. `warmup(k, r, steps)`: w, of the share r.
    """

    share: Callable[[int, int, int], float]
    warmup: Callable[[int, float, int], float]


def _cosine_warmup(k: int, r: float, steps: int) -> float:
    p = math.acos(min(1.0, max(-1.0, 2 * r - 1))) / math.pi
    return (k - p * steps) / (1 - p) if p < 1 else 0.0


SHAPES = {
    "linear": Shape(lambda k, w, steps: max(0.0, (steps - k) / max(1, steps - w)), lambda k, r, t: t - (t - k) / r),
    "cosine": Shape(
        lambda k, w, steps: (1 + math.cos(math.pi * min(1.0, (k - w) / max(1, steps - w)))) / 2, _cosine_warmup
    ),
    "constant": Shape(lambda k, w, steps: 1.0, lambda k, r, steps: 0.0),
}


def found_schedule(peak: float, steps: int, now: tuple[int, float], logged: Sequence[Any]) -> dict[str, Any] | None:
    """The schedule's fields of an optimizer section, exact from the end of the warm-up on; None where no shape fits, or
    several do. `now`: steps done and the rate of the next; `logged`: the entries of trainer_state.json's log_history.

    Step s of ours, counted from 1, has the rate of theirs after s - 1 steps: so warm-up and end are one step later.
    """
    entries = [(entry.get("step"), entry.get("learning_rate")) for entry in logged if isinstance(entry, Mapping)]
    known = [(k, float(r)) for k, r in entries if isinstance(k, int) and isinstance(r, int | float) and 0 < k <= steps]
    known = known[:: 1 + len(known) // MOST_LOGGED]
    fitting: dict[str, int] = {}
    for late in (0, 1):  # newer versions log the rate of the step just made, older ones that of the next
        rates = [(k, r / peak) for k, r in ((now[0], now[1]), *((k - late, r) for k, r in known))]
        for name, shape in SHAPES.items():
            if name not in fitting and (warmup := _warmup(shape, rates, steps)) is not None:
                fitting[name] = warmup
    if len(fitting) != 1:
        return None
    ((name, warmup),) = fitting.items()
    end = {"decay_steps": steps + 1, "final": 0.0} if name != "constant" else {}
    return {"warmup": warmup + 1, "decay": name, **end}


DECAYS = {
    "linear": "linear", "polynomial": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "cosine": "cosine", "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine",
}  # fmt: skip
USUAL = {"power": 1.0, "num_cycles": 0.5}  # of what transformers' schedules may be given: that of ours
EARLY = "cosine_warmup_with_min_lr"  # its rates are those of one step later


def argued_schedule(
    arguments: Mapping[str, Any], peak: float, steps: int, now: tuple[int, float] | None
) -> tuple[dict[str, Any], str]:
    """The schedule's fields of an optimizer section by the arguments of a Trainer of `steps` steps, and an empty text;
    or no fields, and the reason: another schedule, or a warm-up, which ours does at other rates. Neither where the
    arguments have no schedule, or where the rate is that of another scheduler, which a Trainer may be given.

    `now`: steps done and the rate of the next; None without an optimizer. Formulas: `transformers.optimization`.
    """
    kind, options = arguments.get("lr_scheduler_type"), arguments.get("lr_scheduler_kwargs", {})
    if not kind:
        return {}, ""
    ends = {"min_lr", "min_lr_rate", "lr_end"}
    if kind not in DECAYS or any(key not in ends and value != USUAL.get(key) for key, value in options.items()):
        shown = ", ".join(f"{key} = {value!r:.20}" for key, value in options.items())
        return {}, f"jaxdist has no schedule like its {kind}{f' ({shown})' if shown else ''}"
    decay, later = DECAYS[kind], kind != EARLY
    final = options.get("lr_end", 1e-7) / peak if kind == "polynomial" else 0.0
    if kind.endswith("min_lr"):
        final = options["min_lr_rate"] if options.get("min_lr_rate") is not None else options["min_lr"] / peak
    warmup = _warmup_of(arguments, steps) if kind != "constant" else 0
    fields: dict[str, Any] = {"warmup": warmup + later, "decay": decay}
    fields |= {"decay_steps": steps + later, "final": float(final)} if decay != "constant" else {}
    if now and now[0] < warmup:
        return {}, (
            f"it still warms up, at other rates than jaxdist does; from step {warmup + 1} on its {kind} is "
            f"{in_words(fields)}, for --model and --peak schedule"
        )
    share = SHAPES[decay].share(now[0] + (not later), warmup, steps) if now else 1.0
    other = now and abs(now[1] - peak * (final + (1 - final) * share)) > CLOSE * peak
    return ({} if other else fields), ""


def in_words(fields: Mapping[str, Any]) -> str:
    """Fields of an optimizer section, as messages give them."""
    return ", ".join(f"{name} = {value}" for name, value in fields.items())


def _warmup_of(arguments: Mapping[str, Any], steps: int) -> int:
    """Steps of warm-up, which may be given as a share of all steps."""
    warmup = arguments.get("warmup_steps", 0)
    share = warmup or arguments.get("warmup_ratio", 0)
    return int(min(warmup, steps)) if warmup >= 1 else math.ceil(steps * share)


class Known(NamedTuple):
    """A scheduler of DeepSpeed's after its warm-up: how it decays, the peak and the final share of it by its config
    and the learning rate of the optimizer's, and how many steps earlier its decay begins than its warm-up ends."""

    decay: str
    peak: Callable[[Mapping[str, Any], float], float]
    final: Callable[[Mapping[str, Any], float], float]
    early: int = 0


DEEPSPEED = {
    "WarmupLR": Known("constant", lambda params, base: params.get("warmup_max_lr") or base or 1e-3, lambda *_: 1.0),
    "WarmupDecayLR": Known(
        "linear",
        lambda params, base: params.get("warmup_max_lr", 1e-3),
        lambda params, peak: params.get("warmup_min_lr", 0.0) / peak,
    ),
    "WarmupCosineLR": Known(
        "cosine", lambda params, base: base, lambda params, peak: params.get("cos_min_ratio", 1e-4), early=1
    ),
}


def deepspeed_schedule(settings: Any, base: float, now: tuple[int, int, float]) -> tuple[dict[str, Any], str]:
    """The schedule's fields of an optimizer section by the `scheduler` of DeepSpeed's config, and an empty text; or no
    fields, and why: while it warms up, which ours does at other rates, or where its rate is another.

    `base`: the learning rate of the config's optimizer, 0 without one. `now`: steps done, last_batch_iteration, and the
    rate of the next step. Formulas:
    https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/lr_schedules.py
    """
    settings = settings if isinstance(settings, Mapping) else {}
    kind, params = settings.get("type"), settings.get("params")
    params = params if isinstance(params, Mapping) else {}
    if kind not in DEEPSPEED:
        return {}, f"jaxdist has no schedule like its {kind}" if kind else ""
    (steps, done, rate), known = now, DEEPSPEED[kind]
    later = steps + 1 - done  # step s of ours has the rate of last_batch_iteration = s - later; 2 if none was skipped
    ends, total = max(2, params.get("warmup_num_steps", 1000)), params.get("total_num_steps", 0)
    warmup, end, peak = ends - known.early, total - known.early, float(known.peak(params, base))
    if peak <= 0 or (known.decay != "constant" and not total):
        return {}, f"the config of its {kind} is incomplete"
    final = float(known.final(params, peak))
    fields: dict[str, Any] = {"learning_rate": peak, "warmup": warmup + later, "decay": known.decay}
    fields |= {"decay_steps": end + later, "final": final} if known.decay != "constant" else {}
    shown = in_words(fields)
    if done < ends:
        return {}, (
            f"its {kind} still warms up, at other rates than jaxdist does; from step {ends + later} on it is {shown}, "
            "for --model and --peak schedule"
        )
    share = SHAPES[known.decay].share(done, warmup, end)
    if abs(rate - peak * (final + (1 - final) * share)) > CLOSE * peak:
        return {}, f"its current rate is not that of its {kind}: {shown}"
    return fields, ""


def _warmup(shape: Shape, rates: Sequence[tuple[int, float]], steps: int) -> int | None:
    """The least warm-up with which a shape gives all rates; None where none does, or none is over by now."""
    tried = {0}
    for k, r in rates:
        if r > 0:
            tried |= {round(w) for w in (k / r, shape.warmup(k, r, steps)) if 0 <= w <= steps}
    over = (w for w in sorted(tried) if w <= rates[0][0])
    return next((w for w in over if all(_fits(shape, w, steps, rate) for rate in rates)), None)


def _fits(shape: Shape, w: int, steps: int, rate: tuple[int, float]) -> bool:
    k, r = rate
    share = k / w if k < w else shape.share(k, w, steps)
    return abs(r - share) <= CLOSE * max(share, CLOSE)
