"""The model section of image classifiers: fields that all of them have, and their checks."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxdist.config.checks import check_rows
from jaxdist.config.errors import ConfigError
from jaxdist.config.model import Model
from jaxdist.config.optimizer import OPTIMIZERS
from jaxdist.config.parallel import written
from jaxdist.config.section import Count

if TYPE_CHECKING:
    from jaxdist.config.experiment import Experiment


class ImageModel(Model):
    """Fields of every image classifier."""

    input_kind: ClassVar[Literal["tokens", "images"]] = "images"
    sample_unit: ClassVar[str] = "images"
    free: ClassVar[frozenset[str]] = Model.free | {"image"}
    tied: ClassVar[bool] = False

    channels: Count = 3
    """Channels of an image: 3 for colours, 1 for grey."""
    image: Count = 224
    """Height and width of an image, in pixels."""
    classes: Count = 1000
    """Classes, V."""

    @property
    def vocab(self) -> int:
        """Outputs of the head, V."""
        return self.classes

    @property
    def least_places(self) -> int:
        """Smallest number of spatial positions per image over which a batch norm computes statistics."""
        return 1

    @property
    def sharded_widths(self) -> frozenset[int]:
        """Channel counts that the fsdp axis size must divide."""
        return frozenset()

    def input_shape(self, sequence: int) -> tuple[int, ...]:
        return (self.image, self.image, self.channels)

    def describe_rows(self, sequence: int) -> str:
        return f"images of {self.image}×{self.image}×{self.channels}"

    def check(self, e: "Experiment") -> None:
        if e.memory.loss_chunks > 1:
            raise ValueError(
                f"memory.loss_chunks = {e.memory.loss_chunks} with model.family = {self.family}, which has one "
                "row of logits for each image; leave it out"
            )
        if e.memory.remat != "none" or e.memory.offload:
            setting = f"memory.remat = {e.memory.remat}"
            if e.memory.remat == "none":
                setting = f"memory.offload = {','.join(e.memory.offload)}"
            raise ValueError(
                f"{setting} with model.family = {self.family}: a batch norm that is computed again would move its "
                "running statistics twice, as in torch, and nothing of an image model waits on the host; leave it out"
            )
        for field, values in (("pixel_mean", e.data.pixel_mean), ("pixel_std", e.data.pixel_std)):
            if len(values) not in (1, self.channels):
                raise ValueError(
                    f"data.{field} has {len(values)} numbers, and model.channels = {self.channels}; give one, or one "
                    "for each channel"
                )
        if OPTIMIZERS[e.optimizer.name].matrices_alone:
            raise ValueError(
                f"optimizer.name = {e.optimizer.name} with model.family = {self.family}: it is of matrices alone; "
                "use adamw"
            )
        if not all(e.data.pixel_std):
            raise ValueError("data.pixel_std = 0 divides by nothing; use data.pixel_std = 1 for unscaled pixels")

    def check_mesh(self, e: "Experiment", axes: Mapping[str, int]) -> None:
        """Raises ConfigError for axes that images have no use for, and where a batch norm would see one number."""
        for axis, size in axes.items():
            if size > 1 and axis not in ("data", "fsdp"):
                raise ConfigError(
                    f"parallel.mesh: axis {axis} = {size} with model.family = {self.family}, which is split by rows "
                    f"of the batch alone; use --mesh fsdp={size}, or --mesh data={size} --strategy ddp"
                )
        if e.parallel.sequence:
            raise ConfigError(
                f"parallel.sequence = true splits sequences, and model.family = {self.family} has none; leave it out"
            )
        check_rows(e, axes)
        train, replicas = e.train, axes["data"] * axes["fsdp"]
        together = train.batch // train.accumulation // (1 if e.parallel.batch_norm == "global" else replicas)
        if together * self.least_places == 1:
            raise ConfigError(
                f"train.batch = {train.batch} leaves a batch norm one number for each channel, which has no variance; "
                "use a larger batch or model.image, or parallel.batch_norm = global"
            )
        if not e.parallel.row.optimizer:
            return
        widths = self.sharded_widths
        if bad := sorted(width for width in widths if width % axes["fsdp"]):
            fsdp = math.gcd(axes["fsdp"], *widths)
            raise ConfigError(
                f"model.widths: {bad[0]} channels cannot be divided over the mesh axis fsdp = {axes['fsdp']}; use "
                f"--mesh {written({**axes, 'fsdp': fsdp})}{'' if e.pinned else ', or multiples of it'}"
            )
