"""Cost of a policy on either side, and differences of float64 runs: chance or mistake.

Runs are made up here.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jaxdist.config import Optimizer
from jaxdist.config.registry import FAMILIES
from parity_tests.proof import levels
from parity_tests.proof.digits import states
from parity_tests.proof.levels import DRIFT, FEWEST, LIMIT, WIDEST, WIDEST_NOISY
from parity_tests.proof.verdict import Check
from parity_tests.runs import compare

TRUE = np.random.default_rng(0).standard_normal(4000)
RATE = 0.1


@dataclass
class StubRun:
    """A run whose curves, and vectors of another draw, have these relative errors."""

    loss: float = 0.0
    vectors: dict[str, float] = field(default_factory=dict)
    draw: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    steps: int = 5
    side: str = "made"
    gradient_steps: tuple[int, ...] = (1,)
    overflown: frozenset[int] = frozenset()
    summary: dict[str, Any] = field(default_factory=dict)
    state_kinds: tuple[str, ...] = ("weights", "exp_avg", "exp_avg_sq")
    zero_gradients: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        curves = {"loss": 3 * (1 + self.loss), "grad_norm": 2 * (1 + self.grad_norm)}
        curves["learning_rate"] = RATE * (1 + self.learning_rate)
        return [{"step": step, **curves} for step in range(1, self.steps + 1)]

    def vector(self, kind: str) -> dict[str, np.ndarray]:
        noise = np.random.default_rng(self.draw + 1).standard_normal(TRUE.size)
        return {f"{kind}/w": TRUE + self.vectors.get(kind, 0.0) * noise}

    def kept(self, kind: str, _: int) -> dict[str, np.ndarray]:
        return self.vector(kind)

    def kept_states(self, kind: str) -> dict[str, np.ndarray]:
        return self.vector(kind)


NOISE = dict.fromkeys(("gradient", "weights", "exp_avg", "exp_avg_sq"), 1e-3)
NAMES = {
    "gradient": "cost to gradients at step 1",
    "weights": "cost to weights at the end",
    "exp_avg": "cost to exp_avg at the end",
    "exp_avg_sq": "cost to exp_avg_sq at the end",
}


def judged(a: StubRun, b: StubRun, compute: str = "bfloat16", alone: bool = False) -> list[Check]:
    """Checks of two runs under a policy; `alone`: the second has no float64 run of its own."""
    a64, b64 = (StubRun(steps=run.steps) for run in (a, b))
    policy: Any = (a, b)
    double: Any = (a64, a64 if alone else b64)
    return list(levels.precision(policy, double, compute))


def failed(*runs: Any, **options: Any) -> set[str]:
    return {check.name for check in judged(*runs, **options) if not check.holds}


def test_a_loss_off_by_chance_passes() -> None:
    """The largest ratio of costs was 12.6 in 312 pairs of equal runs in each precision."""
    assert not failed(StubRun(1e-3, NOISE, draw=0), StubRun(1e-3 / 12.6, NOISE, draw=1))
    assert not failed(StubRun(1e-3, NOISE, draw=0), StubRun(1e-3, NOISE, draw=1))
    assert not failed(StubRun(1e-7, NOISE, draw=0), StubRun(0.0, NOISE, draw=1))  # exact by chance


def test_a_loss_off_by_more_than_chance_fails() -> None:
    assert failed(StubRun(1e-1, NOISE, draw=0), StubRun(0.9e-1 / DRIFT, NOISE, draw=1)) == {"cost to loss"}
    assert failed(StubRun(1e-3, NOISE, draw=0), StubRun(0.0, NOISE, draw=1)) == {"cost to loss"}
    assert failed(StubRun(1e-3, NOISE, draw=0), StubRun(np.nan, NOISE, draw=1)) == {"cost to loss"}


def test_chance_goes_so_far_once_in_10_000_times() -> None:
    from scipy import stats  # imports for half a second, for this alone

    assert 0.9e-4 <= 2 * stats.f.sf(DRIFT**2, 3, 3) <= 1.1e-4
    # Over fewer steps chance ranges further, so nothing is judged.
    few = {
        check.name for check in judged(StubRun(1e-1, NOISE, steps=FEWEST - 1), StubRun(1e-7, NOISE, steps=FEWEST - 1))
    }
    assert few == {*NAMES.values(), "made, learning_rate"}


@pytest.mark.parametrize("kind", NOISE)
def test_a_vector_has_less_of_chance(kind: str) -> None:
    right = StubRun(1e-3, NOISE, draw=0)

    def off(times: float) -> StubRun:
        return StubRun(1e-3, NOISE | {kind: times * NOISE[kind]}, draw=1, side="wrong")

    drifts = kind in ("exp_avg", "exp_avg_sq")  # means of later gradients; equal runs reached a ratio of 6.6
    limit = DRIFT if drifts else LIMIT["bfloat16"]
    assert not failed(right, off(6.6 if drifts else 1.8)) and failed(right, off(1.1 * limit)) == {NAMES[kind]}
    assert not failed(right, off(15), "float32") and failed(right, off(1.1 * DRIFT), "float32") == {NAMES[kind]}
    (check,) = (check for check in judged(right, off(100)) if check.name == NAMES[kind])
    assert check.of == "wrong" and check.title == f"{NAMES[kind]}: wrong" and check.value == pytest.approx(100, rel=0.1)


def test_sides_that_lose_alike_may_be_far_apart() -> None:
    """A deep model in bfloat16: each side is off by a twentieth, and further from the other."""
    vectors = dict.fromkeys(NOISE, 0.05)
    assert not failed(StubRun(1e-3, vectors, draw=0), StubRun(1e-3, vectors, draw=1))


def test_float64_has_no_policy() -> None:
    """Training may amplify rounding beyond the contract's 1e-12; the level of mathematics derives that bound."""
    one: Any = StubRun(1e-9)
    other: Any = StubRun()
    assert not list(levels.precision((one, other), (one, other), "float64"))


