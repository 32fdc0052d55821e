"""Facts of devices, from the makers' data sheets."""

# Dense bfloat16 matrix rate in FLOP/s, by a part of the name that JAX and CUDA give the device.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}


def peak_flops(kind: str) -> float | None:
    """The rate of a device of this name; None where it is unknown."""
    return next((rate for name, rate in PEAK_FLOPS.items() if name in kind), None)
