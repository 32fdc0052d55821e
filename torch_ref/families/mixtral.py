"""Mixtral (arXiv:2401.04088) and, by config, Qwen3-MoE. Twin: jaxdist/families/mixtral/model.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.config import Experiment
from jaxdist.families.mixtral.config import Mixture as Config
from torch_ref.families.accounting import Accounting, flops_of_decoder
from torch_ref.families.layers import RMSNorm, RotaryDecoder, Rotation, at_least_f32, rotary
from torch_ref.families.llama import Attention
from torch_ref.families.loss import head
from torch_ref.parallel.context import Context
from torch_ref.parallel.experts import Dispatch, own


class Router(nn.Module):
    """Logits of the experts [B, T, E], in float32 or wider under any policy: fewer bits select other experts."""

    def __init__(self, c: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.experts, c.dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.linear(at_least_f32(x_BTD), at_least_f32(self.weight))


def choose(probabilities_BTE: Tensor, k: int) -> Tensor:
    """The k most probable experts [B, T, k]; of equal ones the first, which torch.topk leaves open."""
    return torch.argsort(probabilities_BTE, dim=-1, descending=True, stable=True)[..., :k]


def places(chosen_BTk: Tensor, count: int) -> Tensor:
    """Number of earlier choices of the same one of `count` experts in a sequence [B, T, k]."""
    chosen_BN = chosen_BTk.flatten(1)
    until_BNE = functional.one_hot(chosen_BN, count).cumsum(1)
    return until_BNE.gather(-1, chosen_BN[..., None]).view_as(chosen_BTk) - 1


def tally(probabilities_BTE: Tensor, chosen_BTk: Tensor, valid_BT: Tensor) -> Tensor:
    """Over the valid tokens, how many go to each expert, and the sum of its probabilities: [2, E]."""
    E, valid_BT1 = probabilities_BTE.shape[-1], valid_BT[..., None]
    count_E = torch.where(valid_BT1, chosen_BTk, E).flatten().bincount(minlength=E + 1)[:E]
    return torch.stack([count_E.to(probabilities_BTE.dtype), torch.where(valid_BT1, probabilities_BTE, 0).sum((0, 1))])


class GroupedLinear(nn.Module):
    """A weight [outputs, inputs] for each expert."""

    def __init__(self, c: Config, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.experts, outputs, inputs))

    def forward(self, x_NI: Tensor, counts: list[int]) -> Tensor:
        """Outputs for rows sorted by expert, with a count of rows for each of this rank's experts."""
        parts = zip(x_NI.split(counts), own(self.weight), strict=True)
        return torch.cat([functional.linear(x, weight) for x, weight in parts])


class Experts(nn.Module):
    """Gated MLPs, SwiGLU (arXiv:2002.05202), each for its own rows."""

    context, dispatch = Context(), Dispatch()

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = GroupedLinear(c, c.dim, c.hidden)
        self.up_proj = GroupedLinear(c, c.dim, c.hidden)
        self.down_proj = GroupedLinear(c, c.hidden, c.dim)
        self.config = c

    def rows(self, x_ND: Tensor, counts: list[int]) -> Tensor:
        """Outputs for rows sorted by expert."""
        h_NF = functional.silu(self.gate_proj(x_ND, counts)) * self.up_proj(x_ND, counts)
        y_ND: Tensor = self.down_proj(h_NF, counts)
        return y_ND

    def taken(self, chosen_BTk: Tensor, valid_BT: Tensor) -> Tensor:
        """Whether an expert has capacity for a token [B, T, k]: per sequence, in order of time."""
        if not self.config.capacity:
            return torch.ones_like(chosen_BTk, dtype=torch.bool)
        E = self.config.experts
        # Which tokens are valid travels with the choices: those of others are E higher.
        marked_BSk = self.context.gather_sequence(torch.where(valid_BT[..., None], chosen_BTk, E + chosen_BTk))
        place_SBk = places(marked_BSk % E, E).swapaxes(0, 1)
        return self.context.rows(place_SBk).swapaxes(0, 1) < self.rooms(marked_BSk[..., 0] < E)[:, None, None]

    def rooms(self, valid_BS: Tensor) -> Tensor:
        """Tokens that an expert takes of each sequence [B], of whose times up to the last valid one."""
        S = valid_BS.shape[1]
        length_B = (valid_BS * torch.arange(1, S + 1, device=valid_BS.device)).amax(1)
        return torch.tensor([self.config.room(length) for length in range(S + 1)], device=valid_BS.device)[length_B]

    def forward(self, x_BTD: Tensor, weights_BTk: Tensor, chosen_BTk: Tensor, *, valid_BT: Tensor) -> Tensor:
        taken_BTk = self.taken(chosen_BTk, valid_BT)
        y_BTkD = self.dispatch(self.rows, x_BTD, chosen_BTk, taken_BTk, self.config.experts)
        return (at_least_f32(y_BTkD) * weights_BTk[..., None]).sum(2).to(x_BTD.dtype)