# ---- everything that a run keeps


OURS = StubRun(1e-6, NOISE, grad_norm=1e-6, learning_rate=1e-8)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"loss": 6e-5}, "cost to loss"),
        ({"grad_norm": -0.5}, "cost to grad_norm"),  # the norm after clipping
        ({"learning_rate": 1e-6}, "wrong, learning_rate"),
        ({"vectors": OURS.vectors | {"exp_avg_sq": 0.1}}, "cost to exp_avg_sq at the end"),
        ({"vectors": OURS.vectors | {"gradient": 0.1}}, "cost to gradients at step 1"),
        ({"loss": np.nan}, "cost to loss"),
    ],
)
def test_all_that_a_run_keeps_is_judged(wrong: dict[str, Any], name: str, alone: bool) -> None:
    theirs = replace(OURS, draw=1, side="wrong", **wrong)
    assert failed(OURS, theirs, "float32", alone=alone) == {name}
    if not alone:
        assert failed(theirs, OURS, "float32") == {name}
    assert {check.name for check in judged(OURS, theirs, "float32", alone=alone)} == {
        *NAMES.values(), "cost to loss", "cost to grad_norm", "made, learning_rate", "wrong, learning_rate",
    }  # fmt: skip


def test_an_overflow_at_the_first_step_hides_no_norm() -> None:
    """The scale starts too high; the norms of later steps are judged."""

    @dataclass
    class Scaled(StubRun):
        overflown: frozenset[int] = frozenset({1})

        @property
        def metrics(self) -> list[dict[str, Any]]:
            first, *others = super().metrics
            return [first | {"grad_norm": None}, *others]

    right, wrong = (Scaled(1e-3, NOISE, draw=i, grad_norm=x) for i, x in enumerate((1e-3, 9.0)))
    assert failed(right, wrong) == {"cost to grad_norm"}
    few = {check.name for check in judged(replace(right, steps=FEWEST), replace(wrong, steps=FEWEST))}
    assert few == {*NAMES.values(), "made, learning_rate"}


def test_a_run_by_itself_may_lose_less() -> None:
    """A run without a float64 run may lose less than ours; with one, either side may be the one that loses too much."""
    less = StubRun(vectors=dict.fromkeys(OURS.vectors, 1e-5), draw=1)
    for right in (replace(OURS, draw=1), less):
        assert not failed(OURS, right, "float32", alone=True)
    assert NAMES["weights"] in failed(OURS, less, "float32")


