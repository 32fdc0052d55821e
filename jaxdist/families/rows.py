"""The families that jaxdist has, each registered as a package from outside registers its own.

Neutral: a model is imported where it is built.
"""

from jaxdist.config.model import GPT2, Llama, Mixture, ResNet
from jaxdist.config.registry import Family, register_family

for row in (
    Family("llama", Llama, "jaxdist.families.llama.model:Llama"),
    Family("gpt2", GPT2, "jaxdist.families.gpt2.model:GPT2"),
    Family("mixtral", Mixture, "jaxdist.families.mixtral.model:Mixtral"),
    Family("qwen3_moe", Mixture, "jaxdist.families.mixtral.model:Mixtral"),
    Family("resnet", ResNet, "jaxdist.families.resnet.model:ResNet"),
):
    register_family(row)
