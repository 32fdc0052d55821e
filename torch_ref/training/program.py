"""A model on a mesh and its optimizer: all that a step of an experiment needs. Twin: jaxdist/training/program.py."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jaxdist.config import Experiment
from torch_ref.training.optim import Optimizer


@dataclass(frozen=True)
class Program:
    """This rank's part of a model that is laid out over a mesh, with its optimizer."""

    experiment: Experiment
    mesh: DeviceMesh
    model: nn.Module
    optimizer: Optimizer
