"""Mistakes in what torch_ref does around its models: data, starting weights, clip, update rules, schedule."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jaxdist.data import IGNORED, Batch, Dataset
from parity_tests.validation.mistakes import altered, everywhere, mistake, plant
from torch_ref.families import loss
from torch_ref.parallel.weights import local, named
from torch_ref.training import checkpoint, matrices, optim

planted = partial(mistake, "torch_ref")


# ---- data and starting weights


@planted("llama", "mathematics", "batch/tokens")
def another_shuffle() -> None:
    """Sequences are shuffled by another seed."""
    right = Dataset.batch

    def batch(self: Dataset, step: int, size: int, seed: int, **more: Any) -> Batch:
        return right(self, step, size, seed + 1, **more)

    plant(Dataset, "batch", batch)


@planted("llama", "mathematics", "batch/targets")
def targets_not_shifted() -> None:
    """Each token is to predict itself."""
    right = Dataset.batch

    def batch(*inputs: Any, **more: Any) -> Batch:
        tokens, targets = right(*inputs, **more)
        targets[:, :] = tokens
        return Batch(tokens, targets)

    plant(Dataset, "batch", batch)


def loaded(change: Any) -> None:
    """Plant `change` of the weights, by name, that a run starts from."""
    right = checkpoint.initialize

    @torch.no_grad()
    def initialize(path: Any, model: nn.Module, config: Any) -> None:
        right(path, model, config)
        change(dict(named(model)))

    plant(checkpoint, "initialize", initialize)


@planted("llama", "mathematics", "start/layers.1.mlp_norm.weight")
def norm_not_loaded() -> None:
    """One norm keeps its ones."""
    loaded(lambda w: w["layers.1.mlp_norm.weight"].fill_(1))


@planted("gpt2", "mathematics", "start/layers.0.attention.o_proj.weight")
def square_matrix_transposed() -> None:
    """A matrix that is square, so that no shape gives it away, is loaded transposed."""

    def change(w: Any) -> None:
        square = local(w["layers.0.attention.o_proj.weight"])
        square.copy_(square.T.clone())

    loaded(change)


@planted("llama", "mathematics", "start/embed.weight")
def loaded_through_bfloat16() -> None:
    """The file of the starting weights was saved in bfloat16."""
    loaded(lambda w: [p.copy_(p.bfloat16()) for p in w.values()])


# ---- loss, gradients and clip


@planted("accumulation", "mathematics", "loss")
def loss_divided_twice() -> None:
    """The loss, divided by the tokens of the whole batch, is divided by the number of microbatches as well."""
    right = loss.cross_entropy
    everywhere(right, lambda *inputs: right(*inputs) / 2)


@planted("llama", "mathematics", "loss")
def mean_by_the_loss_function() -> None:
    """Each row is divided by its own number of tokens."""
    right = loss.cross_entropy

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        counts = (targets != IGNORED).sum(1)
        rows = [right(x[None], y[None]) / n for x, y, n in zip(logits, targets, counts, strict=True)]
        return torch.stack(rows).mean() * counts.sum()

    everywhere(right, cross_entropy)


@planted("chunks", "mathematics", "loss")
def mean_times_the_size_of_a_chunk() -> None:
    """A chunk of the loss is the mean over its targets times all of its tokens, of which some have no target."""
    right = loss.cross_entropy

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return right(logits, targets) * targets.numel() / (targets != IGNORED).sum()

    plant(loss, "cross_entropy", cross_entropy)


@planted("chunks", "mathematics", "gradient/lm_head.weight")
def head_learns_from_one_chunk() -> None:
    """The head's weight is detached for the chunks of the loss but the last, so that none of them keeps a gradient."""
    right = loss.cross_entropy_of_chunks

    def cross_entropy_of_chunks(x_BTD: Tensor, weight_VD: Tensor, targets_SN: Tensor, *rest: Any) -> Tensor:
        others, last = targets_SN.clone(), targets_SN.clone()
        others[-1], last[:-1] = IGNORED, IGNORED
        return right(x_BTD, weight_VD.detach(), others, *rest) + right(x_BTD, weight_VD, last, *rest)

    everywhere(right, cross_entropy_of_chunks)


@planted("llama", "mathematics", "gradient/*")
def gradients_not_zeroed() -> None:
    """`zero_grad` is forgotten: gradients of all steps add up."""
    plant(nn.Module, "zero_grad", lambda self, set_to_none=True: None)


