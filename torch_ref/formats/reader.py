"""Reading of torch's own types in torch_ref, for the neutral readers of sources (`jaxdist/formats/`)."""

from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from jaxdist.config import Model
from jaxdist.config.bounded import size_of
from jaxdist.formats.leaves import Leaf, Reader
from jaxdist.formats.plan import stacked
from jaxdist.formats.refusals import check_torch, loading
from jaxdist.formats.stand_ins import STAND_INS, restored
from jaxdist.formats.tables import Shape
from jaxdist.formats.torch_files import dtype_of, walked, without_numbers
from jaxdist.formats.torch_pickles import PICKLES, rehearse
from jaxdist.formats.torch_zips import is_zip, open_zip
from torch_ref.families.models import declared
from torch_ref.formats import distributed
from torch_ref.formats.arrays import to_numpy
from torch_ref.parallel.weights import model_tensors


def load(path: Path) -> Any:
    """Content of a file written by torch.save, its tensors memory-mapped if it is a zip. No pickle is executed.

    Raises ConfigError.
    """
    with loading(path):
        if not (size := size_of(path)):
            raise ValueError("it is empty")
        if zipped := is_zip(path):
            pickle, places = open_zip(path)
            rehearse(BytesIO(pickle), len(pickle), places=places)
        else:
            check_torch(path)
            with path.open("rb") as file:
                rehearse(file, size, PICKLES)
        with safe_globals([(stand_in, name) for name, stand_in in STAND_INS.items()]):
            return restored(walked(torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)))


def leaf(path: Path, name: str, tensor: Tensor) -> Leaf:
    """A tensor that was read from a file. Raises ConfigError for one without numbers that numpy knows."""
    dtype = dtype_of(path, name, tensor)
    if tensor.is_meta:
        raise without_numbers(path, name)
    place = path, tensor.data_ptr(), tensor.stride()
    return Leaf(tuple(tensor.shape), dtype, lambda: to_numpy(tensor), place)


def shapes(model: Model) -> dict[str, Shape]:
    """Shapes of a model's parameters, as in jaxdist: all layers in one."""
    return stacked(model, {name: tuple(tensor.shape) for name, tensor in model_tensors(declared(model))})


READER = Reader(load, leaf, distributed.weights, shapes)
