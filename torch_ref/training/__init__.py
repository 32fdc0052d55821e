"""One step of training and all it needs: strategies, optimizer, record, metrics, checkpoints.

Imports every room of torch_ref but `accounting`, and the neutral rooms of jaxdist.
"""
