"""Files of `torch.save` with room for tensors, which are written in any order, by several threads.

Such a file is a zip with a record for each storage; the checksum of a record follows it and is in the directory.
"""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from jaxdist.convert.kinds.torch_compat import FakeTensor
from jaxdist.convert.kinds.torch_records import Records, place
from jaxdist.formats import buffers
from jaxdist.formats.torch_files import tensors_of
from jaxdist.formats.torch_zips import STORAGES, begin_of

CENTRAL = "<28x3H12x"  # an entry of the directory: lengths of what follows it
DESCRIPTOR_SUM, CENTRAL_SUM = 4, 16  # offsets of the checksum in either


class TorchFile:
    """A file of a tree with room for its fake tensors; those that have numbers are there. Tied ones share a place."""

    def __init__(self, path: Path, tree: Any) -> None:
        """Raises OSError, or RuntimeError of torch's, where it cannot be written."""
        self.path, self.sums = path, dict[int, int]()
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(tree, path)
        read = tensors_of(Records(path).tree())
        self.places = {id(mine): place(there).start for mine, there in zip(tensors_of(tree), read, strict=True)}
        for tensor in tensors_of(tree):
            written = self.places[id(tensor)] in self.sums  # as that of another view
            if not isinstance(tensor, FakeTensor) and not written:
                storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.write(tensor, storage.numpy())

    def write(self, tensor: Tensor, numbers: np.ndarray) -> None:
        """Give one of the tree's tensors its numbers, those of its entire storage. Raises OSError."""
        start = self.places[id(tensor)]
        buffers.write(self.path, start, numbers)
        self.sums[start] = zlib.crc32(buffers.raw(numbers))

    def digest(self, tensor: Tensor, numbers: np.ndarray) -> str:
        """Checksum of the sealed file, in which one tensor has these numbers: they are not read again."""
        start, bits = self.places[id(tensor)], buffers.raw(numbers)
        with self.path.open("rb") as file:
            found = xxhash.xxh3_128(file.read(start))
            found.update(bits)
            file.seek(start + bits.nbytes)
            found.update(file.read())
        return found.hexdigest()

    def seal(self) -> None:
        """All is written: the records get their checksums. Raises ValueError for storages that nobody wrote."""
        with self.path.open("r+b") as file, zipfile.ZipFile(file) as archive:
            entry = archive.start_dir
            for record in archive.infolist():
                start = begin_of(file, record)
                if record.file_size and start not in self.sums and f"/{STORAGES}" in record.filename:
                    raise ValueError(f"its record {record.filename} has no numbers")
                if start in self.sums:
                    for position in start + record.file_size + DESCRIPTOR_SUM, entry + CENTRAL_SUM:
                        file.seek(position)
                        file.write(self.sums[start].to_bytes(4, "little"))
                file.seek(entry)
                central = struct.calcsize(CENTRAL)
                entry += central + sum(struct.unpack(CENTRAL, file.read(central)))
