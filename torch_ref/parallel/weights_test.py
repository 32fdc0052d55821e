import math

import torch

from jaxdist.families.llama.config import Llama
from torch_ref.families.models import build
from torch_ref.parallel.weights import draw, extended, fill, named

MODEL = Llama(dim=256, hidden=512, init_std=0.02, layers=8)


def test_a_value_depends_on_seed_and_name_only() -> None:
    shape = torch.Size((8, 8))
    torch.manual_seed(1)
    first = draw(MODEL, 0, "layers.0.mlp.up_proj.weight", shape)
    torch.manual_seed(2)
    draw(MODEL, 0, "layers.1.mlp.up_proj.weight", shape)
    assert torch.equal(draw(MODEL, 0, "layers.0.mlp.up_proj.weight", shape), first)
    assert not torch.equal(draw(MODEL, 1, "layers.0.mlp.up_proj.weight", shape), first)
    assert not torch.equal(draw(MODEL, 0, "layers.1.mlp.up_proj.weight", shape), first)


def test_residual_projections_are_narrower_norms_one_biases_zero() -> None:
    model = build(Llama(layers=8, qkv_bias=True, dim=256, hidden=512))
    fill(model, lambda name, shape: draw(MODEL, 0, name, shape))
    values = dict(named(model))
    assert math.isclose(values["layers.0.mlp.up_proj.weight"].std().item(), 0.02, rel_tol=0.02)
    assert math.isclose(values["layers.3.mlp.down_proj.weight"].std().item(), 0.02 / 4, rel_tol=0.02)
    assert math.isclose(values["layers.3.attention.o_proj.weight"].std().item(), 0.02 / 4, rel_tol=0.02)
    assert torch.equal(values["norm.weight"], torch.ones(256))
    assert not values["layers.0.attention.q_proj.bias"].any()


def test_new_rows_are_the_mean_and_counts_have_none() -> None:
    table = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(extended(table, torch.Size((5, 2))), torch.cat([table, table.mean(0).expand(2, -1)]))
    for full in table, torch.tensor(7):  # a batch counter has no rows
        assert extended(full, full.shape) is full
