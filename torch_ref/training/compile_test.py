"""`train.compile`: a compiled model computes what an eager one does, and stays compiled."""

import pytest

from torch_ref.conftest import Train, command, distance

pytestmark = pytest.mark.long

ONE = "--mesh 1x1"
CHUNKS = "--memory.loss_chunks 3"  # the last is padded
# torch's compiler uses parts of torch that emit deprecation warnings.
COMPILING = "import warnings\nwarnings.simplefilter('default')\n"
# Fails the last step unless a compiled graph ran in it.
STAYS = """
import torch
from torch_ref import train
step = train.train_step
def looked_at(program, state, batch, number, watch):
    with torch.profiler.profile() as seen:
        values = step(program, state, batch, number, watch)
    compiled = any("CompiledFunction" in event.key for event in seen.key_averages())
    if number == program.experiment.train.steps and not compiled:
        raise SystemExit("not compiled")
    return values
train.train_step = looked_at
"""
WITHOUT_STANCE = """
import torch
from contextlib import nullcontext
torch.compiler.set_stance = lambda stance: nullcontext()
"""
UNCOMPILED = """
from torch import nn
def refused(self):
    raise SystemExit("compiles")
nn.Module.compile = refused
"""


def test_the_compiler_is_called(train: Train) -> None:
    with pytest.raises(AssertionError, match="compiles"):
        train(f"{ONE} --train.compile true", before=COMPILING + UNCOMPILED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [ONE, f"{ONE} {CHUNKS}", "--mesh 2x1 --strategy ddp", "--mesh 2x1 --strategy fsdp", f"--mesh 2x1 {CHUNKS}"]
)
def test_a_compiled_model_stays_compiled_and_has_the_numbers_of_an_eager_one(train: Train, line: str) -> None:
    compiled = train(f"{line} --train.compile true", before=COMPILING + STAYS)
    curves, states = distance(compiled, train(ONE))
    assert curves < 1e-12 and states < 1e-10


@pytest.mark.slow
def test_a_model_that_does_not_stay_compiled_is_found(train: Train) -> None:
    with pytest.raises(AssertionError, match="not compiled"):
        train(f"{ONE} --train.compile true", before=COMPILING + WITHOUT_STANCE + STAYS)


@pytest.mark.parametrize(
    ("line", "environment", "message"),
    [
        (["--mesh", "1x2"], {}, "train.compile = true with the mesh axis tensor = 2"),
        (["--mesh", "pipeline=2", "--train.accumulation", "2"], {}, "with the mesh axis pipeline = 2"),
        pytest.param(
            ["--mesh", "1x1"],
            {"CXX": "no-such-compiler"},
            "needs the C++ compiler no-such-compiler",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_where_nothing_can_be_compiled(line: list[str], environment: dict[str, str], message: str) -> None:
    result = command(*line, "--train.compile", "true", "--device", "cpu", **environment)
    assert result.returncode == 2 and result.stderr.count("error: ") == 1 and message in result.stderr
