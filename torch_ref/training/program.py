"""An experiment on a mesh, and its state. Twin: jaxdist/training/program.py."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jaxdist.config import Experiment
from torch_ref.families.models import declared
from torch_ref.training.optim import Optimizer
from torch_ref.training.parallelize import parallelize


class TrainState(NamedTuple):
    """All that training carries from step to step: this rank's part of the model, and of its optimizer with the loss
    scale. A step updates both in place."""

    model: nn.Module
    optimizer: Optimizer


@dataclass(frozen=True)
class Program:
    """One experiment on one mesh."""

    experiment: Experiment
    mesh: DeviceMesh

    @cached_property
    def unsharded(self) -> nn.Module:
        """The model on the meta device, not laid out."""
        return declared(self.experiment.model)

    def allocate(self) -> TrainState:
        """The model laid out over the mesh and its optimizer; neither holds values yet."""
        e, mesh = self.experiment, self.mesh
        plain = declared(e.model).to(getattr(torch, str(e.precision.parameters)))
        model = parallelize(plain, e, mesh)
        return TrainState(model, Optimizer(model, e, mesh))
