"""The families that torch_ref has, one row each, as a package from outside registers its own."""

from jaxdist.config.registry import OURS
from torch_ref.families.registry import FAMILIES, Family

for row in (
    Family("llama", "torch_ref.families.llama:Llama", "torch_ref.families.llama:ACCOUNTING"),
    Family("gpt2", "torch_ref.families.gpt2:GPT2", "torch_ref.families.gpt2:ACCOUNTING"),
    Family("mixtral", "torch_ref.families.mixtral:Mixtral", "torch_ref.families.mixtral:ACCOUNTING"),
    Family("qwen3_moe", "torch_ref.families.mixtral:Mixtral", "torch_ref.families.mixtral:ACCOUNTING"),
    Family("resnet", "torch_ref.families.resnet:ResNet", "torch_ref.families.resnet:ACCOUNTING"),
):
    FAMILIES.register(row.name, row, OURS)
