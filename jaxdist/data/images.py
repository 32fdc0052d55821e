"""From data.path to images and their classes: a .npz file, a folder of a folder for each class, or the digits."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxdist.config import ConfigError, Data, ImageModel
from jaxdist.data.blocks import Earlier, fingerprint_of
from jaxdist.data.files import SPLITS, names, siblings, split_of

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")
FORMS = "give .npz with images and labels, or a folder with a folder of pictures for each class"


class Pictures(NamedTuple):
    """Images and their classes: labels [N], and `read` of some by number, [B, Y, X, C] float32.

    Where names of files or folders are those of splits, the first `training` are for training; else that is None.
    `rows` are the start-up table's; `fingerprint` and `earlier`: see `blocks`.
    """

    labels: NDArray[np.int32]
    read: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    fingerprint: str
    earlier: Earlier
    rows: dict[str, str]
    training: int | None = None


def open_pictures(data: Data, model: ImageModel) -> Pictures:
    """The images of data.path for a model, all labels checked to be classes of it. Raises ConfigError.

    .npz: `images` [N, Y, X] or [N, Y, X, C], bytes or finite floats, and `labels` [N]. A folder, as torchvision's
    ImageFolder: classes are its folders by name; their shorter side is scaled to model.image, and the middle is taken.
    Without a path: scikit-learn's digits, 1,797 of 8×8. Bytes become 0 to 1; then data.pixel_mean and data.pixel_std.
    Files train.npz and val.npz, and folders train and val of folders for each class, are the splits.
    """
    path = Path(data.path)
    by_name = data.split == "auto"
    if by_name and path.is_dir():  # of train.npz and val.npz
        path = next((file for file in sorted(path.glob("*.npz")) if split_of(file, path) == "train"), path)
    if not data.path:
        found = digits()
    else:
        found = folder(path, model, by_name) if path.is_dir() else arrays(path, model.family, by_name)
    source = f"data.path = {data.path!r}" + (" (empty: scikit-learn's digits)" if not data.path else "")
    if len(found.labels) == 0:
        raise ConfigError(f"{source}: holds no images; {FORMS}")
    low, high = int(found.labels.min()), int(found.labels.max())
    if low < 0 or high >= model.classes:
        fix = f"set model.classes = {high + 1}" if low >= 0 else "number the classes from 0, without marks as -1"
        raise ConfigError(f"{source}: labels from {low} to {high}, where model.classes = {model.classes}; {fix}")
    shape, wanted = found.read(np.zeros(1, np.int64)).shape[1:], (model.image, model.image, model.channels)
    if shape != wanted:
        fix = f"set model.image = {shape[0]} and model.channels = {shape[2]}"
        raise ConfigError(
            f"{source}: images are {list(shape)}, where model.image = {model.image} and model.channels = "
            f"{model.channels} ask for {list(wanted)}; {fix if shape[0] == shape[1] else 'give square images'}"
        )
    mean, std = (np.array(values, np.float32) for values in (data.pixel_mean, data.pixel_std))
    return found._replace(read=lambda numbers: (found.read(numbers) - mean) / std)


def _in_memory(images: NDArray, labels: NDArray) -> tuple[NDArray[np.int32], Callable[[NDArray], NDArray], str]:
    """Labels, `read`, and a line for the table, of images [N, Y, X] or [N, Y, X, C]."""
    images = images[..., None] if images.ndim == 3 else images
    scale = np.float32(255 if images.dtype == np.uint8 else 1)
    row = f"{len(images):,} of {'×'.join(map(str, images.shape[1:]))}, {images.dtype}"
    if len(images):
        row += f" from {images.min():.4g} to {images.max():.4g}" + (", divided by 255" if scale > 1 else ", unscaled")
    return labels.astype(np.int32), lambda numbers: images[numbers].astype(np.float32) / scale, row


def digits() -> Pictures:
    """scikit-learn's digits: 1,797 grey images of 8×8 in ten classes (UCI, Alpaydin and Kaynak, 1998)."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ConfigError(
            "data.path = '' is scikit-learn's digits; pip install 'jaxdist[images]', or give images"
        ) from None
    found = load_digits()
    labels, read, row = _in_memory((found.images / 16).astype(np.float32), found.target)
    content = hashlib.blake2b(found.images.tobytes() + found.target.tobytes(), digest_size=16).hexdigest()
    earlier = Earlier(frozenset({_named("digits of scikit-learn", len(labels))}))
    return Pictures(labels, read, content, earlier, {"images": f"{row}; scikit-learn's digits"})


