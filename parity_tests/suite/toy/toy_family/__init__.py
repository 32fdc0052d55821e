"""A plugin with a decoder family: attention and MLP side by side, a partial rotation, a scaled embedding."""

import jaxdist
import torch_ref
from toy_family.config import Wide

jaxdist.register_family(
    jaxdist.Family(
        "wide",
        Wide,
        model="toy_family.model:Wide",
        tables="toy_family.names:TABLES",
        huggingface="toy_family.names:HUGGINGFACE",
    )
)
torch_ref.register_family(torch_ref.Family("wide", "toy_family.torch_model:Wide"))
