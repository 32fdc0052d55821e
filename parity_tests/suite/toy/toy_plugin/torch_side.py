"""Computations of the plugin in torch."""

from typing import Any

import torch


class Centered(torch.optim.Optimizer):
    """RMSprop by the variance of the gradient: g / (sqrt(E[g²] - E[g]²) + eps), decay decoupled."""

    def __init__(self, groups: Any, lr: float, beta: float, eps: float, weight_decay: float = 0.0):
        super().__init__(groups, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta, lr = group["beta"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["mean_grad"].mul_(beta).add_(p.grad, alpha=1 - beta)
                state["mean_square"].mul_(beta).addcmul_(p.grad, p.grad, value=1 - beta)
                variance = (state["mean_square"] - state["mean_grad"].square()).clamp_(min=0)
                p.mul_(1 - lr * group["weight_decay"])
                p.addcdiv_(p.grad, variance.sqrt_().add_(group["eps"]), value=-lr)


def centered(o: Any) -> dict[str, Any]:
    return {"beta": o.beta2, "eps": o.eps}
