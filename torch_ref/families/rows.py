"""The families that torch_ref has, one row each, as a package from outside registers its own."""

from jaxdist.config.registry import BUILT_IN
from torch_ref.families.registry import FAMILIES, Family

MIXTRAL, MIXTRAL_FORMS = "torch_ref.families.mixtral:Mixtral", "torch_ref.families.mixtral:ACCOUNTING"
EXPERTS = {"layers.*.mlp": "", "layers.*.mlp.router": "norm"}  # the experts are entered by themselves
TALLY = "torch's pipeline stages cannot pass the expert tally on"

for row in (
    Family("llama", "torch_ref.families.llama:Llama", "torch_ref.families.llama:ACCOUNTING"),
    Family("gpt2", "torch_ref.families.gpt2:GPT2", "torch_ref.families.gpt2:ACCOUNTING"),
    Family("mixtral", MIXTRAL, MIXTRAL_FORMS, tensor=EXPERTS, no_pipeline=TALLY),
    Family("qwen3_moe", MIXTRAL, MIXTRAL_FORMS, tensor=EXPERTS, no_pipeline=TALLY),
    Family("resnet", "torch_ref.families.resnet:ResNet", "torch_ref.families.resnet:ACCOUNTING", "stages.*.*"),
):
    FAMILIES.register(row, BUILT_IN)