def test_weights_that_rounding_moves_are_no_yardstick() -> None:
    """A key bias off by its own size on both sides hides no other weights, and is itself compared."""

    @dataclass
    class Biased(StubRun):
        bias: float = 0.0

        def vector(self, kind: str) -> dict[str, np.ndarray]:
            off = self.bias if kind == "weights" else 0.0
            return super().vector(kind) | {f"{kind}/attention.k_proj.bias": np.full(2000, 1.0 + off)}

    def found(**wrong: Any) -> set[str]:
        policy: Any = Biased(vectors=NOISE, bias=0.9), replace(Biased(vectors=NOISE, draw=1, bias=-0.9), **wrong)
        double: Any = Biased(), Biased()
        checks = list(levels.precision(policy, double, "float32", still=FAMILIES["gpt2"].zero_gradients))
        assert {c.name: c.widest for c in checks}[f"cost to {levels.ROUNDED}"] == 0
        return {check.name for check in checks if not check.holds}

    assert not found()
    assert found(vectors=NOISE | {"weights": 0.1}) == {NAMES["weights"]}
    assert found(bias=1e-3) == {f"cost to {levels.ROUNDED}"}


# ---- updates of the weights


@pytest.mark.parametrize(
    ("moved", "decay", "rate", "word"),
    [
        (1e-1, 0.1, 1e-2, ""),
        (1e-3, 0.1, 1e-2, "of what they moved"),  # as after 20 steps at a rate of 1e-5
        (1e-1, 0.01, 1e-5, "weight decay left out"),
        (1e-1, 0.1, 1e-4, ""),
        (1e-1, 0.0, 1e-5, ""),
    ],
)
def test_weights_that_hardly_moved_decide_nothing(moved: float, decay: float, rate: float, word: str) -> None:
    """32 times the rounding per step exceeds missing decay, and a thousandth of the update."""

    @dataclass
    class Tuned(StubRun):
        @property
        def metrics(self) -> list[dict[str, Any]]:
            return [record | {"learning_rate": rate} for record in super().metrics]

    run: Any = Tuned(vectors={"weights": 1e-7})
    exact: Any = Tuned()
    start = {"weights/w": TRUE * (1 + moved), "weights/norm": np.ones(3)}
    found = levels.hardly_moved((run, run), (exact, exact), start, decay)
    assert word in found and bool(found) == bool(word)


def test_decay_that_float32_hides_is_named() -> None:
    """Judged per kind of tensor, as the norm of all would show it; noise is at least one rounding."""
    exact: Any = StubRun(learning_rate=-0.99)  # five steps at 1e-3
    start = {"weights/layers.0.q_proj.weight": TRUE * 1e-4, "weights/layers.1.q_proj.weight": TRUE * 1e-4}
    start |= {"weights/embed.weight": TRUE}
    for cost, decay, hidden in (
        (1e-7, 0.1, ["layers.q_proj.weight"]),  # 32e-7 of TRUE, where decay moves the embedding by 5e-4 of it
        (0.0, 0.1, ["layers.q_proj.weight"]),  # 19e-7
        (1e-7, 100.0, []),
        (1e-7, 0.0, []),
        (1e-4, 0.1, ["layers.q_proj.weight", "embed.weight"]),
    ):
        run: Any = StubRun(vectors={"weights": cost})
        assert levels.decay_hidden((run, run), (exact, exact), start, decay) == hidden


# ---- stored dtypes


