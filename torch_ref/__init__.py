"""The PyTorch reference: the same experiment by DDP, ZeroRedundancyOptimizer, FSDP2 and tensor parallel."""

from torch_ref.families.registry import Family, register_family
from torch_ref.training.registry import UpdateRule, register_optimizer

__all__ = ["Family", "UpdateRule", "register_family", "register_optimizer"]
