"""Facts of devices, from `hardware.toml` beside this file or a table of one's own."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from jaxdist.config.errors import ConfigError, nearest, shown
from jaxdist.config.experiment import read_toml
from jaxdist.config.precision import Dtype
from jaxdist.config.section import Count, NotNegative, Positive, Section

FILE = Path(__file__).with_suffix(".toml")
USABLE = 0.95  # of a device's memory, as XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 has it


class Chip(Section):
    """A GPU as a compiler sees it."""

    capability: Annotated[str, Field(pattern=r"^\d+\.\d$")]
    """NVIDIA's compute capability."""
    cores: Count
    """Streaming multiprocessors."""
    lanes: Count
    """float32 operations of a core at once."""
    shared: Count
    """Bytes of a core's shared memory."""
    l2: Count
    """Bytes of the cache that all cores share."""
    clock: Positive
    """Clock rate of a core, Hz."""


class Hardware(Section):
    """One kind of device; all per device, in bytes, seconds and FLOP/s."""

    name: str
    known_as: str
    """A part of the name that JAX and CUDA give it."""
    platform: Literal["gpu", "tpu"] = "gpu"
    """JAX's name of the device kind."""
    flops: Annotated[Mapping[Dtype, Positive], Field(min_length=1)]
    """Dense matrix products, by the dtype that is multiplied."""
    memory: Positive
    """Bytes that a program can have."""
    bandwidth: Positive
    """Bytes of that memory read or written a second."""
    group: Count = 8
    """Devices that the fast links join: a machine of GPUs, a pod of TPUs."""
    inside: Positive
    """Bytes a second that a device sends over them in a ring."""
    between: Positive
    """Bytes a second that a device sends to other groups."""
    host: Positive = 32e9
    """Bytes a second between it and its host's memory, each way."""
    latency: tuple[NotNegative, NotNegative] = (10e-6, 30e-6)
    """Seconds that a collective takes whatever it sends, within a group and between groups."""
    chip: Chip | None = None
    """Chip of a GPU that steps can be compiled for."""


@cache
def shipped() -> Mapping[str, Hardware]:
    return MappingProxyType(read(FILE))


def read(file: Path) -> dict[str, Hardware]:
    """The devices of a TOML file by name. Raises ConfigError naming the file, the device and the field."""
    found = {}
    for name, table in read_toml(file, "--hardware").items():
        try:
            found[name] = Hardware.model_validate({"name": name, **table} if isinstance(table, dict) else table)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]
            field = ".".join([name, *map(str, problem["loc"])])
            raise ConfigError(
                f"--hardware {file}: {field} = {shown(problem['input'])}: {problem['msg']}; give each device what "
                f"{FILE.name} gives its own"
            ) from None
    return found


def hardware(name: str) -> Hardware:
    """A device by the name of `hardware.toml`, or the one in a file of one's own. Raises ConfigError."""
    if name.endswith(".toml"):
        own = read(Path(name).expanduser())
        if len(own) != 1:
            raise ConfigError(f"--hardware {name}: has {len(own)} devices; give a file with one table")
        return next(iter(own.values()))
    if name not in shipped():
        raise ConfigError(f"--hardware {name}: neither a shipped device nor a .toml file; {nearest(name, shipped())}")
    return shipped()[name]


def rate(device: Hardware, dtype: Dtype) -> float:
    """FLOP/s of products of this dtype. Raises ConfigError where the device multiplies none."""
    if (found := device.flops.get(dtype)) is None:
        raise ConfigError(
            f"precision.compute = {dtype}: {device.name} has no rate for it; use {' or '.join(device.flops)}"
        )
    return found


def known(kind: str) -> Hardware | None:
    """The device that JAX and CUDA call so; None where it is unknown."""
    return next((d for d in shipped().values() if re.search(rf"\b{d.known_as}\b", kind)), None)


def peak_flops(kind: str, dtype: Dtype) -> float | None:
    """The rate of products of this dtype of the device that is called so; None where it is unknown."""
    return found.flops.get(dtype) if (found := known(kind)) else None
