"""Tensors by other names: mapping files, their rows and transforms, and suggestions for one."""
