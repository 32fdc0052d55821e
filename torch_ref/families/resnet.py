"""ResNet (arXiv:1512.03385) as torchvision and Hugging Face compute it. Twin: jaxdist/families/resnet/model.py.

Shape letters: B batch, C channels, Y height, X width, D channels of the last stage, V classes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.config import Experiment
from jaxdist.families.resnet.config import ResNet as Config
from torch_ref.families.accounting import Accounting
from torch_ref.families.layers import at_least_f32
from torch_ref.parallel.images import Images
from torch_ref.parallel.weights import named
from torch_ref.runtime.compat import AfterApply


class Convolution(nn.Conv2d):
    """A kernel [outputs, inputs, Y, X] without a bias; padded so that a stride of 1 keeps height and width."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1):
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)


class BatchNorm(AfterApply, nn.BatchNorm2d):
    """(x - mean) / sqrt(var + eps) · weight + bias (arXiv:1502.03167), in float32 or wider, rounded once at the end.

    Mean and biased variance are those of the microbatch, on all ranks or this one as `images` says, or when it is
    evaluated the running ones. These move by torch's rule: (1 - momentum) · old + momentum · new, of the unbiased
    variance.
    """

    images = Images()

    def __init__(self, c: Config, size: int):
        super().__init__(size, c.norm_eps, c.momentum)

    def applied(self) -> None:
        """`to` a narrower dtype leaves running statistics wide."""
        self.running_mean, self.running_var = map(at_least_f32, (self.running_mean, self.running_var))  # type: ignore[arg-type]

    def forward(self, x_BCYX: Tensor) -> Tensor:
        y_BCYX = at_least_f32(x_BCYX)
        if not self.training:
            y_BCYX, var_C = y_BCYX - each(self.running_mean), self.running_var
        else:
            count = self.images.normalized_together(y_BCYX[:, 0].numel())
            mean_C = self.images.sum_over_images(y_BCYX.sum((0, 2, 3))) / count
            y_BCYX = y_BCYX - each(mean_C)
            var_C = self.images.sum_over_images((y_BCYX * y_BCYX).sum((0, 2, 3))) / count
            self.track(mean_C, var_C, count)
        y_BCYX = y_BCYX * torch.rsqrt(each(var_C) + self.eps)
        return (y_BCYX * each(at_least_f32(self.weight)) + each(at_least_f32(self.bias))).to(x_BCYX.dtype)

    @torch.no_grad()
    def track(self, mean_C: Tensor, var_C: Tensor, count: int) -> None:
        """Move the running statistics: no gradient goes through them."""
        momentum = float(self.momentum or 0)
        for running, new in ((self.running_mean, mean_C), (self.running_var, var_C * (count / (count - 1)))):
            running.copy_((1 - momentum) * running + momentum * new)  # type: ignore[union-attr, operator]
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]


def each(x_C: Tensor | None) -> Tensor:
    """A number for each channel, against [B, C, Y, X]."""
    assert x_C is not None
    return x_C[:, None, None]


class ConvNorm(nn.Module):
    """A convolution and its batch norm."""

    def __init__(self, c: Config, inputs: int, outputs: int, size: int, stride: int = 1):
        super().__init__()
        self.conv = Convolution(inputs, outputs, size, stride)
        self.norm = BatchNorm(c, outputs)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        y_BCYX: Tensor = self.norm(self.conv(x_BCYX))
        return y_BCYX


def max_pool(x_BCYX: Tensor) -> Tensor:
    """3×3 max-pooling with stride 2."""
    return functional.max_pool2d(x_BCYX, 3, stride=2, padding=1)


class Block(nn.Module):
    """relu(shortcut(x) + layers(x)): two 3×3 layers, or 1×1, 3×3 and 1×1; the stride is in the first 3×3."""

    def __init__(self, c: Config, inputs: int, outputs: int, stride: int):
        super().__init__()
        if c.block == "basic":
            layers = [ConvNorm(c, inputs, outputs, 3, stride), ConvNorm(c, outputs, outputs, 3)]
        else:
            inner = outputs // 4
            layers = [ConvNorm(c, inputs, inner, 1), ConvNorm(c, inner, inner, 3, stride)]
            layers += [ConvNorm(c, inner, outputs, 1)]
        self.layer = nn.ModuleList(layers)
        self.shortcut = ConvNorm(c, inputs, outputs, 1, stride) if inputs != outputs or stride != 1 else None

    def forward(self, x_BCYX: Tensor) -> Tensor:
        y_BCYX = x_BCYX
        for i, layer in enumerate(self.layer):
            y_BCYX = layer(functional.relu(y_BCYX) if i else y_BCYX)
        return functional.relu(y_BCYX + (x_BCYX if self.shortcut is None else self.shortcut(x_BCYX)))


def stage(c: Config, i: int, inputs: int) -> nn.ModuleList:
    """Blocks of one width, of which the first halves height and width in all stages but the first."""
    width = c.widths[i]
    first = Block(c, inputs, width, stride=2 if i else 1)
    return nn.ModuleList([first, *(Block(c, width, width, stride=1) for _ in range(1, c.depths[i]))])


class ResNet(nn.Module):
    """Stem, max-pooling, stages, mean over places, head. Images [B, Y, X, C] -> logits [B, V]."""

    def __init__(self, c: Config):
        super().__init__()
        self.stem = ConvNorm(c, c.channels, c.stem, 7, stride=2)
        inputs = (c.stem, *c.widths)  # of each stage's first block
        self.stages = nn.ModuleList(stage(c, i, inputs[i]) for i in range(len(c.depths)))
        self.head = nn.Linear(c.widths[-1], c.classes)
        self.config = c

    def forward(self, x_BYXC: Tensor) -> Tensor:
        x_BCYX = x_BYXC.movedim(-1, 1).to(self.head.weight.dtype)
        x_BCYX = max_pool(functional.relu(self.stem(x_BCYX)))
        for blocks in self.stages:
            for block in blocks:  # type: ignore[attr-defined]
                x_BCYX = block(x_BCYX)
        x_BD = at_least_f32(x_BCYX).mean((2, 3)).to(x_BCYX.dtype)
        logits_BV: Tensor = self.head(x_BD)
        return logits_BV


def flops(experiment: Experiment, model: nn.Module) -> float:
    """FLOPs of a step per image: 6 a kernel's number at every place of what it puts out."""
    c: Any = experiment.model
    kernels = {name.removesuffix(".weight"): p for name, p in named(model) if p.ndim > 1}
    flops: float = 6.0 * sum(p.numel() * c.places(path) for path, p in kernels.items())
    return flops


ACCOUNTING = Accounting(flops, why="as the activations that torch keeps of a ResNet are unknown")
