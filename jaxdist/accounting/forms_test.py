"""Plans and runs of a family or an optimizer without closed forms, and the values that they call unknown."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxdist import plan
from jaxdist.accounting.forms import Accounting, accounting_of, flops_per_token, least_bytes
from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.config.hardware import hardware
from jaxdist.config.optimizer import ALL, MATRICES, OPTIMIZERS, UpdateRule
from jaxdist.config.registry import FAMILIES, Owner
from jaxdist.planner.plans import Plan, param_specs


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the default family other closed forms, or none."""

    def register(accounting: Accounting | None) -> None:
        row = replace(FAMILIES["llama"], accounting=accounting)
        monkeypatch.setitem(FAMILIES._rows, "llama", row)

    return register


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    plan.main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_without_closed_forms_shows_the_state(forms: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters and optimizer state are known for any family; unknown memory, traffic and time are null, not an
    error."""
    complete = planned(capsys, "--mesh", "2x4")
    forms(None)
    found = planned(capsys, "--mesh", "2x4")
    assert found["unknown"] == ["footprint", "exchanges", "flops"] and "unknown" not in complete
    same = {name: complete["memory"][name] for name in ("parameters", "optimizer_state", "host")}
    assert found["memory"] == same | {"peak": None}
    nothing = ("fits", "least_bytes", "flops_per_token", "time", "step_seconds", "tokens_per_second", "mfu")
    assert [found[name] for name in nothing] == [None] * len(nothing)
    plan.main(["--mesh", "2x4"])
    output = " ".join(capsys.readouterr().out.split())
    assert "closed form of family llama is unknown: its accounting lacks footprint (memory and time), exch" in output


@pytest.mark.long
def test_a_compiled_plan_without_closed_forms_is_measured(forms: Any, capsys: pytest.CaptureFixture[str]) -> None:
    forms(None)
    compiled = planned(capsys, "--mesh", "2x4", "--compiled")["compiled"]
    assert compiled["memory"]["peak"] > 0 and compiled["traffic"].keys() >= {"fsdp", "tensor"}


@pytest.mark.parametrize("more", [["--recommend", "--devices", "8"], ["--mesh", "2x4", "--output", "OUT"]])
def test_recommendations_and_pages_need_closed_forms(more: list[str], forms: Any, tmp_path: Any) -> None:
    forms(None)
    arguments = [str(tmp_path) if word == "OUT" else word for word in more]
    with pytest.raises(ConfigError, match=r"family = llama: the closed form of its footprint, .* unknown; leave out"):
        plan.main(arguments)


def test_each_form_is_known_by_itself(forms: Any) -> None:
    """FLOPs alone; memory alone fits or not, with unknown time."""
    e = load(None, {"parallel.mesh": "2x4"})
    own = accounting_of(e.model)
    known = Plan(e, hardware("h100"))
    forms(Accounting(flops=own.flops))
    assert flops_per_token(e, param_specs(e.model)) == known.flops_per_token
    assert least_bytes(e, param_specs(e.model), known.mesh) is None
    forms(Accounting(footprint=own.footprint))
    one = Plan(e, hardware("h100"))
    assert one.memory == known.memory and one.fits and one.if_known("time") is None and one.if_known("mfu") is None
    assert one.unknown == ["exchanges", "flops"]


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers the optimizer `norms`, whose update depends on whole parameters."""

    def register(**pieces: Any) -> None:
        row = UpdateRule("norms", pieces.pop("states", {"exp_avg": ALL}), "nowhere:rule", **pieces)
        monkeypatch.setitem(OPTIMIZERS._rows, "norms", row)
        monkeypatch.setitem(OPTIMIZERS._owners, "norms", Owner("one"))

    return register


def test_an_optimizer_that_is_not_elementwise_has_unknown_traffic(
    rule: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--optimizer.name", "norms", "--mesh"]
    for pieces in ({"elementwise": False}, {"states": {"exp_avg": MATRICES}}):
        rule(**pieces)
        found = planned(capsys, *arguments, "2x4")
        assert found["unknown"] == ["traffic"] and found["fits"] and found["memory"]["peak"] > 0
        assert [found[name] for name in ("least_bytes", "time", "tokens_per_second", "mfu")] == [None] * 4
        plan.main([*arguments, "2x4"])
        output = " ".join(capsys.readouterr().out.split())
        assert (
            "the closed form of optimizer norms is unknown: its row lacks traffic (traffic and time); --comp" in output
        )
        with pytest.raises(
            ConfigError, match=r"^optimizer.name = norms: the closed form of its traffic, .* elementwise$"
        ):
            plan.main([*arguments[:2], "--recommend", "--devices", "8"])
        assert planned(capsys, *arguments, "1x1")["least_bytes"] == {}  # one device sends nothing


def test_an_optimizer_that_is_elementwise_or_states_its_traffic_is_known(
    rule: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--optimizer.name", "norms", "--mesh", "2x4"]
    plain = planned(capsys, "--mesh", "2x4")["least_bytes"]
    for pieces in ({}, {"elementwise": True, "states": {"exp_avg": MATRICES}}):
        rule(**pieces)
        assert planned(capsys, *arguments)["least_bytes"] == plain
    rule(elementwise=False, traffic=lambda e, spec, mesh: [("all_reduce", ("tensor",), 100.0)])
    assert planned(capsys, *arguments)["least_bytes"]["tensor"] > plain["tensor"]
