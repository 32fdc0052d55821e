"""The result of a proof: each check with its value, its bound and the bound's origin, and one word for all."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from parity_tests.expected.memory_causes import Cause
from parity_tests.proof.bisect import Divergence
from parity_tests.proof.causes import Diagnosis

Word = Literal["equivalent", "not_equivalent", "undecided"]
LEVELS = ("mathematics", "distribution", "precision", "memory", "traffic")
# Checks of a level in the order in which a step computes what they compare, by their names.
ORDER = ("starting weights", "learning.rate", "loss", "gradient|grad_norm", "exp_avg|momentum|_var|variance", "")
NEAR = 2.0
NOT_EQUIVALENT = 3  # the exit code of any word but `equivalent`


@dataclass(frozen=True)
class Check:
    """One comparison: it holds where `value` is at most `bound`, a finite one, so that a NaN never does.

    Level, name and `about` are the same in every proof; the other fields hold what was measured.
    """

    level: str
    name: str
    value: float
    bound: float
    why: str
    about: str = ""  # which runs, where a level compares several
    of: str = ""  # of which tensor, operation, step or side the value is
    widest: float = 0.0  # of several values, the closest to whose bounds this is: the widest of those bounds

    @property
    def holds(self) -> bool:
        return self.value <= self.bound < float("inf")

    @property
    def near(self) -> bool:
        """Whether a bound that follows from rounding is met or missed by less than a factor of two."""
        return self.widest > 0 and self.bound / NEAR < self.value < self.bound * NEAR

    @property
    def key(self) -> str:
        """Identity of the check within its level."""
        return f"{self.name}, {self.about}" if self.about else self.name

    @property
    def title(self) -> str:
        name = f"{self.name}: {self.of}" if self.of else self.name
        return f"{name}, {self.about}" if self.about else name


@dataclass(frozen=True)
class Verdict:
    """All checks, and what kept some from being made: `open` names each with its reason.

    `notes` say how far the checks reach, `not_compared` what of the other side's run there was not; `divergence` is the
    first tensor that differs, when that was looked for and found, `cause` its cause, where it is recognized. `memory`
    are the causes of what a step takes beside its state; with the last, UNEXPLAINED, they sum to the measured.
    `decides` says by level which further run would decide where a bound is met or missed by a hair.
    """

    checks: Sequence[Check]
    open: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    divergence: Divergence | None = None
    cause: Diagnosis | None = None
    memory: Sequence[Cause] = ()
    not_compared: Sequence[str] = ()
    decides: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        """The checks that fail, by level, and within one in the order of a step."""
        return sorted((check for check in self.checks if not check.holds), key=place)

    @property
    def word(self) -> Word:
        """One failed check decides. Without one, a check that could not be made leaves the question open."""
        if self.failed:
            return "not_equivalent"
        return "undecided" if self.open or not self.checks else "equivalent"

    @property
    def sentence(self) -> str:
        """The verdict for a person: the cause and the first check that shows it, or what was shown."""
        if failed := self.failed:
            pattern = self.cause.checks if self.cause else ""
            shown = [check for check in failed if re.search(pattern, check.name)] or failed
            first = next((check for check in shown if not check.near), shown[0])
            return " ".join(
                [
                    f"Not equivalent: {self.cause or ''}".rstrip(),
                    f"{len(failed)} of {len(self.checks)} checks fail, first {first.level}: "
                    f"{first.title}: {first.value:.3g}, at most {first.bound:.3g} was allowed.",
                    *([str(self.divergence)] if self.divergence else []),
                    *self.by_a_hair("missed"),
                ]
            )
        if self.word == "undecided":
            return f"Undecided: {'; '.join(f'{name}: {reason}' for name, reason in self.open.items()) or 'no checks'}."
        rest = f" Not compared: {', '.join(self.not_compared)}." if self.not_compared else ""
        near = "".join(f" {sentence}" for sentence in self.by_a_hair("met"))
        return f"Equivalent: all {len(self.checks)} checks hold.{near}{rest}"

    def by_a_hair(self, met: str) -> Iterator[str]:
        """A sentence where the verdict depends on bounds that are met or missed by less than a factor of two, and the
        run that decides it: where all failed checks are that near, or none fails."""
        failed = self.failed
        near = [check for check in failed or self.checks if check.near and check.level in self.decides]
        if near and (not failed or len(near) == len(failed)):
            closest = max(near, key=lambda check: check.value / check.bound)
            yield (
                f"{closest.title}: {closest.value:.3g} where {closest.bound:.3g} is allowed, {met} by less than a "
                f"factor of two: {self.decides[closest.level]} decides it."
            )

    def exit(self) -> None:
        """End the process with 3, unless the runs are equivalent."""
        if self.word != "equivalent":
            sys.exit(NOT_EQUIVALENT)

    def write(self, folder: Path) -> None:
        """verdict.json in `folder`."""
        text = json.dumps(self.as_json(), indent=2) + "\n"
        (folder / "verdict.json").write_text(text, encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """Content of verdict.json; numbers that are not finite are text, as JSON has no such numbers."""
        divergence = asdict(self.divergence) | {"where": self.divergence.where} if self.divergence else None
        return {
            "verdict": self.word,
            "sentence": self.sentence,
            "open": dict(self.open),
            "notes": list(self.notes),
            "not_compared": list(self.not_compared),
            "cause": self.cause and asdict(self.cause),
            "parting": divergence and finite(divergence),
            "memory": [asdict(cause) for cause in self.memory],
            "checks": [finite(asdict(check) | {"holds": check.holds}) for check in self.checks],
        }


def place(check: Check) -> tuple[int, int]:
    """Order of a check: its level, and within it the stage of a step."""
    stage = next(i for i, pattern in enumerate(ORDER) if re.search(pattern, check.name))
    return LEVELS.index(check.level), stage


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with infinities and NaN as text."""
    return {
        key: repr(value) if isinstance(value, float) and not abs(value) < float("inf") else value
        for key, value in values.items()
    }
