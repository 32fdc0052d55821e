"""Checkpoints of jaxdist, as Orbax lays them out, read by TensorStore alone: neither Orbax nor JAX is needed.

The item `parameters` has a zarr array for each parameter, in folders or in a database of TensorStore's (OCDBT), and
`_METADATA`, which names them. https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
"""

import math
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdist.config import ConfigError, Experiment, Model, check_shapes
from jaxdist.config.bounded import file_within, read_json
from jaxdist.formats.foreign import check_files
from jaxdist.formats.leaves import Leaf, Leaves, Reader
from jaxdist.formats.tables import EXPERTS, RETURNED, Shape, Stored, piece_name, stack_depth, stored
from jaxdist.runs.checkpoints import checkpoint_in

if TYPE_CHECKING:  # else imported when a checkpoint is read
    import tensorstore as ts

OF_DAMAGE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError, NotImplementedError,
)  # fmt: skip
CHUNK = 16_000_000  # bytes: memory of larger ones would be fresh from the system for each, in a conversion
PARAMETERS, INDEX, KEY_OF_DICT = "parameters", "_METADATA", 2
NAMING = "torch_ref"  # of the tensors: a layer each, as torch lays them out


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ConfigError for any error of Orbax on a damaged checkpoint."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        bare = type(error) is Exception  # Orbax's own, around one that says more
        if not bare and not isinstance(error, OF_DAMAGE):
            raise
        reason = textwrap.shorten(str((error.__cause__ if bare else None) or error), 200)
        raise ConfigError(f"checkpoint {path} is damaged: {reason}; use another, or a copy of it") from None


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a run folder with a checkpoint, or a checkpoint, of jaxdist."""
    return (checkpoint_in(path) / "parameters" / "_METADATA").exists()


def read_experiment(path: Path) -> Experiment:
    """The experiment that the checkpoint `path` belongs to. Raises ConfigError."""
    with reading(path):
        values = read_json(path / "experiment" / "metadata")
    return Experiment.parse(values, source=str(path))


def read(path: Path, checkpoint: Path, model: Model, reader: Reader) -> Leaves:
    """Every parameter of an intact checkpoint of this model, under NAMING. `path`: the source, as messages name it.

    Raises ConfigError."""
    shapes = reader.shapes(model)
    found = arrays(checkpoint)
    check_shapes(str(path), {name: tuple(array.shape) for name, array in found.items()}, shapes)
    tensors = stored(NAMING, model, shapes)
    return {name: _leaf(checkpoint, tensor, found[tensor.atoms[0][0]]) for name, tensor in tensors.items()}


def arrays(checkpoint: Path) -> dict[str, "ts.TensorStore"]:
    """The parameters by jaxdist's names, none of them read yet. Raises ConfigError."""
    import tensorstore as ts

    folder = checkpoint / PARAMETERS
    with reading(folder):
        file_within(checkpoint, PARAMETERS)
        check_files(folder)
        index = read_json(folder / INDEX)
        keys = [entry["key_metadata"] for entry in index["tree_metadata"].values()]
        if not all(len(steps) == 1 and steps[0]["key_type"] == KEY_OF_DICT for steps in keys):
            raise ValueError("its parameters are not arrays by name")
        names = [str(steps[0]["key"]) for steps in keys]
        context = ts.Context({"file_io_mode": {"mode": "memmap"}})  # files are seen where the page cache has them
        database, zarr3 = (bool(index.get(key)) for key in ("use_ocdbt", "use_zarr3"))
        specs = {name: spec(folder, name, database, zarr3) for name in names}
        futures = {name: ts.open(specs[name], open=True, context=context) for name in names}
        found = {name: array.result() for name, array in futures.items()}
        for name, array in found.items():
            check_chunks(name, array)
        return found


def spec(folder: Path, name: str, database: bool, zarr3: bool) -> dict[str, Any]:
    """TensorStore's spec of an array of the item in `folder`: in a `database` of all, or in a folder of its own. A
    missing chunk is an error, as for Orbax. Raises ValueError for a name that leads out of the folder."""
    file_within(folder, name)
    base = {"driver": "file", "path": f"{folder.resolve()}/"}
    own = base | {"path": f"{base['path']}{name}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if database else own
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}


def check_chunks(name: str, array: "ts.TensorStore") -> None:
    """Raises ValueError as `check_chunk`."""
    shape = tuple(size or 1 for size in array.chunk_layout.read_chunk.shape or ())
    check_chunk(name, shape, tuple(array.shape), array.dtype.numpy_dtype.itemsize)


def check_chunk(name: str, chunk_shape: Shape, shape: Shape, itemsize: int) -> None:
    """Raises ValueError where a chunk of an array is much more than the array: all of a chunk is in memory while a part
    of it is read, and a few bytes may stand for it."""
    chunk, size = (itemsize * math.prod(sizes) for sizes in (chunk_shape, shape))
    if chunk > size + CHUNK:
        raise ValueError(f"{name} has chunks of {chunk:,} bytes, and {size:,} itself")


def numbers_of(checkpoint: Path, array: "ts.TensorStore") -> np.ndarray:
    """The stored array. Raises ConfigError."""
    import tensorstore as ts

    values = np.empty(tuple(array.shape), np.dtype(array.dtype.numpy_dtype))
    with reading(checkpoint):
        ts.array(values, copy=False, write=True).write(array).result()
    return values


def _leaf(checkpoint: Path, tensor: Stored, array: "ts.TensorStore") -> Leaf:
    """One tensor of a layer: all of its atoms lie in one array, along the first axes of it."""
    name = tensor.atoms[0][0]
    stack: Shape = tuple(array.shape[: stack_depth(name)])
    shape, dtype = tuple(array.shape[len(stack) :]), np.dtype(array.dtype.numpy_dtype)

    def piece(place: Shape) -> Leaf:
        return Leaf(shape, dtype, lambda: numbers_of(checkpoint, array[place] if place else array))

    places = [tuple(map(int, np.unravel_index(number, stack))) if stack else () for _, number in tensor.atoms]
    pieces = {piece_name(name, place): piece(place) for place in places}

    def read() -> np.ndarray:
        parts = [piece.read() for piece in pieces.values()]
        turned = [part.transpose(RETURNED[part.ndim]) if tensor.row.transpose else part for part in parts]
        return np.stack(turned) if EXPERTS in name else turned[0]

    return Leaf(tensor.shape, dtype, read, pieces=pieces)