def arrays(path: Path, family: str, by_name: bool) -> Pictures:
    """A .npz file, with the one of the other split beside it. Raises ConfigError."""
    if path.suffix != ".npz":
        raise ConfigError(f"data.path = {str(path)!r}: model.family = {family} takes images; {FORMS}")
    candidates = siblings(path) if by_name and path.is_file() else []
    files = [path, *([file for file in candidates if split_of(file, path) == "validation"] or candidates)]
    read = [_array(file) for file in files]
    if len({(*images.shape[1:], images.dtype) for images, _ in read}) > 1:
        row = ", ".join(f"{images.dtype} {list(images.shape)}" for images, _ in read)
        raise ConfigError(
            f"data.path = {str(path)!r}: {names(files)} differ ({row}); give images of one shape and type"
        )
    images, labels = (np.concatenate(parts) if len(read) > 1 else parts[0] for parts in zip(*read, strict=True))
    found = _in_memory(images, labels)
    training = len(read[0][0]) if len(files) > 1 else None
    fields = () if training is None else (("split", "share"),)
    earlier = Earlier(frozenset({_named(path.name, path.stat().st_size)}), fields)
    fingerprint = fingerprint_of(files, [file.name for file in files], training)
    return Pictures(*found[:2], fingerprint, earlier, {"images": f"{found[2]}; {names(files)}"}, training)


def _array(path: Path) -> tuple[NDArray, NDArray]:
    """The images and labels of a .npz file, all of them finite. Raises ConfigError."""
    source = f"data.path = {str(path)!r}"
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
    if images.dtype.kind == "f":
        bad = [number for number, image in enumerate(images) if not np.isfinite(image).all()]
        if bad:
            place = tuple(int(axis[0]) for axis in np.nonzero(~np.isfinite(images[bad[0]])))
            raise ConfigError(
                f"{source}: images[{bad[0]}] is {images[bad[0]][place]} at {list(place)}, as are {len(bad)} of "
                f"{len(images)} images not finite somewhere; correct them or leave them out"
            )
    return images, labels


def folder(path: Path, model: ImageModel, by_name: bool) -> Pictures:
    """A folder of a folder for each class, or of such folders for the splits. Raises ConfigError."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ConfigError(f"data.path = {str(path)!r}: pictures need Pillow; pip install 'jaxdist[images]'") from None
    files, training = _labelled(path, by_name)
    size, mode = model.image, {1: "L", 3: "RGB"}.get(model.channels)
    if mode is None:
        raise ConfigError(f"model.channels = {model.channels}: pictures of files have 1 or 3; give one of them")

    def picture(file: Path) -> NDArray[np.float32]:
        try:
            with Image.open(file) as stream:
                image = stream.convert(mode)
        except OSError as error:
            raise ConfigError(f"data.path = {str(file)!r}: {error}; give pictures that can be read") from None
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
        return np.asarray(image, np.float32).reshape(size, size, model.channels) / np.float32(255)

    named = [file.relative_to(path).as_posix() for file, _ in files]
    labels = np.array([label for _, label in files], np.int32)
    fingerprint = fingerprint_of([file for file, _ in files], named, labels.tolist(), training)
    sizes = [(name, file.stat().st_size) for name, (file, _) in zip(named, files, strict=True)]
    hidden = any(inner.name.startswith(".") for inner in _folders(path))  # which were classes once
    fields = () if training is None else (("split", "share"),)
    earlier = Earlier() if hidden else Earlier(frozenset({_named(*sizes)}), fields)
    row = f"{len(files):,} pictures in folders of {len(set(labels.tolist()))} classes"
    return Pictures(
        labels, lambda numbers: np.stack([picture(files[n][0]) for n in numbers]), fingerprint, earlier,
        {"images": row}, training,
    )  # fmt: skip


def _labelled(path: Path, by_name: bool) -> tuple[list[tuple[Path, int]], int | None]:
    """The pictures below a folder with their classes, and how many are for training where folders are named so. Raises
    ConfigError where a validation split has a class that training lacks."""
    inner = [found for found in _folders(path) if not found.name.startswith(".")]
    split = {split_of(found, path): found for found in inner if found.name.lower() in SPLITS}
    held = split.get("validation") or split.get("test")
    if not (by_name and "train" in split and held):
        return _pictures(inner, {found.name: label for label, found in enumerate(inner)}), None
    others = sorted(found.name for found in inner if found.name.lower() not in SPLITS)
    if others:
        raise ConfigError(
            f"data.path = {str(path)!r}: train and {held.name} are splits, and {', '.join(others)} next to them are "
            "not; move those elsewhere, or set data.split = share where all are classes"
        )
    folders = [[below for below in _folders(found) if below.name[0] != "."] for found in (split["train"], held)]
    classes = {found.name: label for label, found in enumerate(folders[0])}
    if unknown := sorted({found.name for found in folders[1]} - classes.keys()):
        raise ConfigError(
            f"data.path = {str(held)!r}: classes {', '.join(unknown)} are not among those of train; add their pictures "
            "there, or leave them out"
        )
    train, validation = (_pictures(found, classes) for found in folders)
    return train + validation, len(train)


def _folders(path: Path) -> list[Path]:
    return sorted(inner for inner in path.iterdir() if inner.is_dir())


def _pictures(folders: Sequence[Path], classes: dict[str, int]) -> list[tuple[Path, int]]:
    found = [(file, classes[inner.name]) for inner in folders for file in sorted(inner.rglob("*"))]
    return [(file, label) for file, label in found if file.suffix.lower() in PICTURES]


def _named(*facts: object) -> str:
    """32 hex digits over names and sizes."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
