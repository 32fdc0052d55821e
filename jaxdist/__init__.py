"""Train in JAX on a mesh what PyTorch trains with DDP, FSDP and tensor parallelism, and prove it the same."""

__version__ = "0.1.0"