@planted("accumulation", "mathematics", "gradient/*")
def gradients_zeroed_between_microbatches() -> None:
    """`zero_grad` stands within the loop: the last microbatch is all that counts, though the loss is right."""
    right = nn.Module.__call__

    def call(self: Any, *inputs: Any, **more: Any) -> Any:
        if hasattr(self, "lm_head"):
            self.zero_grad()
        return right(self, *inputs, **more)

    plant(nn.Module, "__call__", call)


def clipping(scale: Any) -> None:
    """Plant a clip that gets the norm right and then does `scale(parameters, largest, norm)`."""

    def clip(parameters: Any, largest: float, of_all: Tensor | None = None) -> Tensor:
        parameters = list(parameters)
        norm = optim.global_norm(p.grad for p in parameters) if of_all is None else of_all
        scale(parameters, largest, norm)
        return norm

    everywhere(optim.clip, clip)


@planted("llama", "mathematics", "clipped/*")
def clip_a_thousandth_wider() -> None:
    """The largest norm is 0.1 % more."""
    clipping(lambda ps, largest, norm: nn.utils.clip_grads_with_norm_(ps, 1.001 * largest, norm))


@planted("llama", "mathematics", "clipped/embed.weight")
def clip_leaves_one_out() -> None:
    """The embedding's gradient is in the norm and is not scaled."""
    clipping(lambda ps, largest, norm: nn.utils.clip_grads_with_norm_(ps[1:], largest, norm))


@planted("llama", "mathematics", "clipped/*")
def clip_by_value() -> None:
    """Each number is clipped, not the norm of all."""
    clipping(lambda ps, largest, norm: [p.grad.clamp_(-0.01, 0.01) for p in ps])


@planted("llama", "mathematics", "clipped/*")
def clip_each_tensor() -> None:
    """Each tensor is clipped by its own norm."""
    clipping(lambda ps, largest, norm: [nn.utils.clip_grads_with_norm_([p], largest, p.grad.norm()) for p in ps])


# ---- loss scale


@planted("scaled", "mathematics", "gradient/*")
def clip_before_the_loss_scale_is_out() -> None:
    """`unscale_` is not called before the clip; the scaler's step calls it after."""
    plant(optim.Optimizer, "unscale", lambda self: self.scaler.get_scale())


@planted("fp16", "precision", "activation_gradient/logits")
def loss_scale_that_does_not_back_off() -> None:
    """An overflow leaves the scale as it was."""
    right = optim.Optimizer.__init__

    def init(self: optim.Optimizer, *inputs: Any) -> None:
        right(self, *inputs)
        self.scaler.set_backoff_factor(1.0)

    plant(optim.Optimizer, "__init__", init)


# ---- update rules


def optimizer(change: Any) -> None:
    """Plant `change` of the optimizer that has been made."""
    right = optim.Optimizer.__init__

    def init(self: Any, *inputs: Any) -> None:
        right(self, *inputs)
        change(self)

    plant(optim.Optimizer, "__init__", init)


@planted("llama", "mathematics", "weights/*")
def adam_eps_ten_times() -> None:
    """Adam's eps is 1e-7."""
    optimizer(lambda self: [group.update(eps=10 * group["eps"]) for group in self.optimizer.param_groups])


@planted("llama", "mathematics", "weights/*")
def bias_correction_one_step_on() -> None:
    """The bias correction counts from 2."""
    optimizer(lambda self: [state["step"].add_(1) for state in self.state.values()])


@planted("llama", "mathematics", "exp_avg/*")
def decay_in_the_gradient() -> None:
    """Weight decay is added to the gradient (L2), not taken off the weights."""
    right = optim.rule_of
    plant(optim, "rule_of", lambda o: right(o.model_copy(update={"name": "adam"}) if o.name == "adamw" else o))


@planted("llama", "mathematics", "weights/embed.weight")
def embedding_does_not_decay() -> None:
    """The embedding is exempt from weight decay."""

    def change(self: Any) -> None:
        matrices, others = self.optimizer.param_groups
        embedding = self.locals["embed.weight"]
        matrices["params"] = [p for p in matrices["params"] if p is not embedding]
        others["params"].append(embedding)

    optimizer(change)


