"""Mixtral (arXiv:2401.04088) and, by config, Qwen3-MoE. Twin: torch_ref/families/mixtral.py."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.families.layers import RMSNorm, RotaryDecoder, parameter, scan_layers
from jaxdist.families.llama.model import Attention
from jaxdist.families.loss import head
from jaxdist.families.mixtral.config import Mixture as Config
from jaxdist.ops.grouped import grouped
from jaxdist.ops.rotary import Rotation, rotary
from jaxdist.ops.varying import at_least_f32
from jaxdist.parallel.collectives import Parallel, Routing
from jaxdist.parallel.rematerialization import Rematerialize

Flow = tuple[jax.Array, jax.Array]  # the residual [B, T, D], and so far the tally [2, E]


class Router(nnx.Module):
    """Logits of the experts [B, T, E], in float32 or wider under any policy: fewer bits select other experts."""

    def __init__(self, c: Config):
        self.kernel = parameter((c.dim, c.experts), ("embed", "choices"), c.init_std)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        kernel_DE = at_least_f32(self.kernel[...])
        return jnp.einsum("BTD,DE->BTE", at_least_f32(x_BTD), kernel_DE, precision=lax.Precision.HIGHEST)


def choose(probabilities_BTE: jax.Array, k: int) -> jax.Array:
    """The k most probable experts [B, T, k]; of equal ones the first, which torch.topk leaves open."""
    return jnp.argsort(probabilities_BTE, axis=-1, descending=True, stable=True)[..., :k].astype(jnp.int32)


def tally(probabilities_BTE: jax.Array, chosen_BTk: jax.Array, valid_BT: jax.Array) -> jax.Array:
    """Over the valid tokens, how many go to each expert, and the sum of its probabilities: [2, E]."""
    E, valid_BT1 = probabilities_BTE.shape[-1], valid_BT[..., None]
    choices_BTE = jax.nn.one_hot(chosen_BTk, E, dtype=probabilities_BTE.dtype).sum(2)
    return jnp.stack([jnp.where(valid_BT1, a_BTE, 0).sum((0, 1)) for a_BTE in (choices_BTE, probabilities_BTE)])


class GroupedLinear(nnx.Module):
    """A kernel [inputs, outputs] for each expert."""

    def __init__(self, c: Config, inputs: int, outputs: int, axes: tuple[str, str], std: float):
        self.kernel = parameter((c.experts, inputs, outputs), ("experts", *axes), std)

    def rows(self, x_NI: jax.Array, counts_E: jax.Array) -> jax.Array:
        """Outputs for rows sorted by expert, with `counts_E` rows for each of this device's experts."""
        return grouped(x_NI, self.kernel[...], counts_E)


class Experts(nnx.Module):
    """Gated MLPs, SwiGLU (arXiv:2002.05202), each for its own rows."""

    def __init__(self, c: Config):
        out_std = c.init_std / (2 * c.layers) ** 0.5
        self.gate_proj = GroupedLinear(c, c.dim, c.hidden, ("embed", "hidden"), c.init_std)
        self.up_proj = GroupedLinear(c, c.dim, c.hidden, ("embed", "hidden"), c.init_std)
        self.down_proj = GroupedLinear(c, c.hidden, c.dim, ("hidden", "embed"), out_std)

    def rows(self, x_ND: jax.Array, counts_E: jax.Array) -> jax.Array:
        """Outputs for rows sorted by expert; partial sums over tensor."""
        h_NF = jax.nn.silu(self.gate_proj.rows(x_ND, counts_E)) * self.up_proj.rows(x_ND, counts_E)
        return self.down_proj.rows(h_NF, counts_E)


class Mixture(nnx.Module):
    """The weighted sum of what the chosen experts make of each token, and the tally.

    `valid_BT` covers the times that tensor devices share; the tally takes this device's own part of them.
    """

    def __init__(self, c: Config):
        self.router, self.experts = Router(c), Experts(c)
        self.top_k, self.norm_topk_prob = c.top_k, c.norm_topk_prob

    def __call__(self, par: Parallel, x_BTD: jax.Array, valid_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        probabilities_BTE = jax.nn.softmax(self.router(x_BTD), axis=-1)
        chosen_BTk = choose(probabilities_BTE, self.top_k)
        weights_BTk = jnp.take_along_axis(probabilities_BTE, chosen_BTk, axis=-1)
        if self.norm_topk_prob:
            weights_BTk = weights_BTk / weights_BTk.sum(-1, keepdims=True)
        routing = Routing(par.enter(weights_BTk), par.enter(chosen_BTk), valid_BT)
        y_BTD = par.leave(par.experts(self.experts.rows, par.enter(x_BTD), routing))
        return y_BTD, tally(probabilities_BTE, chosen_BTk, par.slice_sequence(valid_BT.T).T)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: Config):
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = Mixture(c)

    def __call__(self, par: Parallel, flow: Flow, rotation: Rotation, valid_BT: jax.Array) -> Flow:
        x_BTD, so_far = flow
        x_BTD = x_BTD + self.attention(par, par.enter(self.attention_norm(x_BTD)), rotation)
        y_BTD, own = self.mlp(par, self.mlp_norm(x_BTD), valid_BT)
        return x_BTD + y_BTD, so_far + own


class Mixtral(RotaryDecoder):
    """Decoder: embedding, blocks, norm, head. Tokens int32 [B, T] -> this device's logits, and this device's part of
    the balance loss.

    `valid_BT` marks the tokens that the balance counts and that an expert's room is measured by: those whose target
    has a loss. So neither depends on how far sequences are padded. By default all tokens are valid.
    """

    masks_padding = True

    def __init__(self, c: Config):
        super().__init__(c, Block)

    def __call__(
        self,
        par: Parallel,
        tokens_BT: jax.Array,
        rematerialize: Rematerialize,
        targets_SN: jax.Array | None = None,
        valid_BT: jax.Array | None = None,
    ) -> Flow:
        if valid_BT is None:
            valid_BT = jnp.ones_like(tokens_BT, dtype=bool)
        embed = par.use(self.embed)
        x_BTD = embed(par, tokens_BT)
        rotation = jax.tree.map(par.context.rows, rotary(self.config, par.length(tokens_BT), x_BTD.dtype))
        nothing = jnp.zeros_like(at_least_f32(x_BTD), shape=(2, self.config.experts))
        x_BTD, tally_2E = scan_layers(par, self.layers, (x_BTD, nothing), rematerialize, rotation, valid_BT)
        return head(par, self, embed, par.use(self.norm)(x_BTD), targets_SN), self.balance(par, tally_2E)

    def balance(self, par: Parallel, tally_2E: jax.Array) -> jax.Array:
        """This device's part of balance · E · sum over experts of share · mean probability, over valid tokens and
        blocks; 0 where no token is valid."""
        c, (count_E, sum_E) = self.config, par.sum_over_sequence(tally_2E)
        count_E = par.sum_over_tokens(count_E)
        entries = jnp.maximum(count_E.sum() / c.top_k, 1)  # tokens of all blocks
        loss: jax.Array = c.balance * c.experts * (count_E / entries * sum_E / entries).sum()
        return loss
