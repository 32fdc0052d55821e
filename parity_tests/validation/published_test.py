"""The planner against published runs; a wrong planner would be found."""

from pathlib import Path

import pytest

from jaxdist.accounting import decoder
from jaxdist.planner import time
from parity_tests.validation.published import RATES, TITAN, Run, planned, ratio, runs

RUNS = list(runs())
README = Path(__file__).resolve().parents[2] / "README.md"


def away(run: Run) -> float:
    """Relative difference of the planned pace from the measured one."""
    return abs(ratio(run) - 1)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_pace_and_memory(run: Run) -> None:
    """Planned memory is a sixth less, as JAX holds one array of logits."""
    assert away(run) < 0.25
    if run.memory:
        assert 0.8 < planned(run)[0].memory["peak"] / 2**30 / run.memory < 0.88


@pytest.mark.parametrize("run", [run for run in RUNS if run.source == TITAN], ids=lambda run: run.name)
def test_unknown_rates_of_torchtitans_gpus(run: Run) -> None:
    """The plan is within 25 % at one end of the GPUs' possible rate, and beyond at the other."""
    least, most = (ratio(run, rate=rate) for rate in RATES)
    assert 1.15 < least < ratio(run) < 1.25 < most < 1.32


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_readme_has_both_ratios(run: Run) -> None:
    message = f"| {run.pace:,.0f} {run.unit} |"
    row = next(line for line in README.read_text(encoding="utf-8").splitlines() if message in line)
    assert f"| {ratio(run):.2f} | {ratio(run, overlap=True):.2f} |" in row


def test_another_rate_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products at the data sheet's rate, or one pass over memory, ignore what kernels reach."""
    for module, name, value in ((time, "PRODUCTS", 1.2), (decoder, "PASSES", 1)):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            assert max(map(away, RUNS)) > 0.25
