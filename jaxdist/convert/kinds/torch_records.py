"""The tree of tensors in a file of `torch.save`, whose numbers are read from their place in the file when asked for."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

from jaxdist.convert.kinds import torch_numpy
from jaxdist.convert.kinds.torch_compat import PyTorchFileReader, Unpickler
from jaxdist.formats.torch_pickles import rehearse
from jaxdist.formats.torch_zips import Part, Place, open_zip, storage_of


class Records:
    """Records of a file, or of a part of it."""

    def __init__(self, path: Path, part: Place | None = None) -> None:
        """Raises OSError, ValueError, BadZipFile or RuntimeError, and ConfigError for numbers of another byte order."""
        self.path, self.storages = path, dict[Place, UntypedStorage]()
        self.mapping: Any = None
        self.pickle, self.places = open_zip(path, part)
        part = part or Place(0, path.stat().st_size)
        with path.open("rb", buffering=0) as file:  # torch checks the directory and the id
            PyTorchFileReader(io.BufferedReader(Part(file, part))).serialization_id()

    def tree(self, mapped: bool = False) -> Any:
        """The saved object. Its tensors are on the meta device, and `place` states their offset; or they are `mapped`
        into memory. Raises UnpicklingError, ValueError, and whatever else a damaged pickle leads to."""
        self.storages.clear()
        rehearse(io.BytesIO(self.pickle), len(self.pickle))
        reader: Any = Unpickler(io.BytesIO(self.pickle), encoding="utf-8")
        reader.persistent_load = partial(self._storage, self._mapped if mapped else _on_meta)
        with torch_numpy.allowed():
            tree = reader.load()
        for place, storage in self.storages.items():  # on the meta device, one grows with its largest tensor
            if storage.nbytes() > place.size:
                name = next(name for name, record in self.places.items() if record.start == place.start)
                raise ValueError(f"its record {name} has {place.size:,} bytes, and its tensors {storage.nbytes():,}")
        return tree

    def _storage(self, allocate: Callable[[Place], UntypedStorage], identifier: Any) -> TypedStorage:
        """A pickle's entry for a storage: type, key, device, and number of elements."""
        _, kind, key, _, count = identifier
        dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
        asked = storage_of(self.places, key, str(dtype), dtype.itemsize, count)
        if asked not in self.storages:
            self.storages[asked] = allocate(asked)
            self.storages[asked].place = asked  # type: ignore[attr-defined]
        return TypedStorage(wrap_storage=self.storages[asked], dtype=dtype, _internal=True)

    def _mapped(self, place: Place) -> UntypedStorage:
        if self.mapping is None:
            self.mapping = UntypedStorage.from_file(str(self.path), False, self.path.stat().st_size)
        return cast(UntypedStorage, self.mapping[place.start : place.start + place.size])


def _on_meta(place: Place) -> UntypedStorage:
    return UntypedStorage(place.size, device="meta")


def place(tensor: Tensor) -> Place:
    """Place of the storage of a tensor on the meta device in its file. Raises ValueError without one."""
    storage: Any = tensor.untyped_storage()
    if (found := getattr(storage, "place", None)) is None:
        raise ValueError("it was saved without its numbers, on torch's meta device")
    return cast(Place, found)
