"""Limits of a proof's verdict: levels that its runs leave open, and what was not compared."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from parity_tests.expected import collectives
from parity_tests.proof import levels, nearness
from parity_tests.proof.verdict import Check
from parity_tests.runs.run import JAX, REFERENCES, RUN_BY_PROOF, Run

if TYPE_CHECKING:
    from parity_tests.proof.proof import Proof

RECORDED = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # steps of which gradients are compared, and the last one
# Fields whose other value the noise of a float32 run may hide, where that is the other side's only run: field ->
# section. A run of ours with a tenth of the value shows how much it moves.
OTHERS = {"norm_eps": "model", "eps": "optimizer"}
GELU = {"tanh": "exact", "exact": "tanh"}  # model.gelu -> the other, which a loop of float32 may have unseen
NARROW = 1e-5  # what training may make of roundings of float32; the planted mistakes move more
DOUBLE = "README, 'A run of your own loop', says how float32 by name is made float64"


def open_levels(proof: "Proof", checks: Sequence[Check]) -> Iterator[tuple[str, str]]:
    """Levels that the runs cannot decide, with the reason."""
    found = levels.too_wide(checks, levels.WIDEST_NOISY if proof.noisy else levels.WIDEST)
    if proof.exact and levels.judged_until(checks) > 1:  # what rounding hides of later steps, float64 has excluded
        found.pop("precision", None)
    if not proof.exact and not proof.noisy and "precision" not in found:
        decay, still = proof.experiment.optimizer.weight_decay, proof.zero_gradients
        if reason := levels.hardly_moved(proof.pair("policy"), proof.double, proof.started, decay, still):
            found["precision"] = reason
    yield from found.items()
    if step := proof.overflows_by_chance:
        yield (
            "precision",
            f"at step {step} gradients overflow on one side alone, as they do or not by the order of sums alone; "
            "give a smaller --precision.loss_scale or learning rate",
        )
    overflown = max(len(run.overflown) for run in proof.pair("policy"))
    if proof.experiment.train.steps - overflown < levels.FEWEST:
        yield (
            "precision",
            f"{overflown} of {proof.experiment.train.steps} steps overflow, so that no {levels.FEWEST} are left of "
            "which the loss could be judged; prove more steps, or with a smaller --precision.loss_scale",
        )
    if not proof.exact and proof.noisy:
        yield (
            "mathematics",
            f"{proof.sides[1]} ran in {proof.experiment.precision.policy}, whose noise hides a learning rate, eps or "
            "clip that is slightly wrong; give a run of it in fp64 or fp32",
        )
    for (side, kind), run in proof.done.items():
        if run.side in RUN_BY_PROOF and (missing := list(run.lacking(proof.experiment.record.steps))):
            yield f"{side}, {kind}", f"its run lacks {', '.join(missing)}; prove it again"


def decides(proof: "Proof") -> dict[str, str]:
    """The run that would decide, by level, where a bound is met or missed narrowly."""
    steps, seed = proof.experiment.train.steps, proof.experiment.train.seed
    theirs = proof.pair("policy")[1]
    if proof.reference in REFERENCES:
        fewer = f"a proof of fewer steps (--first {max(levels.FEWEST, steps // 2)}), whose rounding has grown less,"
        return {"mathematics": fewer, "distribution": fewer, "precision": f"a proof with --seed {seed + 1}"}
    command = f"python -m parity_tests --against RUN_IN_FP64 --init {proof.init} --output DIR"
    fewer = f"a run of fewer steps (train.steps = {max(levels.FEWEST, steps // 2)}), whose rounding has grown less,"
    if proof.exact:
        return {"mathematics": fewer, "distribution": fewer, "precision": fewer}
    return {"precision": f'a run of {theirs.side} with precision.policy = "fp64" ({DOUBLE}), as `{command}`,'}


def not_compared(proof: "Proof") -> list[str]:
    """Facts that the reference's run did not record, measured on another mesh, or hides in its noise."""
    theirs = proof.pair("policy")[1]
    gradients, running = gradients_lacking(proof), proof.experiment.model.input_kind == "images"
    lacking = {
        "mathematics and distribution in float64": not proof.exact,
        gradients: bool(gradients),
        "loss scale": bool(proof.experiment.precision.loss_scale) and "loss_scale" not in theirs.metrics[0],
        f"distribution of {theirs.side}": proof.exact and proof.reference not in REFERENCES,
        "memory": not proof.measured("memory"),
        "peak of memory": proof.measured("memory") and not theirs.memory.get("peak"),
        "memory of running statistics": running and proof.measured("memory") and "statistics" not in theirs.memory,
        "traffic": not proof.measured("collectives"),
        "number of collectives": proof.measured("collectives") and theirs.side not in RUN_BY_PROOF,
        "dtypes of softmax, norms, rotation and loss": not theirs.summary.get("arithmetic"),
    }
    return [what for what, lacks in lacking.items() if lacks] + hidden(proof)


