"""From `--mesh` and `--device` to devices and a `jax.sharding.Mesh`."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxdist.config import ConfigError, Experiment, environment_integer
from jaxdist.runtime.processes import world

# Threads of XLA per virtual CPU device. Each collective in progress holds one, and a device may be in one while the
# others are in another that does not depend on it: with as many threads as devices, which is XLA's choice, that can be
# a deadlock.
THREADS = 4


def make_mesh(experiment: Experiment, device: str) -> tuple[Mesh, str]:
    """The mesh over all axes, and one line that says what it runs on.

    Call it before anything else touches JAX: it also settles the platform, the number of virtual CPU devices and
    whether float64 exists. `auto` takes accelerators if there are enough, else as many virtual CPU devices as the mesh
    asks for. Each of several processes has an equal share of the devices. Raises ConfigError when the mesh and the
    devices do not fit.
    """
    parallel, processes = experiment.parallel, world().size
    if processes == 1 and (started := environment_integer("WORLD_SIZE")) > 1:
        raise ConfigError(
            f"WORLD_SIZE = {started}: a launcher started several processes, each of which would train alone; start "
            "`python -m jaxdist.train`, which joins them, or one process without torchrun"
        )

    def fitting(devices: int | None = None) -> dict[str, int]:
        axes = parallel.axes(devices)
        experiment.check_mesh(axes)
        if (total := math.prod(axes.values())) % processes:
            raise ConfigError(
                f"parallel.mesh = {parallel.mesh!r} has {total} devices, which {processes} processes cannot share "
                f"equally; start {math.gcd(total, processes)}"
            )
        return axes

    settle(experiment)
    fixed = fitting() if parallel.sized else None  # before any device is made
    share = math.prod(fixed.values()) // processes if fixed else 0
    preset = environment_integer("JAX_NUM_CPU_DEVICES")
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if fixed and not preset:
        jax.config.update("jax_num_cpu_devices", share)
    if processes > 1:
        jax.config.update("jax_cuda_visible_devices", own_gpus(share or 1))
    virtual = preset or share or 1
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, THREADS * virtual)))  # XLA's name for it
    try:
        accelerators = [d for d in jax.devices() if d.platform != "cpu"]
    except (RuntimeError, AssertionError) as error:  # a platform that was asked for, by JAX_PLATFORMS, and is not here
        raise ConfigError(
            f"--device {device}: JAX cannot start a device here: {error!r}; use --device cpu, or unset JAX_PLATFORMS"
        ) from None
    if device == "gpu" and not any(d.platform == "gpu" for d in accelerators):
        raise ConfigError("--device gpu: JAX finds no GPU here; use --device cpu, or install jaxdist[cuda12]")
    axes = fixed or fitting(len(accelerators) or preset * processes or None)
    needed = math.prod(axes.values())
    if len(mine := shares(accelerators, needed // processes)) == needed:
        devices = mine
    elif device == "gpu":
        raise ConfigError(
            f"parallel.mesh = {parallel.mesh!r} needs {needed} devices, there are {len(accelerators)} GPUs; "
            f"use --mesh {parallel.mesh_of(len(accelerators))} or --device cpu"
        )
    else:
        devices = shares(jax.devices("cpu"), needed // processes)
    if len(devices) < needed:
        raise ConfigError(
            f"parallel.mesh = {parallel.mesh!r} needs {needed} devices, there are {len(devices)} CPU devices "
            f"(JAX_NUM_CPU_DEVICES); use --mesh {parallel.mesh_of(len(devices))} or unset JAX_NUM_CPU_DEVICES"
        )
    mesh = lay_out(axes, devices)
    return mesh, describe(mesh)


def settle(experiment: Experiment) -> None:
    """Have float64 where parameters are, and float32 as such: in products GPUs would take TF32, TPUs bfloat16."""
    jax.config.update("jax_enable_x64", experiment.precision.parameters == "float64")
    jax.config.update("jax_default_matmul_precision", "highest")


def shares(devices: Sequence[jax.Device], size: int) -> list[jax.Device]:
    """The first `size` devices of each process, or as many as it has."""
    seen: Counter[int] = Counter()
    taken = []
    for device in devices:
        seen[device.process_index] += 1
        if seen[device.process_index] <= size:
            taken.append(device)
    return taken


def own_gpus(size: int) -> str:
    """Indices of the visible GPUs that this process uses, as JAX expects them: `size` GPUs if processes share a machine
    and the launcher has not assigned them, else all."""
    here = world().neighbours
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if len(here) == 1 or (visible is not None and visible.count(",") + 1 == size):
        return "all"
    start = here.index(world().rank) * size
    return ",".join(str(number) for number in range(start, start + size))


def lay_out(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh with these axes over these devices."""
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=kinds)


def describe(mesh: Mesh) -> str:
    """One line that describes the devices of the mesh."""
    first, count = mesh.devices.flat[0], mesh.devices.size
    kind = "virtual CPU device" if first.platform == "cpu" else first.device_kind
    where = f" of {world().size} processes" if world().size > 1 else ""
    return f"running on {count} {kind}{'s' if count > 1 else ''}{where}"


def axes_of(mesh: Mesh) -> dict[str, int]:
    """Sizes of the mesh axes by name."""
    return dict(mesh.shape)
