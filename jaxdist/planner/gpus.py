"""Compile for NVIDIA GPUs that are not present, from a chip description given to JAX's CUDA plugin.

The compiled program is the one that would run there (https://docs.jax.dev/en/latest/aot.html), except that nothing can
be timed: of a product's kernels XLA takes the one that it would try first.
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from jaxdist.config import ConfigError
from jaxdist.config.hardware import Hardware

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
OPTIONS = {"xla_gpu_autotune_level": 0}
# Threads that a core can have, by compute capability, where they are not 2,048 (CUDA C++ Programming Guide, technical
# specifications per compute capability): chips that are made for graphics too.
THREADS = {"7.5": 1024} | dict.fromkeys(("8.6", "8.7", "8.9", "12.0", "12.1"), 1536)
# The numbers of XLA's GpuTargetConfigProto that NVIDIA's chips share since 2020.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {threads}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}  shared_memory_per_block_optin: {optin}
  core_count: {cores}  fpus_per_core: {lanes}  clock_rate_ghz: {clock}  l2_cache_size: {l2}
  memory_bandwidth: {bandwidth}  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{name}"
"""


def installed() -> bool:
    """Whether there is a plugin that compiles for them."""
    return bool(find_spec("jax_plugins")) and any(map(find_spec, PLUGINS))


def target(device: Hardware) -> str:
    """A chip's description for the plugin, in protobuf's text format."""
    chip = device.chip
    if chip is None:
        raise ConfigError(f"--hardware {device.name}: has no table `chip`, for which XLA compiles; add it")
    major, minor = chip.capability.split(".")
    return TARGET.format(
        threads=THREADS.get(chip.capability, 2048),
        shared=chip.shared, optin=chip.shared - 1024, cores=chip.cores, lanes=chip.lanes, clock=chip.clock / 1e9,
        l2=chip.l2, bandwidth=int(device.bandwidth), memory=int(device.memory), major=major, minor=minor,
        name=f"NVIDIA {device.known_as}",
    )  # fmt: skip


def devices(device: Hardware, count: int) -> list[Any]:
    """Make `count` abstract devices, in machines of `device.group`, before anything else touches JAX's devices. Raises
    ConfigError."""
    jax.config.update("jax_platforms", "cpu")  # the plugin looks for a GPU else
    machines, left = divmod(count, device.group)
    shape = f"1x{machines}x{device.group}" if machines and not left else f"1x1x{count}"
    with refused(device):
        found: Any = topologies.get_topology_desc(
            platform="cuda", topology_name=device.name, target_config=target(device), topology=shape
        )
    return list(found.devices)


def compiled(lowered: Any, device: Hardware) -> Any:
    """A lowered function, compiled for them. Raises ConfigError."""
    with refused(device):
        return lowered.compile(OPTIONS)


@contextmanager
def refused(device: Hardware) -> Iterator[None]:
    """Turn the plugin's error on a chip that it can't compile for into a ConfigError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = textwrap.shorten(str(error), 200)
        raise ConfigError(f"--hardware {device.name}: XLA cannot compile for its chip: {reason}; see chip") from None
