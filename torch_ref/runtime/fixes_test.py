"""Following the fixes in messages about torch's ranks literally lets the ranks start."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from jaxdist.config import ConfigError, Parallel
from jaxdist.config.fixes_test import advice
from jaxdist.conftest import free_port
from torch_ref.runtime import launch

RANKS = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
LAUNCHER = RANKS | {"LOCAL_RANK": "0"}  # all variables that a launcher sets
SIX = {"mesh": "data=6", "strategy": "ddp"}
Environment = Mapping[str, str]


def refusal(environment: Environment, parallel: Mapping[str, str], device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message that a rank gets on a machine with two GPUs; empty if it gets a plan."""
    with monkeypatch.context() as here:
        here.setattr(torch.cuda, "device_count", lambda: 0 if "no GPU" in environment else 2)
        for name in LAUNCHER:
            here.delenv(name, raising=False)
        for name, value in environment.items():
            here.setenv(name, value)
        try:
            launch.plan(Parallel.model_validate(parallel), device)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("environment", "parallel", "device"),
    [
        (RANKS, SIX, "cpu"),
        (RANKS | {"RANK": "3"}, {"mesh": "3x1"}, "cpu"),
        (RANKS | {"WORLD_SIZE": "0"}, {"mesh": "3x1"}, "cpu"),
        (RANKS | {"LOCAL_RANK": "3"}, {"mesh": "3x1"}, "cpu"),
        (RANKS | {"WORLD_SIZE": "6", "LOCAL_RANK": "3"}, SIX, "cpu"),
        *((RANKS | {name: "many"}, {"mesh": "3x1"}, "cpu") for name in LAUNCHER),
        ({}, SIX, "gpu"),
        ({}, {"mesh": "4x1"}, "gpu"),
        ({"no GPU": "1"}, {"mesh": "1x1"}, "gpu"),
        (RANKS, {"mesh": "3x1"}, "gpu"),
    ],
    ids=str,
)
def test_ranks_that_a_mesh_cannot_have(
    environment: Environment, parallel: Mapping[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(environment, parallel, device, monkeypatch)
    problem, _, fix = message.rpartition("; ")
    ways = [way for way in fix.split(" or ") if "CUDA" not in way]  # a fix on another machine
    followed = [refusal(*taken(way, problem, environment, parallel, device), monkeypatch) for way in ways]
    assert "" in followed and message not in followed, followed


def taken(
    way: str, problem: str, environment: Environment, parallel: Mapping[str, str], device: str
) -> tuple[Environment, Mapping[str, str], str]:
    """Environment, parallel section and device after following one fix."""
    if number := re.fullmatch(r"start (\d+)", way):
        return {**environment, "WORLD_SIZE": number[1], "LOCAL_WORLD_SIZE": number[1]}, parallel, device
    if way.startswith("unset it"):
        variable = problem.partition(" = ")[0]
        return {name: value for name, value in environment.items() if name != variable}, parallel, device
    if way.startswith("let the launcher set"):  # those that the message names
        return (
            {**environment, **{name: LAUNCHER[name] for name in LAUNCHER if name in re.findall(r"\w+", problem)}},
            parallel,
            device,
        )
    flag = re.fullmatch(r"(?:use )?--(mesh|device) (\S+?),?", way)
    if flag and flag[1] == "mesh":
        return environment, {**parallel, "mesh": flag[2]}, device
    return environment, parallel, flag[2] if flag else device


@pytest.mark.long
def test_ranks_that_have_no_address_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCH_REF_STORE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    plan = launch.Plan({"data": 1}, "cpu")
    with pytest.raises(ConfigError, match="give each the address of the first"), launch.process_group(plan):
        pass
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with launch.process_group(plan) as mesh:
        assert mesh.size() == 1


def test_every_fix_is_followed() -> None:
    """Each fix in the source is among those that the tests above follow."""
    known = [
        *("start 6", "let the launcher set both", "use --mesh fsdp=2 or --device cpu"),
        "use --device cpu, or a build of torch with CUDA",
        "start all ranks, and give each the address of the first, with a port that is free there",
    ]
    assert not [p for p in advice(Path(launch.__file__)) if not any(re.fullmatch(p, fix) for fix in known)]
