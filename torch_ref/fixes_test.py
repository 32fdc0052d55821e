"""Following the fixes of torch_ref's own checks literally leads to a config that both sides accept."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxdist.config import Experiment
from jaxdist.config.config_test import INTERLEAVED, MIXED
from jaxdist.config.fixes_test import GPT2, RESNET, SIZES, drawn, followed, line_of, on_given_weights, refusal, ways
from torch_ref.parallel import experts, pipeline
from torch_ref.training.parallelize import check_compile, check_offload


def checks(experiment: Experiment, axes: Mapping[str, int]) -> None:
    """The checks that `torch_ref.train` makes after those of the config."""
    experts.check(experiment, {**axes})
    pipeline.check(experiment, {**axes})
    check_offload(experiment)
    check_compile(experiment, axes, "cuda")


@pytest.mark.parametrize(
    "argv",
    [
        ["--mesh", "expert=2", "--strategy", "zero1", *MIXED],
        ["--mesh", "pipeline=2", *MIXED],
        ["--mesh", "pipeline=2,fsdp=3", *MIXED, "--train.batch", "9"],
        ["--mesh", "pipeline=2,tensor=2", "--parallel.sequence", "true"],
        ["--mesh", "pipeline=2", "--memory.loss_chunks", "4"],
        ["--mesh", "pipeline=2", "--memory.offload", "optimizer"],
        ["--mesh", "pipeline=4", "--train.accumulation", "2"],
        ["--mesh", "pipeline=4,fsdp=2", "--train.accumulation", "3", "--train.batch", "6"],
        ["--mesh", "pipeline=2", "--train.accumulation", "5", "--train.batch", "15", *INTERLEAVED],
        ["--memory.offload", "optimizer"],
        ["--memory.offload", "parameters", "--memory.remat", "full"],
        ["--memory.offload", "optimizer,parameters", "--strategy", "zero1"],
        ["--memory.offload", "activations", "--memory.remat", "selective"],
        ["--memory.offload", "optimizer,activations", "--memory.remat", "selective", "--strategy", "ddp"],
        ["--train.compile", "true", "--mesh", "tensor=2"],
        ["--train.compile", "true", "--mesh", "data=2,context=3", "--strategy", "ddp"],
        ["--train.compile", "true", "--mesh", "expert=4,tensor=3", *MIXED],
    ],
    ids=" ".join,
)
def test_each_fix_is_followed_until_it_works(argv: list[str]) -> None:
    assert followed(line_of(argv), checks) >= 1


@pytest.mark.long
@pytest.mark.parametrize("family", SIZES)
def test_no_fix_leads_in_a_circle(family: str) -> None:
    extra = {"train.compile": "true"} if family != "resnet" else {}
    refused = [line for seed in range(100, 120) if refusal(line := drawn(family, seed) | extra, checks)]
    assert len(refused) > 10
    for line in refused:
        assert followed(line, checks) >= 1


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--mesh", "pipeline=4,fsdp=2", *GPT2], {"train.accumulation": "4"}),
        (["--mesh", "pipeline=4", *GPT2, "--train.batch", "15"], {"parallel.mesh": "1x1"}),
        (["--mesh", "pipeline=2", *MIXED], {"parallel.mesh": "fsdp=2"}),
    ],
    ids=str,
)
def test_a_fix_leaves_the_batch_of_a_run_that_goes_on(argv: list[str], fix: Mapping[str, str], tmp_path: Path) -> None:
    line = on_given_weights(line_of(argv), tmp_path / "run", "resume")
    assert next(ways(refusal(line, checks))) == fix
    assert followed(line, checks) == 1


def test_an_image_model_keeps_its_axes() -> None:
    assert not refusal(line_of([*RESNET, "--mesh", "fsdp=2", "--train.compile", "true"]), checks)
