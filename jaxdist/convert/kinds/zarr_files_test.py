"""Arrays written as files of chunks, read by TensorStore."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import xxhash

from jaxdist.convert.kinds import zarr_files
from jaxdist.convert.kinds.zarr_files import ZarrFiles, rows_of
from jaxdist.formats.orbax import CHUNK

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("shape", [(), (7,), (128256, 4096), (50257, 768), (16_000_003, 1), (3, 20_000_000), (0, 4)])
def test_chunks_are_whole_rows(shape: tuple[int, ...]) -> None:
    """Chunks have at most CHUNK bytes unless a row is larger, and are as even as possible; the last one is padded."""
    chunk = rows_of(shape, BFLOAT16)
    assert chunk[1:] == shape[1:]
    if shape and shape[0]:
        chunks = -(-shape[0] // chunk[0])
        assert chunks * chunk[0] - shape[0] < chunks
        assert chunk[0] == 1 or 2 * np.prod(chunk) <= CHUNK


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64, np.uint8])
@pytest.mark.parametrize(
    ("shape", "outer"), [((), 0), ((5,), 0), ((5,), 1), ((10, 3), 0), ((2, 10, 3), 1), ((2, 3, 5, 2), 2), ((0, 4), 0)]
)
def test_tensorstore_reads_the_written_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], outer: int, dtype: Any
) -> None:
    """Every number, also from a padded edge; the checksums match the files."""
    dtype = np.dtype(dtype)
    monkeypatch.setattr(zarr_files, "CHUNK", 12 * dtype.itemsize)  # 4 rows of 3
    numbers: np.ndarray = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = ZarrFiles(tmp_path / "array", shape, outer, dtype)
    for place in np.ndindex(shape[:outer]):
        array.put(place, np.ascontiguousarray(numbers[place]))

    stored = {"driver": "file", "path": f"{tmp_path}/array/"}
    spec = {"driver": "zarr", "kvstore": stored, "fill_missing_data_reads": False}
    np.testing.assert_array_equal(ts.open(spec, open=True).result().read().result(), numbers)
    files = {file.name: file.read_bytes() for file in (tmp_path / "array").iterdir() if file.name != ".zarray"}
    assert array.sums == {name: xxhash.xxh3_128_hexdigest(content) for name, content in files.items()}
    assert len(files) >= (len(numbers) > 0 if shape else 1)
