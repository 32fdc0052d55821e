"""ResNet (arXiv:1512.03385) as torchvision and Hugging Face compute it. Twin: torch_ref/families/resnet.py.

Shape letters: B batch, Y height, X width, C channels, D channels of the last stage, V classes.
"""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.families.layers import ColumnLinear, parameter, statistic
from jaxdist.families.resnet.config import ResNet as Config
from jaxdist.ops.varying import at_least_f32
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.rematerialization import Rematerialize

M = TypeVar("M", bound=nnx.Module)
Statistics = dict[str, jax.Array]  # by the path of each: what the forward pass makes of them


class Convolution(nnx.Module):
    """A kernel [Y, X, inputs, outputs] without a bias; padded so that a stride of 1 keeps height and width.

    Drawn from N(0, 2/(Y·X·outputs)) (arXiv:1502.01852, as torchvision's `kaiming_normal_(mode="fan_out")`).
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1):
        std = (2 / (size * size * outputs)) ** 0.5
        axes = ("kernel", "kernel", "channels", "filters")
        self.kernel = parameter((size, size, inputs, outputs), axes, std)
        self.stride, self.padding = stride, size // 2

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        strides, padding = (self.stride,) * 2, ((self.padding,) * 2,) * 2
        return lax.conv_general_dilated(
            x_BYXC, self.kernel[...], strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


class BatchNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) · scale + bias (arXiv:1502.03167), in float32 or wider, rounded once at the end.

    Mean and biased variance are those of the microbatch, on all devices or this one as `par` says, or when it is
    evaluated the running ones. These move by torch's rule: (1 - momentum) · old + momentum · new, of the unbiased
    variance.
    """

    def __init__(self, c: Config, size: int):
        self.scale = parameter((size,), ("filters",), mean=1.0)
        self.bias = parameter((size,), ("filters",))
        self.running_mean = statistic((size,))
        self.running_var = statistic((size,), 1.0)
        self.num_batches_tracked = statistic((), 0)
        self.eps, self.momentum, self.use_running_average = c.norm_eps, c.momentum, False

    def __call__(self, par: Parallel, x_BYXC: jax.Array) -> jax.Array:
        y_BYXC = at_least_f32(x_BYXC)
        if self.use_running_average:
            y_BYXC, var_C = y_BYXC - self.running_mean[...], self.running_var[...]
        else:
            count = par.normalized_together(y_BYXC[..., 0].size)
            mean_C = par.sum_over_images(y_BYXC.sum((0, 1, 2))) / count
            y_BYXC = y_BYXC - mean_C
            var_C = par.sum_over_images((y_BYXC * y_BYXC).sum((0, 1, 2))) / count
            self.track(mean_C, var_C, count)
        y_BYXC = y_BYXC * lax.rsqrt(var_C + self.eps)
        return (y_BYXC * at_least_f32(self.scale[...]) + at_least_f32(self.bias[...])).astype(x_BYXC.dtype)

    def track(self, mean_C: jax.Array, var_C: jax.Array, count: int) -> None:
        """Move the running statistics: no gradient goes through them."""
        for running, new in ((self.running_mean, mean_C), (self.running_var, var_C * (count / (count - 1)))):
            moved = (1 - self.momentum) * running[...] + self.momentum * lax.stop_gradient(new)
            running.set_value(moved.astype(running[...].dtype))
        self.num_batches_tracked.set_value(self.num_batches_tracked[...] + 1)


class ConvNorm(nnx.Module):
    """A convolution and its batch norm."""

    def __init__(self, c: Config, inputs: int, outputs: int, size: int, stride: int = 1):
        self.conv = Convolution(inputs, outputs, size, stride)
        self.norm = BatchNorm(c, outputs)

    def __call__(self, par: Parallel, x_BYXC: jax.Array) -> jax.Array:
        return self.norm(par, self.conv(x_BYXC))


def max_pool(x_BYXC: jax.Array) -> jax.Array:
    """3×3 max-pooling with stride 2."""
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    largest_BYXC: jax.Array = lax.reduce_window(x_BYXC, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    return largest_BYXC


class Block(nnx.Module):
    """relu(shortcut(x) + layers(x)): two 3×3 layers, or 1×1, 3×3 and 1×1; the stride is in the first 3×3."""

    def __init__(self, c: Config, inputs: int, outputs: int, stride: int):
        if c.block == "basic":
            layers = [ConvNorm(c, inputs, outputs, 3, stride), ConvNorm(c, outputs, outputs, 3)]
        else:
            inner = outputs // 4
            layers = [ConvNorm(c, inputs, inner, 1), ConvNorm(c, inner, inner, 3, stride)]
            layers += [ConvNorm(c, inner, outputs, 1)]
        self.layer = nnx.List(layers)
        self.shortcut = ConvNorm(c, inputs, outputs, 1, stride) if inputs != outputs or stride != 1 else None

    def __call__(self, par: Parallel, x_BYXC: jax.Array) -> jax.Array:
        y_BYXC = x_BYXC
        for i, layer in enumerate(self.layer):
            y_BYXC = layer(par, jax.nn.relu(y_BYXC) if i else y_BYXC)
        return jax.nn.relu(y_BYXC + (x_BYXC if self.shortcut is None else self.shortcut(par, x_BYXC)))


def apply(par: Parallel, path: str, module: M, x_BYXC: jax.Array) -> tuple[jax.Array, Statistics]:
    """`module`, called `path` in the model, gathered and applied to x; and its statistics from now on."""
    used = par.use(module)
    y_BYXC = used(par, x_BYXC)
    found = nnx.to_flat_state(nnx.state(used, nnx.BatchStat))
    return y_BYXC, {".".join(map(str, (path, *inner))): v.get_value() for inner, v in found}


def stage(c: Config, i: int, inputs: int) -> nnx.List[Block]:
    """Blocks of one width, of which the first halves height and width in all stages but the first."""
    width = c.widths[i]
    first = Block(c, inputs, width, stride=2 if i else 1)
    return nnx.List([first, *(Block(c, width, width, stride=1) for _ in range(1, c.depths[i]))])


class ResNet(nnx.Module):
    """Stem, max-pooling, stages, mean over places, head. Images [B, Y, X, C] -> logits [B, V], nothing to be added to
    the loss, and the running statistics from now on."""

    def __init__(self, c: Config):
        self.stem = ConvNorm(c, c.channels, c.stem, 7, stride=2)
        inputs = (c.stem, *c.widths)  # of each stage's first block
        self.stages = nnx.List([stage(c, i, inputs[i]) for i in range(len(c.depths))])
        self.head = ColumnLinear(c.widths[-1], c.classes, ("embed", "classes"), c.init_std, bias=True)
        self.config = c

    def __call__(
        self, par: Parallel, x_BYXC: jax.Array, rematerialize: Rematerialize
    ) -> tuple[jax.Array, int, Statistics]:
        x_BYXC, statistics = apply(par, "stem", self.stem, x_BYXC.astype(par.precision.compute))
        x_BYXC = max_pool(jax.nn.relu(x_BYXC))
        for i, blocks in enumerate(self.stages):
            for j, block in enumerate(blocks):
                x_BYXC, moved = rematerialize.block(partial(apply, par, f"stages.{i}.{j}"))(block, x_BYXC)
                statistics |= moved
        x_BD = at_least_f32(x_BYXC).mean((1, 2)).astype(x_BYXC.dtype)
        return par.use(self.head)(x_BD), 0, statistics
