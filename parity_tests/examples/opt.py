"""transformers' OPT against one in jaxdist's sharding, on a mesh: python -m parity_tests.examples.opt runs/opt"""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
import numpy as np
from torch.nn.functional import cross_entropy
from transformers import OPTConfig, OPTForCausalLM

from parity_tests.examples.sharded_opt import OPT
from parity_tests.port.port import Port
from parity_tests.port.sharded import Sharded

size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 64}
more = {"word_embed_proj_dim": 32, "max_position_embeddings": 24, "pad_token_id": None}
module = OPTForCausalLM(OPTConfig.from_dict(size | more)).eval()
model = OPT(vocab=64, positions=24, dim=32, layers=2, heads=4, hidden=48)
sharded = Sharded(model, sections={"parallel": {"mesh": "2x4"}, "train": {"accumulation": 2}})
tokens = np.random.default_rng(0).integers(64, size=(10, 8, 17))


def torch_loss(m, b):  # type: ignore[no-untyped-def]
    return cross_entropy(m(b["tokens"], b["mask"]).logits.flatten(0, 1), b["targets"].flatten())


batches = [{"tokens": x[:, :-1], "targets": x[:, 1:], "mask": np.ones((8, 16), np.int64)} for x in tokens]
Port(sharded.parameters(), module, None, batches, torch_loss=torch_loss, sharded=sharded).main()
