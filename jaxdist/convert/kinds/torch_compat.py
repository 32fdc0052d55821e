"""torch's names that are not public, for its files. Seen in torch 2.11, 2.12 and 2.13.

`torch_compat_test.py` fails by name where a release drops one.
"""

from torch._C import PyTorchFileReader
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._weights_only_unpickler import Unpickler
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.utils._pytree import tree_map_only

__all__ = ["FakeTensor", "FakeTensorMode", "PyTorchFileReader", "StorageInfo", "Unpickler", "tree_map_only"]
