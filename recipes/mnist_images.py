"""Grayscale images with classes: MNIST's IDX files, a hub dataset, or scikit-learn's digits.

Images stay uint8 until they are collated into a batch. Errors in a source are reported in one sentence before training starts.

Shapes: `N` images, `B` images of a batch, `H` height, `W` width.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mnist_config import ImageDataConfig

from toolkit.data.sources.files import check_columns
from toolkit.data.sources.hub import check_inside, load_hub_dataset
from toolkit.distributed.rng import derive_seed
from toolkit.errors import UserError
from toolkit.loss import IGNORED_LABEL

SOURCES = ("digits", "idx")
IDX_FILES = {
    "training": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "held-out": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IDX_IMAGES, IDX_LABELS = 0x00000803, 0x00000801
"""Magic numbers: unsigned bytes in three dimensions and in one (http://yann.lecun.com/exdb/mnist)."""


@dataclass(frozen=True)
class Images:
    """Images of one size, each of one class."""

    pixels_NHW: torch.Tensor
    """uint8."""
    labels_N: torch.Tensor
    """int64, 0 and up."""

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True)
class ImageSets:
    """The training and evaluation images of a run."""

    train: Images
    evaluation: Images
    num_classes: int
    mean: float
    """Mean of the training pixels; `std` is their standard deviation."""
    std: float

    def collate(
        self, images: Images, rows: Sequence[int], device: torch.device, *, is_dummy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch on the device: fp32 pixels B1HW, normalized by `mean` and `std`, and int64 labels B.

        Args:
            is_dummy: ignore every label; the rows only keep the collectives of all ranks matched.
        """
        index = torch.as_tensor(rows, dtype=torch.int64)
        pixels_B1HW = images.pixels_NHW[index].to(device, torch.float32).sub(self.mean).div(self.std).unsqueeze(1)
        labels_B = torch.full((len(rows),), IGNORED_LABEL) if is_dummy else images.labels_N[index]
        return pixels_B1HW, labels_B.to(device)


def load_images(config: ImageDataConfig, smallest_side: int) -> ImageSets:
    """Read all images of `config.source` into memory.

    Args:
        smallest_side: minimum height and width in pixels; smaller images are refused.

    Raises:
        UserError: an unknown source, a missing or damaged file, images that are not grayscale or differ in size, a class that
            occurs only among the evaluation images.
    """
    if config.source == "digits":
        train, evaluation = _load_digits(config.eval_fraction)
    elif config.source == "idx":
        assert config.folder is not None  # check_mnist_config ensures it
        train, evaluation = (_load_idx(Path(config.folder).expanduser(), *IDX_FILES[part]) for part in IDX_FILES)
    else:
        train, evaluation = (_load_split(config, split) for split in (config.hub_split, config.hub_eval_split))
    where = f"data.source {config.source}"
    if config.num_rows is not None:
        train = Images(train.pixels_NHW[: config.num_rows], train.labels_N[: config.num_rows])
    _check(where, train, evaluation, smallest_side)
    pixels = train.pixels_NHW.double()
    return ImageSets(train, evaluation, int(train.labels_N.max()) + 1, pixels.mean().item(), pixels.std().item() or 1.0)


def _check(where: str, train: Images, evaluation: Images, smallest_side: int) -> None:
    for images, part in ((train, "training"), (evaluation, "held-out")):
        if len(images) == 0:
            raise UserError(f"{where} has no {part} images: change data.eval_fraction or the split, or take another source")
        if int(images.labels_N.min()) < 0:
            raise UserError(f"{where}: a {part} image has class {int(images.labels_N.min())}: leave images without a class out")
    sizes = [tuple(images.pixels_NHW.shape[1:]) for images in (train, evaluation)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{where}: training images have {_size(sizes[0])} pixels, held-out ones {_size(sizes[1])}: use one size")
    if min(sizes[0]) < smallest_side:
        raise UserError(f"{where}: images have {_size(sizes[0])} pixels, the convnet needs {smallest_side} x {smallest_side}")
    if (highest := int(evaluation.labels_N.max())) > int(train.labels_N.max()):
        raise UserError(f"{where}: class {highest} is among the held-out images only: train on images of it too")


def _load_digits(eval_fraction: float) -> tuple[Images, Images]:
    """scikit-learn's 1,797 images of 8 x 8 pixels from 0 to 16. The split depends only on an image's position."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "data.source digits comes with scikit-learn, which is not installed: pip install 'toolkit[mnist]', or give "
            "data.source idx with data.folder"
        ) from None
    pixels_NHW, labels_N = load_digits().images.astype(np.uint8), load_digits().target
    is_held_out = np.array([derive_seed("held out", row) / 2**63 < eval_fraction for row in range(len(labels_N))])
    return _images(pixels_NHW[~is_held_out], labels_N[~is_held_out]), _images(pixels_NHW[is_held_out], labels_N[is_held_out])


