"""The PyTorch reference: the same experiment by DDP, ZeroRedundancyOptimizer, FSDP2 and tensor parallel."""