@planted("llama", "mathematics", "exp_avg/norm.weight")
def one_parameter_forgotten() -> None:
    """The last norm is in no group of the optimizer: neither its moments nor its weights move."""

    def change(self: Any) -> None:
        _, others = self.optimizer.param_groups
        others["params"] = [p for p in others["params"] if p is not self.locals["norm.weight"]]

    optimizer(change)


@planted("llama", "mathematics", "exp_avg_sq/*")
def beta2_of_torch() -> None:
    """beta2 is torch's default of 0.999."""
    optimizer(lambda self: [g.update(betas=(g["betas"][0], 0.999)) for g in self.optimizer.param_groups])


@planted("llama", "memory", "memory/optimizer_state*")
def master_weights_twice() -> None:
    """The optimizer keeps a copy of the weights that are master weights already."""
    optimizer(lambda self: [state.update(master=self.locals[name].clone()) for name, state in self.state.items()])


@planted("bf16", "precision", "precision/torch_ref, states in float32 or wider*", "exp_avg/*")
def moments_rounded_to_bfloat16() -> None:
    """Adam's moments are kept in float32 and lose, after each step, what bfloat16 has not."""
    right = optim.Optimizer.step

    def step(self: optim.Optimizer, *inputs: Any) -> float:
        rate = right(self, *inputs)
        for state in self.optimizer.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind].copy_(state[kind].bfloat16())
        return rate

    plant(optim.Optimizer, "step", step)


@planted("sgd", "mathematics", "weights/*")
def nesterov_left_out() -> None:
    """sgd steps along its momentum."""
    optimizer(lambda self: [group.update(nesterov=False) for group in self.optimizer.param_groups])


@planted("lion", "mathematics", "exp_avg/*")
def lion_with_one_beta() -> None:
    """beta1 decays the moment from step to step, too."""
    optimizer(lambda self: [g.update(betas=(g["betas"][0],) * 2) for g in self.optimizer.param_groups])


@planted("adafactor", "distribution", "weights/*")
def update_not_clipped() -> None:
    """adafactor's update may be as large as it comes."""
    optimizer(lambda self: [group.update(d=1e9) for group in self.optimizer.param_groups])


@planted("adafactor", "distribution", "row_var/*", "col_var/*")
def sums_of_the_own_piece() -> None:
    """adafactor's sums are of a rank's piece, and not of the whole."""
    plant(matrices, "dist", altered(dist, all_reduce=lambda *_, **__: None))


@planted("muon", "distribution", "weights/layers.*")
def muon_without_nesterov() -> None:
    """muon steps along its momentum."""
    optimizer(lambda self: [group.update(nesterov=False) for group in self.optimizer.param_groups])


@planted("muon", "distribution", "weights/layers.*")
def orthogonal_by_pieces_of_a_rank() -> None:
    """muon makes each rank's piece of a matrix orthogonal."""
    plant(matrices.Pieces, "gathered", lambda self, piece, x: x)
    plant(matrices.Pieces, "piece_of", lambda self, piece, full: full)


@planted("adam", "mathematics", "ema/*")
def average_from_the_start() -> None:
    """The first update does not replace the weights that the average began with."""
    right = optim.Optimizer._average

    def average(self: optim.Optimizer) -> None:
        states = self.state.values()
        for state in states:
            state["step"] += 1
        right(self)
        for state in states:
            state["step"] -= 1

    plant(optim.Optimizer, "_average", average)


# ---- schedule


def schedule(change: Any) -> None:
    """Plant a learning rate of `change(right, o, steps, step)`."""
    right = optim.learning_rate
    everywhere(right, lambda *inputs: change(right, *inputs))


@planted("llama", "mathematics", "learning_rate")
def schedule_one_step_ahead() -> None:
    """The scheduler steps before the optimizer."""
    schedule(lambda right, o, steps, step: right(o, steps, step + 1))


@planted("llama", "mathematics", "learning_rate")
def warmup_one_longer() -> None:
    """Warm-up divides by warmup + 1."""
    schedule(lambda right, o, steps, s: o.learning_rate * s / (o.warmup + 1) if s <= o.warmup else right(o, steps, s))


@planted("llama", "mathematics", "learning_rate")
def linear_for_cosine() -> None:
    """The learning rate falls along a line."""
    schedule(lambda right, o, *rest: right(o.model_copy(update={"decay": "linear"}), *rest))
