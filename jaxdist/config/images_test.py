from dataclasses import replace
from typing import Any

import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.optimizer import OPTIMIZERS

MODEL = {"family": "resnet", "block": "basic", "depths": "1,1", "widths": "16,32", "stem": 8, "image": 8, "classes": 10}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"parallel": {"mesh": "1x2"}},
            r"axis tensor = 2 with model.family = resnet, .*; use --mesh fsdp=2, or --mesh data=2",
        ),
        ({"parallel": {"mesh": "context=2"}}, r"axis context = 2 with model.family = resnet"),
        ({"parallel": {"mesh": "expert=2"}}, r"axis expert = 2 with model.family = resnet"),
        ({"parallel": {"sequence": True}}, r"parallel.sequence = true splits sequences, .*; leave it out"),
        ({"parallel": {"mesh": "3x1"}}, r"train.batch = 16 images cannot be divided over data × fsdp = 3"),
        (
            {"parallel": {"mesh": "16x1"}, "model": {"stem": 24}},
            r"24 channels cannot be divided over the mesh axis fsdp",
        ),
        (
            {"parallel": {"mesh": "16x1", "batch_norm": "replica", "strategy": "ddp"}, "model": {"image": 4}},
            r"leaves a batch norm one number for each channel",
        ),
        ({"optimizer": {"name": "muon"}}, r"optimizer.name = muon with model.family = resnet: .*; use adamw"),
        ({"memory": {"loss_chunks": 4}}, r"memory.loss_chunks = 4 with model.family = resnet, .*; leave it out"),
        ({"memory": {"remat": "full"}}, r"memory.remat = full with model.family = resnet: .*; leave it out"),
        (
            {"model": {"widths": "16"}},
            r"widths = 16 are not as many as model.depths = 1,1: .*; use model.widths = 16,32",
        ),
        ({"model": {"depths": "1000,1"}}, r"model.depths = \[1000, 1\] are 1,001 blocks; use at most 1,000"),
        ({"model": {"block": "bottleneck", "widths": "16,30"}}, r"30 is not a multiple of 4"),
        ({"data": {"pixel_std": "1,2"}}, r"data.pixel_std has 2 numbers, and model.channels = 3; give one"),
        ({"data": {"pixel_std": "0"}}, r"data.pixel_std = 0 divides by nothing"),
        ({"model": {"heads": 8}}, r"model.heads = 8: no such field"),
    ],
)
def test_fields_that_images_cannot_have(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment = Experiment.parse({**values, "model": MODEL | values.get("model", {})}, source="test")
        experiment.check_mesh(experiment.parallel.axes())


def test_an_optimizer_says_that_it_is_of_matrices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model": MODEL, "optimizer": {"name": "adam"}}
    Experiment.parse(values, source="test")
    monkeypatch.setitem(OPTIMIZERS._rows, "adam", replace(OPTIMIZERS["adam"], matrices_alone=True))
    with pytest.raises(ConfigError, match=r"optimizer.name = adam with model.family = resnet: it is of matrices alone"):
        Experiment.parse(values, source="test")