def _load_idx(folder: Path, images_name: str, labels_name: str) -> Images:
    pixels_NHW, labels_N = _read_idx(folder, images_name, IDX_IMAGES), _read_idx(folder, labels_name, IDX_LABELS)
    if len(pixels_NHW) != len(labels_N):
        raise UserError(
            f"{folder / images_name} holds {len(pixels_NHW)} images, but {labels_name} {len(labels_N)} labels: take both files "
            "from one place"
        )
    return _images(pixels_NHW, labels_N)


def _read_idx(folder: Path, name: str, magic: int) -> np.ndarray:
    """The array in an IDX file: the magic number and sizes are big-endian 32-bit integers, the rest is data bytes."""
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not found:
        trouble = "has neither" if folder.is_dir() else "is not a folder with"
        raise UserError(f"data.folder {folder} {trouble} {name} {'nor' if folder.is_dir() else 'or'} {name}.gz: check the path")
    path = found[0]
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:  # gzip raises these too
        raise UserError(f"{path} cannot be read ({error}): get the file again") from None
    num_dimensions = magic & 0xFF
    header = 4 * (1 + num_dimensions)
    if len(content) < header or int.from_bytes(content[:4]) != magic:
        raise UserError(
            f"{path} starts with {content[:4].hex() or 'nothing'}, an IDX file of {num_dimensions} "
            f"dimension{'s' * (num_dimensions > 1)} with {magic:08x}: get the file again"
        )
    shape = struct.unpack(f">{num_dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise UserError(f"{path} holds {len(content) - header} bytes behind its header, not {math.prod(shape)}: get it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _load_split(config: ImageDataConfig, split: str) -> Images:
    dataset = load_hub_dataset(config.source, config.hub_subset, split, other_sources=SOURCES)
    where = f"data.source {config.source}, split {split}"
    columns = (config.image_column, config.label_column)
    check_columns(where, dataset.column_names, columns, "set data.image_column and data.label_column to columns that exist")
    _check_paths(dataset, config)
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    try:
        for place, row in enumerate(dataset.select_columns(list(columns))):
            pixels.append(_grayscale(f"{where}, image {place}", row[columns[0]], pixels[0].shape if pixels else None))
            labels.append(row[columns[1]])
            if type(labels[-1]) is not int:
                raise UserError(f"{where}, image {place}: its {columns[1]} is {labels[-1]!r}, not a whole number")
    except OSError as error:  # raised by PIL for a damaged image
        raise UserError(f"{where}, image {len(pixels)} cannot be read ({error})") from None
    return _images(np.stack(pixels) if pixels else np.zeros((0, 0, 0), np.uint8), np.array(labels, np.int64))


def _check_paths(dataset: Any, config: ImageDataConfig) -> None:
    """Refuse images outside of a folder that its rows name in place of their bytes: `datasets` would open or fetch them."""
    import pyarrow.compute as pc
    from datasets import Image

    if Path(config.source).expanduser().is_dir() and isinstance(dataset.features[config.image_column], Image):
        cells = dataset.data.column(config.image_column)
        paths = pc.struct_field(cells, "path").filter(pc.is_null(pc.struct_field(cells, "bytes"))).drop_null()
        for path in paths.to_pylist():
            check_inside(config.source, Path(config.source), path)


def _grayscale(where: str, image: Any, size: tuple[int, ...] | None) -> np.ndarray:
    """An image as uint8 HW; it must have `size` if that is given."""
    array = np.asarray(image)
    if array.ndim != 2:
        raise UserError(f"{where} has the shape {_size(array.shape)}: only grayscale images, height x width, can be trained on")
    if array.dtype.kind not in "bui" or array.max(initial=0) > 255 or array.min(initial=0) < 0:
        raise UserError(f"{where} has pixels that are not whole numbers from 0 to 255 ({array.dtype}): convert the images")
    if size is not None and array.shape != size:
        raise UserError(f"{where} has {_size(array.shape)} pixels, those before {_size(size)}: bring all to one size")
    return array.astype(np.uint8)


def _images(pixels_NHW: np.ndarray, labels_N: np.ndarray) -> Images:
    return Images(torch.from_numpy(pixels_NHW.copy()), torch.from_numpy(labels_N.astype(np.int64)))


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "no size at all"