def hidden(proof: "Proof") -> list[str]:
    """Fields of which float32's noise would hide another value, a tenth of it, and what may be decayed or not."""
    ours, exact, still = proof.done[JAX, "policy"], proof.double[0], proof.zero_gradients
    others = {kind: proof.done[JAX, kind] for kind in OTHERS if (JAX, kind) in proof.done}
    found = [
        f"{OTHERS[kind]}.{kind} (a tenth is within the noise of float32)"
        for kind, other in others.items()
        if levels.within_noise(other, ours, exact, still)
    ]
    if proof.other_gelu and not nearness.furthest_apart(proof.other_gelu, proof.pair("policy"), exact, still):
        found.append(f"{proof.named_gelu} (within the noise of float32)")
    if proof.exact or proof.noisy:
        return found
    decay = proof.experiment.optimizer.weight_decay
    kinds = levels.decay_hidden(proof.pair("policy"), proof.double, proof.started, decay, still)
    return found + [f"weight decay of {kind} (within the noise of float32)" for kind in kinds]


def gradients_lacking(proof: "Proof") -> str:
    """Gradients that are not compared, in words; of what a proof compares a run folder may have kept a few."""
    theirs, steps = proof.pair("policy")[1], proof.experiment.train.steps
    kept = theirs.gradient_steps
    if proof.reference in REFERENCES or {step for step in RECORDED if step < steps} | {steps} <= set(kept):
        return ""
    return f"gradients but of steps {', '.join(map(str, kept))}" if kept else "gradients"


def notes(proof: "Proof", checks: Sequence[Check]) -> Iterator[str]:
    """Limits of a verdict."""
    compared = {comparison.a[0] for comparison in proof.comparisons() if comparison.level == "distribution"}
    own_runs = [side for side in proof.sides if side in RUN_BY_PROOF]
    if proof.exact and (alone := [side for side in own_runs if side not in compared]):
        yield f"distribution: nothing to compare for {' and '.join(alone)}, whose mesh is one device"
    if why := proof.scratch.unknown:
        yield f"memory: no closed form of its peak, {why}"
    if which := collectives.lacking(proof.experiment, proof.pair("policy")[0].mesh):
        yield f"traffic: the closed form of {which} is unknown, so that bytes and collectives are not judged"
    for side in () if which else own_runs:
        if rule := collectives.uncounted(side, proof.experiment, proof.pair("policy")[0].mesh):
            yield f"traffic: the number of {side}'s collectives for {rule} is unknown, so that they are not counted"
    for axis, why in collectives.unknown(proof.sides[1], proof.pair("policy")[0].mesh, proof.experiment).items():
        yield f"traffic: no closed form of {proof.sides[1]}'s bytes over {axis}, {why}"
    for what in ("memory", "collectives"):
        if not proof.measured(what):
            yield f"{what}: not compared, {proof.sides[1]} has no figures for this mesh"
    for run in proof.pair("policy"):
        if proof.noisy and not run.summary.get("arithmetic"):
            yield f"{run.side} does not report the dtypes of softmax, norms, rotation and loss"
    steps, theirs = proof.experiment.train.steps, proof.pair("policy")[1]
    if proof.total_steps and proof.total_steps > steps:
        beyond = "; for the others only the learning rate is compared" if theirs.summary.get("schedule") else ""
        yield f"Steps 1 to {steps} of {proof.total_steps} were run{beyond}."
    if proof.reference not in REFERENCES:
        yield from left_out(proof, theirs)
    failed = [check for check in checks if not check.holds]
    if proof.exact and failed and all(check.level == "mathematics" and check.value < NARROW for check in failed):
        less = f"All differences are below {NARROW:g}, as where a side computes partly in float32"
        yield f"{less}; {DOUBLE}."
    if proof.noisy:
        yield " ".join(noise(proof))
    elif proof.exact and (wide := levels.too_wide(checks).get("precision")):
        until = f"steps 1 to {levels.judged_until(checks)} are judged by it; in later steps {wide}"
        yield f"precision: {until}. Only the float64 levels exclude smaller errors."


def left_out(proof: "Proof", theirs: Run) -> Iterator[str]:
    """Comparisons that an existing run does not allow, since it did not record their tensors."""
    if not proof.exact:
        policy = proof.experiment.precision.policy
        yield f"mathematics, distribution: {theirs.side} not compared, as it ran in {policy} and not in fp64"
    steps = ", ".join(map(str, theirs.gradient_steps))
    kept = f"compared at steps {steps} only, which it recorded" if steps else "not compared, as it recorded none"
    yield f"gradients of {theirs.side}: {kept}"


def noise(proof: "Proof") -> Iterator[str]:
    """Differences that the curves can show above the policy's noise, and those that they can't."""
    policy, name = proof.pair("policy"), proof.experiment.precision.policy
    if "reordered" in proof.kinds:
        moved = levels.reordering(policy, proof.pair("reordered"))
        floors = " and ".join(f"{run.side}'s by {x:.1g}" for run, x in zip(policy, moved, strict=True))
        yield f"{name}: reordering sums changes the loss: {floors}."
    elif proof.reference in REFERENCES:
        yield f"{name}: one sequence on one device is summed in one order only, so the effect of reordering is unknown."
    lost = levels.lost(policy, proof.double)
    costs = " and ".join(f"{x:.1g} on {run.side}" for run, x in zip(policy, lost, strict=True))
    most = levels.DRIFT * max(lost)
    yield (
        f"{name} costs the loss {costs}, and more than {levels.DRIFT:g} times the other's cost is refused. "
        f"So these curves exclude a mistake of one side that moves its loss by more than {most:.1g}; smaller "
        "ones, as a learning rate, eps or clip that is slightly wrong, only the float64 levels exclude."
    )
