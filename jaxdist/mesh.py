"""From `--mesh` and `--device` to devices and a `jax.sharding.Mesh`."""

import math
import os
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxdist.config import ConfigError, Experiment, whole_number

# Of XLA, per virtual CPU device. Each collective in progress holds one, and a device may be in one while the others are
# in another that does not depend on it: with as many threads as devices, which is XLA's choice, that can be a deadlock.
THREADS = 4


def make_mesh(experiment: Experiment, device: str) -> tuple[Mesh, str]:
    """The mesh over all axes, and one line that says what it runs on.

    Call it before anything else touches JAX: it also settles the platform, the number of virtual CPU devices and
    whether float64 exists. `auto` takes accelerators if there are enough, else as many virtual CPU devices as the mesh
    asks for. Raises ConfigError when the mesh and the devices do not fit.
    """
    if (world := whole_number("WORLD_SIZE")) > 1:
        raise ConfigError(
            f"WORLD_SIZE = {world}: a launcher started several processes, and one process runs all "
            "devices of the mesh; start the command without torchrun"
        )
    parallel = experiment.parallel

    def fitting(devices: int | None = None) -> dict[str, int]:
        axes = parallel.axes(devices)
        experiment.check_mesh(axes)
        return axes

    jax.config.update("jax_enable_x64", experiment.precision.parameters == "float64")
    fixed = None if "-1" in parallel.mesh else fitting()  # before any device is made
    preset = whole_number("JAX_NUM_CPU_DEVICES")
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if fixed and not preset:
        jax.config.update("jax_num_cpu_devices", math.prod(fixed.values()))
    virtual = preset or math.prod((fixed or {}).values())
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, THREADS * virtual)))  # XLA's name for it
    try:
        accelerators = [d for d in jax.devices() if d.platform != "cpu"]
    except (RuntimeError, AssertionError) as error:  # a platform that was asked for, by JAX_PLATFORMS, and is not here
        raise ConfigError(
            f"--device {device}: JAX cannot start a device here: {error!r}; use --device cpu, or unset JAX_PLATFORMS"
        ) from None
    if device == "gpu" and not any(d.platform == "gpu" for d in accelerators):
        raise ConfigError("--device gpu: JAX finds no GPU here; use --device cpu, or install jaxdist[cuda12]")
    axes = fixed or fitting(len(accelerators) or preset or None)
    needed = math.prod(axes.values())
    if accelerators and len(accelerators) >= needed:
        devices = accelerators[:needed]
    elif device == "gpu":
        raise ConfigError(
            f"parallel.mesh = {parallel.mesh!r} needs {needed} devices, there are {len(accelerators)} GPUs; "
            "use a smaller mesh or --device cpu"
        )
    else:
        devices = jax.devices("cpu")[:needed]
    if len(devices) < needed:
        raise ConfigError(
            f"parallel.mesh = {parallel.mesh!r} needs {needed} devices, there are {len(devices)} CPU devices "
            f"(JAX_NUM_CPU_DEVICES); use a smaller mesh or unset it"
        )
    mesh = lay_out(axes, devices)
    return mesh, describe(mesh)


def lay_out(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of these axes over as many devices."""
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=kinds)


def describe(mesh: Mesh) -> str:
    """What the mesh runs on, in one line."""
    first, count = mesh.devices.flat[0], mesh.devices.size
    kind = "virtual CPU device" if first.platform == "cpu" else first.device_kind
    return f"running on {count} {kind}{'s' if count > 1 else ''}"


def axes_of(mesh: Mesh) -> dict[str, int]:
    """Sizes of the mesh axes by name."""
    return dict(mesh.shape)
