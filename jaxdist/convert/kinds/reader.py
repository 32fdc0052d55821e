"""Reading of dtypes beyond numpy's on JAX's side, for the neutral readers of sources."""

from jaxdist.convert.entries import shapes_of
from jaxdist.convert.kinds import dcp_files, torch_files
from jaxdist.convert.kinds.torch_leaves import leaf
from jaxdist.formats.leaves import Reader

READER = Reader(torch_files.load, leaf, lambda folder: dcp_files.Tensors(folder).parameters, shapes_of)
