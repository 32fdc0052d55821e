"""How torch_ref reads what is torch's own, for the neutral readers of sources (`jaxdist/formats/`)."""

from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor
from torch.serialization import safe_globals

from jaxdist.config import Family
from jaxdist.config.foreign import size_of
from jaxdist.formats.leaves import Leaf, Reader
from jaxdist.formats.plan import stacked
from jaxdist.formats.refusals import check_torch, loading
from jaxdist.formats.stand_ins import STAND_INS, restored
from jaxdist.formats.tables import Shape
from jaxdist.formats.torch_files import dtype_of, walked, without_numbers
from jaxdist.formats.torch_pickles import PICKLES, rehearse
from torch_ref import distributed
from torch_ref.arrays import to_numpy
from torch_ref.models import build
from torch_ref.weights import held

PICKLE, MOST_BYTES = "/data.pkl", 100_000_000  # in a file's zip: of half a million tensors


def load(path: Path) -> Any:
    """What a file of torch.save's holds, its tensors mapped into memory where it is a zip. No pickle is executed.

    Raises ConfigError."""
    with loading(path):
        if not (size := size_of(path)):
            raise ValueError("it is empty")
        if zipped := is_zipfile(path):
            pickle = _pickle(path)
            rehearse(BytesIO(pickle), len(pickle))
        else:
            check_torch(path)
            with path.open("rb") as file:
                rehearse(file, size, PICKLES)
        with safe_globals([(stand_in, name) for name, stand_in in STAND_INS.items()]):
            return restored(walked(torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)))


def _pickle(path: Path) -> bytes:
    """The pickle in a zip. Raises ValueError for a huge one."""
    with ZipFile(path) as file:
        record = next((record for record in file.infolist() if record.filename.endswith(PICKLE)), None)
        if record is None or record.file_size > MOST_BYTES:
            raise ValueError(f"it has {f'a pickle of {record.file_size:,} bytes' if record else 'no pickle'}")
        return file.read(record)


def leaf(path: Path, name: str, tensor: Tensor) -> Leaf:
    """A tensor that was read from a file. Raises ConfigError for one without numbers that numpy knows."""
    dtype = dtype_of(path, name, tensor)
    if tensor.is_meta:
        raise without_numbers(path, name)
    place = path, tensor.data_ptr(), tensor.stride()
    return Leaf(tuple(tensor.shape), dtype, lambda: to_numpy(tensor), place)


def shapes(model: Family) -> dict[str, Shape]:
    """Those of a model's parameters, as jaxdist has them: all layers in one."""
    with torch.device("meta"):
        return stacked(model, {name: tuple(tensor.shape) for name, tensor in held(build(model))})


READER = Reader(load, leaf, distributed.weights, shapes)
