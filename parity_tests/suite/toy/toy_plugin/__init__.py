"""A plugin: an optimizer and a strategy that jaxdist does not have. Imports neither jax nor torch."""

import jaxdist
import torch_ref
from jaxdist.config.optimizer import ALL

jaxdist.register_optimizer(
    jaxdist.UpdateRule("centered", {"mean_grad": ALL, "mean_square": ALL}, "toy_plugin.jax_side:centered")
)
torch_ref.register_optimizer(
    torch_ref.UpdateRule("centered", "toy_plugin.torch_side:Centered", "toy_plugin.torch_side:centered")
)

# fsdp whose gradients stay whole until the end of the step
jaxdist.register_strategy(
    jaxdist.Strategy("fsdp_once", parameters=True, gradients=False, optimizer=True, reshards=True)
)
