"""Trees of arrays that a program wrote by TensorStore itself, as Levanter does: Zarr 2 or 3 in folders, or in OCDBT.

A name is the path of its array within the tree, with dots between. https://google.github.io/tensorstore/
"""

from pathlib import Path
from typing import Any

import tensorstore as ts

from jaxdist.config import ConfigError
from jaxdist.formats.orbax import reading

DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # the file that describes an array -> TensorStore's driver of it
MANIFEST = "manifest.ocdbt"
MOST = 1_000_000  # arrays; far above any model


def holds_arrays(path: Path) -> bool:
    """Whether `path` is such a tree."""
    return (path / MANIFEST).is_file() or any(next(path.rglob(name), None) for name in DRIVERS)


def arrays(path: Path) -> dict[str, ts.TensorStore]:
    """Every array of the tree by name, none of them read yet. Raises ConfigError."""
    base = {"driver": "file", "path": f"{path.resolve()}/"}
    ocdbt = (path / MANIFEST).is_file()
    with reading(path):
        if ocdbt:
            files = [
                key.decode() for key in ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
            ]
        else:
            files = [file.relative_to(path).as_posix() for name in DRIVERS for file in path.rglob(name)]
        described = {parts[0]: DRIVERS[parts[2]] for key in files if (parts := key.rpartition("/"))[2] in DRIVERS}
        if len(described) > MOST:
            raise ConfigError(f"{path}: {len(described):,} arrays; give a folder with fewer than {MOST:,}")
        futures = {name: ts.open(_spec(base, name, driver, ocdbt)) for name, driver in sorted(described.items())}
        found = {name.replace("/", "."): store.result() for name, store in futures.items()}
    return {name: store for name, store in found.items() if store.dtype.numpy_dtype is not None}


def _spec(base: dict[str, str], name: str, driver: str, ocdbt: bool) -> dict[str, Any]:
    if ocdbt:
        return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return {"driver": driver, "kvstore": base | {"path": f"{base['path']}{name}/"}}
