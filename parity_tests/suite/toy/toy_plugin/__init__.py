"""A plugin with an optimizer, a strategy, a data source and a kind of checkpoint. Imports neither jax nor torch."""

import jaxdist
import torch_ref
from jaxdist.config import ALL

# RMSprop by the variance of the gradient.
jaxdist.register_optimizer(
    jaxdist.UpdateRule("centered", {"mean_grad": ALL, "mean_square": ALL}, "toy_plugin.jax_side:centered")
)
torch_ref.register_optimizer(
    torch_ref.UpdateRule("centered", "toy_plugin.torch_side:Centered", "toy_plugin.torch_side:centered")
)

# fsdp with gradients unsharded until the end of the step.
jaxdist.register_strategy(
    jaxdist.Strategy("fsdp_once", parameters=True, gradients=False, optimizer=True, reshards=True)
)

jaxdist.register_data_source(jaxdist.DataSource("squares", "toy_plugin.data:open_squares"))

jaxdist.register_checkpoint_kind(
    jaxdist.CheckpointKind("toy", "toy file", "toy_plugin.checkpoint:is_toy", "toy_plugin.checkpoint:find")
)