@dataclass
class Kept(StubRun):
    """A run that stores its numbers in `dtype`, or rounded to it in float32."""

    dtype: str = "float32"

    def vector(self, kind: str) -> dict[str, np.ndarray]:
        import ml_dtypes

        rounded = (TRUE * 1e-3).astype(getattr(ml_dtypes, self.dtype, self.dtype))
        matrix = rounded if self.dtype == "float64" else rounded.astype(np.float32)
        return {f"{kind}/norm": np.ones(5, np.float32), f"{kind}/w": matrix.reshape(40, 100)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_numbers_are_found(dtype: str) -> None:
    """Neither the storage dtype nor a policy's wide noise hides them."""

    def digits(kept: str, exact: str, parameters: str = "float32") -> Check:
        run: Any = Kept(dtype=kept)
        run64: Any = Kept(dtype=exact)
        return levels.digits(run.side, states(run, run64, parameters))

    assert digits("float32", "float64").holds
    wrong = digits(dtype, "float64")
    assert not wrong.holds and wrong.value == 3 and wrong.of == f"weights, exp_avg, exp_avg_sq in {dtype}"
    assert digits(dtype, dtype).holds  # weights of such a checkpoint, not trained
    assert digits(dtype, "float64", dtype).holds  # as the policy says


# ---- float64


@dataclass
class Gradients(StubRun):
    """A run of two gradients, one of them rounding alone."""

    good: float = 1.0
    rounding: float = 0.0

    def vector(self, kind: str) -> dict[str, np.ndarray]:
        still = {f"{kind}/{i}": np.ones(3) for i in range(2)}
        return {f"{kind}/good": np.full(3, self.good), f"{kind}/rounding": np.array([1e-17, self.rounding, 0])} | still


def agreement(a: StubRun, b: StubRun, perturbed: StubRun) -> dict[str, Check]:
    noise = levels.Noise(a, perturbed)  # type: ignore[arg-type]
    return {check.name: check for check in levels.agreement("mathematics", "", a, b, noise)}  # type: ignore[arg-type]


def test_one_that_is_rounding_alone_excuses_no_other() -> None:
    right, off = Gradients(), Gradients(rounding=1e-17)
    found = agreement(right, Gradients(good=3.0), off)["gradients at step 1"]
    assert not found.holds and found.of == "good" and found.bound == compare.STATE
    found = agreement(right, off, off)["gradients at step 1"]
    assert found.holds and found.of == "rounding" and found.bound > 1
    assert agreement(right, Gradients(rounding=1e-15), off)["gradients at step 1"].of == "rounding"


def test_a_bound_that_lets_mistakes_pass_decides_nothing() -> None:
    right, off = Gradients(), Gradients(rounding=1e-17)
    (level, reason), *more = levels.too_wide(agreement(right, off, off).values()).items()
    assert level == "mathematics" and "rounding" in reason and not more
    for limits in (WIDEST, WIDEST_NOISY):
        for name, limit in limits.items():
            check = Check(name, "loss", 0.0, limit, "why", widest=limit)
            assert not levels.too_wide([check], limits) and levels.too_wide(
                [replace(check, widest=1.01 * limit)], limits
            )


def test_a_wide_bound_is_found_behind_the_closest_value() -> None:
    """The value closest to its bound is shown; the bound wide enough to hide a mistake decides."""
    right, off, mistaken = Gradients(), Gradients(good=1 + 2e-2), Gradients(good=1 + 3e-2, rounding=6e-28)
    found = agreement(right, mistaken, off)
    assert all(check.holds for check in found.values()) and "gradients at step 1" in found
    assert found["gradients at step 1"].widest == pytest.approx(0.08, rel=0.1)
    assert "gradients at step 1" in levels.too_wide(found.values())["mathematics"]

    class Curve(StubRun):
        @property
        def metrics(self) -> list[dict[str, Any]]:
            first, second = super().metrics
            return [first | {"loss": 1 + self.loss}, second | {"loss": 1 + self.grad_norm}]

    loss = agreement(Curve(steps=2), Curve(9e-13, steps=2, grad_norm=3e-3), Curve(steps=2, grad_norm=1e-3))["loss"]
    assert loss.holds and loss.bound == compare.LOSS and loss.widest == pytest.approx(4e-3, rel=0.01)


def schedules(right: Optimizer, wrong: Optimizer, steps: int) -> Check:
    import jax

    from jaxdist.training import metrics as jax_metrics
    from torch_ref.training import metrics as torch_metrics

    with jax.enable_x64(True):
        ours = jax_metrics.schedule(right, steps)
    both = (ours, torch_metrics.schedule(wrong, steps))
    a, b = (StubRun(summary={"schedule": {str(step): rate for step, rate in rates.items()}}) for rates in both)
    return agreement(a, b, a)[levels.SCHEDULE]


@pytest.mark.parametrize(
    "wrong", [{"decay": "linear"}, {"final": 0.0}, {"decay_steps": 600}, {"warmup": 101}, {"learning_rate": 1e-9}]
)
@pytest.mark.parametrize("warmup", [20, 100])
def test_a_schedule_is_compared_beyond_the_steps_that_were_run(warmup: int, wrong: dict[str, Any]) -> None:
    """During warm-up alone, schedules with different decays are the same."""
    right = Optimizer(warmup=warmup, decay_steps=300, final=0.1)
    assert schedules(right, right, 20).holds
    assert not schedules(right, right.model_copy(update=wrong), 20).holds
    assert not agreement(StubRun(summary={"schedule": {"1": 0.1}}), StubRun(summary={"schedule": {}}), StubRun())[
        levels.SCHEDULE
    ].holds


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 7, 300, 100_000])
def test_both_sides_report_the_same_schedule(decay: Any, steps: int) -> None:
    for final in (0.0, 0.1):
        o = Optimizer(warmup=min(20, steps - 1), decay=decay, final=final)
        assert schedules(o, o, steps).holds
