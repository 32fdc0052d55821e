"""The port of transformers' ViT to flax, proved: python -m parity_tests.examples.vit runs/vit"""

import numpy as np
import optax
from flax import nnx
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

from parity_tests.examples.flax_vit import ViT
from parity_tests.port.port import Port

size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56, "image_size": 16}
module = ViTForImageClassification(ViTConfig.from_dict(size | {"patch_size": 4, "num_labels": 5})).eval()
graph, parameters = nnx.split(ViT(size=16, patch=4, dim=32, layers=2, heads=4, hidden=56, classes=5))
images, labels = np.random.default_rng(0).normal(size=(10, 8, 16, 16, 3)), np.arange(80).reshape(10, 8) % 5


def jax_loss(p, b):  # type: ignore[no-untyped-def]
    return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, p)(b["images"]), b["labels"]).mean()


def torch_loss(m, b):  # type: ignore[no-untyped-def]
    return cross_entropy(m(b["images"].permute(0, 3, 1, 2)).logits, b["labels"])


batches = [{"images": x, "labels": y} for x, y in zip(images, labels, strict=True)]
Port(parameters, module, None, batches, jax_loss, torch_loss).main()
