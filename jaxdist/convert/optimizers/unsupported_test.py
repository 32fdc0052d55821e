"""Unsupported optimizers are refused by name, and none is taken for another rule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.optimizers.rules_test import MODEL, config_of, script

torch = pytest.importorskip("torch", reason="torch files need torch: pip install 'jaxdist[torch]'")
rule_of = pytest.importorskip("jaxdist.convert.optimizers.rules").rule_of  # imports torch

OTHERS: dict[str, Callable[[Any], Any]] = {
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "AMSGrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


def saved(build: Callable[[Any], Any]) -> tuple[set[str], list[dict[str, Any]]]:
    """State of a parameter after a step, and the optimizer's groups."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = build([parameter])
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    state = optimizer.state_dict()
    return {kind for kind, value in state["state"].get(0, {}).items() if value is not None}, state["param_groups"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_rule_is_refused_by_its_name(name: str) -> None:
    kept, groups = saved(OTHERS[name])
    message = f"its optimizer is {name}, .*; take the weights alone, --to hf"
    with pytest.raises(ConfigError, match=message):
        rule_of("a.pt", kept, groups)
    if name != "RAdam":  # its state is like Adam's
        with pytest.raises(ConfigError, match=message):
            rule_of("a.pt", kept, [])
    if name != "Adamax":  # its groups are like others'
        with pytest.raises(ConfigError, match=message):
            rule_of("a.pt", ["momentum_buffer"], groups)


@pytest.mark.parametrize(
    ("name", "kept", "settings"),
    [
        ("LAMB", ["exp_avg", "exp_avg_sq"], {"grad_averaging": True, "max_grad_norm": 1.0}),
        ("LAMB", ["exp_avg", "exp_avg_sq"], {"max_coeff": 10.0, "min_coeff": 0.01}),
        ("NovoGrad", ["exp_avg", "exp_avg_sq"], {"grad_averaging": False, "amsgrad": False}),
        ("AdamP or SGDP", ["exp_avg", "exp_avg_sq"], {"delta": 0.1, "wd_ratio": 0.1}),
        ("Yogi", ["exp_avg", "exp_avg_sq"], {"initial_accumulator": 1e-6}),
        ("LARS", ["momentum_buffer"], {"momentum": 0.9, "trust_coeff": 0.001, "trust_clip": False}),
    ],
)
def test_a_rule_with_the_state_of_another(name: str, kept: list[str], settings: dict[str, Any]) -> None:
    """Settings of the groups alone distinguish it from AdamW or SGD."""
    with pytest.raises(ConfigError, match=f"its optimizer is {name}, a rule that jaxdist does not have"):
        rule_of("a.pt", kept, [{"lr": 1e-3, "betas": (0.9, 0.999), **settings}])


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("sgd", torch.optim.SGD),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_a_rule_of_jaxdist_is_recognized(name: str, build: Callable[[Any], Any]) -> None:
    kept, groups = saved(build)
    kept |= {"variance"} if name == "adafactor" else set()  # the state of vectors
    assert rule_of("a.pt", kept, groups).name == name


def test_the_weights_beside_another_rule(tmp_path: Path) -> None:
    """The message's fix works."""
    script(tmp_path / "a.pt", lambda p: torch.optim.RMSprop(p, lr=1e-3), tmp_path)
    more = ["--model", str(config_of(tmp_path))]
    with pytest.raises(ConfigError, match=r"its optimizer is RMSprop, .*; take the weights alone, --to hf"):
        main([str(tmp_path / "a.pt"), str(tmp_path / "run"), *more])
    assert not (tmp_path / "run").exists()
    main([str(tmp_path / "a.pt"), str(tmp_path / "hf"), "--to", "hf", *more])
    assert tensors(tmp_path / "hf").keys() == tensors(written(tmp_path / "right", "hf", content_of(MODEL))).keys()
