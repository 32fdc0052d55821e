"""The families that jaxdist has, one row each, as a package from outside registers its own.

Neutral: a model, and the names that other formats have for it, are imported where they are first needed.
"""

from jaxdist.config.registry import BUILT_IN, FAMILIES, Family
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.families.mixtral.config import Mixture
from jaxdist.families.resnet.config import ResNet

HERE = "jaxdist.families"

for row in (
    Family(
        "llama",
        Llama,
        model=f"{HERE}.llama.model:Llama",
        tables=f"{HERE}.llama.huggingface:TABLES",
        huggingface=f"{HERE}.llama.huggingface:HUGGINGFACE",
        accounting=f"{HERE}.llama.accounting:ACCOUNTING",
        aliases={
            "llama2 llama3 llamaforcausallm": "",
            "mistral mistralforcausallm": "with model.window for its sliding window, if it has one",
            "qwen2 qwen2forcausallm": "with model.qkv_bias = true",
            "qwen3 qwen3forcausallm": "with model.qk_norm = true",
        },
    ),
    Family(
        "gpt2",
        GPT2,
        model=f"{HERE}.gpt2.model:GPT2",
        tables=f"{HERE}.gpt2.huggingface:TABLES",
        huggingface=f"{HERE}.gpt2.huggingface:HUGGINGFACE",
        accounting=f"{HERE}.gpt2.accounting:ACCOUNTING",
        aliases={"gpt_2 gpt gpt2lmheadmodel": ""},
        zero_gradients=("attention.k_proj.bias",),  # shifts all scores of a query alike: positions rotate no keys
    ),
    Family(
        "mixtral",
        Mixture,
        model=f"{HERE}.mixtral.model:Mixtral",
        tables=f"{HERE}.mixtral.huggingface:MIXTRAL_TABLES",
        huggingface=f"{HERE}.mixtral.huggingface:MIXTRAL_HUGGINGFACE",
        accounting=f"{HERE}.mixtral.accounting:ACCOUNTING",
        aliases={"mixtralforcausallm": ""},
    ),
    Family(
        "qwen3_moe",
        Mixture,
        model=f"{HERE}.mixtral.model:Mixtral",
        tables=f"{HERE}.mixtral.huggingface:QWEN3_MOE_TABLES",
        huggingface=f"{HERE}.mixtral.huggingface:QWEN3_MOE_HUGGINGFACE",
        accounting=f"{HERE}.mixtral.accounting:ACCOUNTING",
        aliases={"qwen3moe qwen3moeforcausallm": ""},
    ),
    Family(
        "resnet",
        ResNet,
        model=f"{HERE}.resnet.model:ResNet",
        tables=f"{HERE}.resnet.huggingface:TABLES",
        huggingface=f"{HERE}.resnet.huggingface:HUGGINGFACE",
        accounting=f"{HERE}.resnet.accounting:ACCOUNTING",
        aliases={"resnet50 resnetforimageclassification": ""},
    ),
):
    FAMILIES.register(row, BUILT_IN)
