"""From data.path to images and their classes: a .npz file, a folder of a folder for each class, or the digits."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxdist.config import ConfigError, Data, ResNet

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")
FORMS = "give .npz with images and labels, or a folder with a folder of pictures for each class"


class Pictures(NamedTuple):
    """Images and their classes: labels [N], and `read` of some by number, [B, Y, X, C] float32."""

    labels: NDArray[np.int32]
    read: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    fingerprint: str


def open_pictures(data: Data, model: ResNet) -> Pictures:
    """The images of data.path for a model, all labels checked to be classes of it. Raises ConfigError.

    .npz: `images` [N, Y, X] or [N, Y, X, C], bytes or floats, and `labels` [N]. A folder, as torchvision's ImageFolder:
    classes are its folders by name; their shorter side is scaled to model.image, and the middle is taken. Without a
    path: scikit-learn's digits, 1,797 of 8×8. Bytes become 0 to 1; then data.pixel_mean and data.pixel_std.
    """
    path = Path(data.path)
    found = digits() if not data.path else folder(path, model) if path.is_dir() else arrays(path)
    source = f"data.path = {data.path!r}" + (" (empty: scikit-learn's digits)" if not data.path else "")
    if len(found.labels) == 0:
        raise ConfigError(f"{source}: holds no images; {FORMS}")
    low, high = int(found.labels.min()), int(found.labels.max())
    if low < 0 or high >= model.classes:
        raise ConfigError(
            f"{source}: labels from {low} to {high}, where model.classes = {model.classes}; give {high + 1}"
        )
    shape, wanted = found.read(np.zeros(1, np.int64)).shape[1:], (model.image, model.image, model.channels)
    if shape != wanted:
        raise ConfigError(
            f"{source}: images are {list(shape)}, where model.image = {model.image} and model.channels = "
            f"{model.channels} ask for {list(wanted)}; set model.image and model.channels to those of the data"
        )
    mean, std = (np.array(values, np.float32) for values in (data.pixel_mean, data.pixel_std))
    return found._replace(read=lambda numbers: (found.read(numbers) - mean) / std)


def of_arrays(images: NDArray, labels: NDArray, fingerprint: str) -> Pictures:
    """Images [N, Y, X] or [N, Y, X, C] in memory."""
    images = images[..., None] if images.ndim == 3 else images
    scale = np.float32(255 if images.dtype == np.uint8 else 1)
    return Pictures(labels.astype(np.int32), lambda numbers: images[numbers].astype(np.float32) / scale, fingerprint)


def digits() -> Pictures:
    """scikit-learn's digits: 1,797 grey images of 8×8 in ten classes (UCI, Alpaydin and Kaynak, 1998)."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ConfigError(
            "data.path = '' is scikit-learn's digits; pip install 'jaxdist[images]', or give images"
        ) from None
    found = load_digits()
    return of_arrays(
        (found.images / 16).astype(np.float32), found.target, _named("digits of scikit-learn", len(found.target))
    )


def arrays(path: Path) -> Pictures:
    """A .npz file. Raises ConfigError."""
    source = f"data.path = {str(path)!r}"
    if path.suffix != ".npz":
        raise ConfigError(f"{source}: model.family = resnet takes images; {FORMS}")
    try:
        with np.load(path) as file:
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise ConfigError(f"{source}: {error}; write it with numpy.savez(path, images=..., labels=...)") from None
    kinds = images.dtype == np.uint8 or images.dtype.kind == "f", labels.dtype.kind in "iu"
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or not all(kinds):
        raise ConfigError(
            f"{source}: images {images.dtype} {list(images.shape)} and labels {labels.dtype} {list(labels.shape)}; "
            "give images [N, Y, X, C], bytes or floats, and labels [N], whole numbers"
        )
    return of_arrays(images, labels, _named(path.name, path.stat().st_size))


def folder(path: Path, model: ResNet) -> Pictures:
    """A folder of a folder for each class. Raises ConfigError."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ConfigError(f"data.path = {str(path)!r}: pictures need Pillow; pip install 'jaxdist[images]'") from None
    classes = sorted(inner for inner in path.iterdir() if inner.is_dir())
    files = [(file, label) for label, inner in enumerate(classes) for file in sorted(inner.rglob("*"))]
    files = [(file, label) for file, label in files if file.suffix.lower() in PICTURES]
    size, mode = model.image, {1: "L", 3: "RGB"}.get(model.channels)
    if mode is None:
        raise ConfigError(f"model.channels = {model.channels}: pictures of files have 1 or 3; give one of them")

    def picture(file: Path) -> NDArray[np.float32]:
        try:
            with Image.open(file) as opened:
                image = opened.convert(mode)
        except OSError as error:
            raise ConfigError(f"data.path = {str(file)!r}: {error}; give pictures that can be read") from None
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
        return np.asarray(image, np.float32).reshape(size, size, model.channels) / np.float32(255)

    named = [(file.relative_to(path).as_posix(), file.stat().st_size) for file, _ in files]
    labels = np.array([label for _, label in files], np.int32)
    return Pictures(labels, lambda numbers: np.stack([picture(files[n][0]) for n in numbers]), _named(*named))


def _named(*facts: object) -> str:
    """32 hex digits over names and sizes."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
