"""The model section of ResNet."""

import math
import reprlib
from typing import ClassVar, Literal

from pydantic import model_validator

from jaxdist.config import ImageModel
from jaxdist.config.section import Count, Counts, Share

MOST_BLOCKS = 1_000  # blocks are modules of their own


class ResNet(ImageModel):
    """ResNet (arXiv:1512.03385) as torchvision and Hugging Face compute it, the stride of a bottleneck in its 3×3."""

    free: ClassVar[frozenset[str]] = ImageModel.free | {"momentum"}

    family: Literal["resnet"]
    """resnet: images to classes, with batch norm."""
    block: Literal["basic", "bottleneck"] = "bottleneck"
    """basic: two 3×3 convolutions (ResNet-18, 34); bottleneck: 1×1, 3×3, 1×1 (50, 101, 152)."""
    depths: Counts = (3, 4, 6, 3)
    """Blocks of each stage; each stage but the first halves height and width. 3,4,6,3 is ResNet-50, 2,2,2,2 with basic
    blocks ResNet-18."""
    widths: Counts = (256, 512, 1024, 2048)
    """Channels that each stage puts out; 64,128,256,512 with basic blocks."""
    stem: Count = 64
    """Channels of the first convolution, which is 7×7 with a stride of 2, before the max-pooling."""
    momentum: Share = 0.1
    """Share of a batch's statistics in the new running ones, torch's momentum: flax's is 1 minus it."""

    @model_validator(mode="after")
    def _stages(self) -> "ResNet":
        if not self.depths or len(self.depths) != len(self.widths):
            depths = self.depths or (1,)
            widths = [*self.widths[: len(depths)]] or [64]
            while len(widths) < len(depths):
                widths.append(2 * widths[-1])
            raise ValueError(
                f"model.widths = {listing(self.widths)} are not as many as model.depths = {listing(self.depths)}: each "
                f"stage has one of each; use model.widths = {listing(tuple(widths))}"
                + ("" if self.depths else f" with model.depths = {listing(depths)}")
            )
        if self.layers > MOST_BLOCKS:
            shown = reprlib.repr(list(self.depths))
            raise ValueError(f"model.depths = {shown} are {self.layers:,} blocks; use at most {MOST_BLOCKS:,}")
        if self.block == "bottleneck" and (odd := [width for width in self.widths if width % 4]):
            raise ValueError(
                f"model.widths = {listing(self.widths)}: {odd[0]} is not a multiple of 4, a bottleneck's width within; "
                f"use model.widths = {listing(tuple(math.ceil(width / 4) * 4 for width in self.widths))}"
            )
        return self

    @property
    def layers(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    @property
    def dim(self) -> int:
        """Width of what the head takes, D."""
        return self.widths[-1]

    @property
    def mixes_rows(self) -> bool:
        return True

    @property
    def least_places(self) -> int:
        return self.sizes[-1] ** 2

    @property
    def sharded_widths(self) -> frozenset[int]:
        within = (width // 4 for width in self.widths if self.block != "basic")
        return frozenset({self.stem, *self.widths, *within})

    def describe(self) -> str:
        return f"{'+'.join(map(str, self.depths))} {self.block} blocks, D {self.dim}, V {self.classes}"

    def places(self, path: str) -> int:
        """Number of places at which a module's kernel is applied to an image: those of its output."""
        if path == "head":
            return 1
        if path.startswith("stem."):
            return halved(self.image) ** 2
        _, stage, block, part, *layer = path.split(".")
        before_stride = self.block == "bottleneck" and stage != "0" and (block, part, layer[0]) == ("0", "layer", "0")
        return self.sizes[int(stage) - before_stride] ** 2

    @property
    def sizes(self) -> list[int]:
        """Height and width of what each stage puts out: the first's is that after the stem and its pooling."""
        found = [halved(halved(self.image))]
        while len(found) < len(self.depths):
            found.append(halved(found[-1]))
        return found


def halved(size: int) -> int:
    """A height or width after a stride of 2, padded as in torch's convolutions."""
    return (size + 1) // 2


def listing(values: tuple[int, ...]) -> str:
    """The numbers as a command line gives them."""
    return ",".join(map(str, values))
