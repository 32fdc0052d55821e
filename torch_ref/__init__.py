"""The PyTorch reference: the same experiment by DDP, ZeroRedundancyOptimizer, FSDP2 and tensor parallel."""

from torch_ref.families.registry import Family, register_family

__all__ = ["Family", "register_family"]
