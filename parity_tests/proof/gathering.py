"""Evidence that a proof gathers from its runs about the cause of a difference."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parity_tests.proof import levels, nearness
from parity_tests.proof.evidence import Evidence, Rules, Search
from parity_tests.proof.verdict import Verdict
from parity_tests.runs import compare
from parity_tests.runs.run import JAX, RUN_BY_PROOF, Run

if TYPE_CHECKING:
    from parity_tests.proof.proof import Proof

KIND_NAMES = {"one": "one device", "mesh": "the mesh"}


@dataclass(frozen=True)
class Gathering:
    """The runs of `proof` behind a failed `verdict`; with `start`, weights of ours, further runs may be made."""

    proof: "Proof"
    verdict: Verdict
    start: Path | None = None

    def evidence(self) -> Evidence | None:
        """Evidence for the cause, from the first failing pair of float64 runs, or from the policy's runs."""
        proof, verdict = self.proof, self.verdict
        failed = {(check.level, check.about) for check in verdict.failed}
        pairs = (c for c in proof.comparisons() if (c.level, c.what) in failed)
        if comparison := next(pairs, None):
            ours, theirs = comparison.a, comparison.b
            if comparison.level == "distribution":
                ours, theirs = theirs, ours
            bounds = {name: proof.noise.curve(name) for name in compare.FLOOR}
            return self.between(ours, theirs, bounds)
        costly = [check for check in verdict.failed if check.level == "precision"]
        if not costly:
            return None
        ours, theirs = (JAX, "mesh"), (proof.sides[1], "policy")
        bounds = levels.float_bounds(proof.pair("policy")[0], proof.done[ours], proof.experiment.precision.compute)
        found = self.between(ours, theirs, bounds)
        if proof.exact:
            return replace(found, bounds={}, costly=f"in float64 the runs agree, and not in {costly[0].title}")
        return found

    def between(self, ours: tuple[str, str], theirs: tuple[str, str], bounds: dict[str, np.ndarray]) -> Evidence:
        """The evidence of two runs; equal names are distinguished by the kind of run."""
        proof, verdict, start = self.proof, self.verdict, self.start
        a, b = proof.done[ours], proof.done[theirs]
        if a.side == b.side:
            a, b = (Run(f"{run.side} on {KIND_NAMES[kind]}", run.path) for run, (_, kind) in ((a, ours), (b, theirs)))

        def batch(step: int) -> Search:
            if start is None:
                return Search()
            from parity_tests.proof import batches

            losses = a.metrics[step - 1]["loss"], b.metrics[step - 1]["loss"]
            run = proof.recorded(ours, [step], start) if step > 1 else None
            before = proof.started if run is None else run.kept("start", step)
            weights = {name.partition("/")[2]: w for name, w in before.items()}
            return batches.identify(proof.experiment, weights, step, losses, float(bounds["loss"][step - 1]))

        def rule(step: int) -> Rules:
            if start is None:
                return Rules()
            from parity_tests.proof import rules

            weights = {name.partition("/")[2]: w for name, w in proof.started.items()}
            return rules.identify(proof.experiment, weights, step, (a.metrics, b.metrics), bounds)

        other = [
            f"{b.side} is {c.value:.2g} times nearer to our run with {c.about} than to ours, by its {c.of}"
            for c in verdict.failed
            if c.name == nearness.NEARER
        ]
        computed = f"{proof.sides[1]}, {levels.COMPUTED} in "
        narrow = [c.of for c in verdict.failed if c.name.startswith(computed)]
        started = proof.started if proof.init else {}
        rounded = proof.done[JAX, "policy"] if theirs[1] == "policy" and not proof.exact else None
        return Evidence(
            a,
            b,
            bounds,
            started,
            batch,
            rule,
            divergence=verdict.divergence,
            rounded=rounded,
            other_model="".join(other),
            narrow="; ".join(narrow),
            known_start=theirs[0] in RUN_BY_PROOF,
        )