class Mixture(nn.Module):
    """The weighted sum of what the chosen experts make of each token, and the tally.

    `valid_BT` covers the times that tensor ranks share; the tally takes this rank's own part of them.
    """

    dispatch = Dispatch()

    def __init__(self, c: Config):
        super().__init__()
        self.router, self.experts = Router(c), Experts(c)
        self.top_k, self.norm_topk_prob = c.top_k, c.norm_topk_prob

    def forward(self, x_BTD: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        probabilities_BTE = self.router(x_BTD).softmax(-1)
        chosen_BTk = choose(probabilities_BTE, self.top_k)
        weights_BTk = probabilities_BTE.gather(-1, chosen_BTk)
        if self.norm_topk_prob:
            weights_BTk = weights_BTk / weights_BTk.sum(-1, keepdim=True)
        y_BTD = self.experts(x_BTD, weights_BTk, chosen_BTk, valid_BT=valid_BT)
        return y_BTD, tally(probabilities_BTE, chosen_BTk, self.dispatch.slice_sequence(valid_BT))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = Mixture(c)

    def forward(self, x_BTD: Tensor, so_far: Tensor, rotation: Rotation, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation)
        y_BTD, own_2E = self.mlp(self.mlp_norm(x_BTD), valid_BT)
        return x_BTD + y_BTD, so_far + own_2E


class Mixtral(RotaryDecoder):
    """Decoder: embedding, blocks, norm, head. Tokens [B, T] -> logits [B, T, V], and this rank's part of the balance
    loss.

    `valid_BT` marks the tokens that the balance counts and that an expert's room is measured by: those whose target
    has a loss. So neither depends on how far sequences are padded. By default all tokens are valid.
    """

    context, dispatch, masks_padding = Context(), Dispatch(), True

    def __init__(self, c: Config):
        super().__init__(c, Block)

    def forward(
        self, tokens_BT: Tensor, targets_SN: Tensor | None = None, valid_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if valid_BT is None:
            valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        x_BTD = self.embed(tokens_BT)
        cos, sin = rotary(self.config, self.context.size * tokens_BT.shape[1], like=x_BTD)
        rotation = self.context.rows(cos), self.context.rows(sin)
        tally_2E = at_least_f32(x_BTD).new_zeros(2, self.config.experts)
        for block in self.layers:
            x_BTD, tally_2E = block(x_BTD, tally_2E, rotation, valid_BT)
        return head(self, self.norm(x_BTD), targets_SN), self.balance(tally_2E)

    def balance(self, tally_2E: Tensor) -> Tensor:
        """This rank's part of balance · E · sum over experts of share · mean probability, over valid tokens and
        blocks; 0 where no token is valid."""
        c, (count_E, sum_E) = self.config, tally_2E
        count_E = self.dispatch.sum_over_tokens(count_E)
        entries = (count_E.sum() / c.top_k).clamp_min(1)  # tokens of all blocks
        loss: Tensor = c.balance * c.experts * (count_E / entries * sum_E / entries).sum()
        return loss


def flops(experiment: Experiment, model: nn.Module) -> float:
    """FLOPs of a step per token: of E experts those k multiply that a token goes to, whatever a capacity leaves out."""
    c: Any = experiment.model
    return flops_of_decoder(experiment, model, {"experts": c.top_k / c.experts})


ACCOUNTING = Accounting(flops, why="as experts have many or few rows, as the router chooses")
