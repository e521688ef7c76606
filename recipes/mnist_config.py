"""The run config of `recipes/mnist.py`, which trains a convnet on images."""

from dataclasses import dataclass, field
from typing import Any

from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt

from toolkit.config.facts import stated
from toolkit.config.schema import HalfOpenUnitInterval, NumEpochs, RunConfig, TrainConfig
from toolkit.config.validate import check_length_and_name
from toolkit.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
    """Which images."""

    source: str = "digits"
    """Source of the images: `digits` (scikit-learn, 8 x 8 pixels), `idx` (MNIST's files), or a hub id such as `ylecun/mnist`."""
    folder: str | None = stated(None, path="path")
    """Folder for `idx`, with train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k- files, plain or as .gz."""
    hub_subset: str | None = None
    """Configuration name of a hub dataset."""
    hub_split: str = "train"
    """Split of a hub dataset to train on."""
    hub_eval_split: str = "test"
    """Split of a hub dataset to evaluate on."""
    image_column: str = "image"
    """Column of a hub dataset with the image."""
    label_column: str = "label"
    """Column of a hub dataset with the class, an integer."""
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Use only the first N training images."""
    eval_fraction: ClosedUnitInterval = 0.2  # type: ignore[valid-type]
    """Fraction of `digits` to hold out for evaluation, chosen by a hash. The other sources have an evaluation split."""


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig:
    """Two convolutions, a pooling and two linear layers."""

    hidden_size: PositiveInt = 128  # type: ignore[valid-type]
    """Width of the first linear layer, which holds most of the parameters."""
    conv_dropout: ClosedUnitInterval = 0.25  # type: ignore[valid-type]
    """Dropout rate before the first linear layer."""
    linear_dropout: ClosedUnitInterval = 0.5  # type: ignore[valid-type]
    """Dropout rate before the last linear layer."""


@dataclass(frozen=True, kw_only=True)
class AdadeltaConfig:
    """torch's Adadelta with torch's StepLR."""

    lr: PositiveFloat = 1.0  # type: ignore[valid-type]
    """Learning rate of the first epoch."""
    gamma: PositiveFloat = 0.7  # type: ignore[valid-type]
    """Factor on the learning rate after every epoch."""
    label_smoothing: HalfOpenUnitInterval = 0.0  # type: ignore[valid-type]
    """Share of each label's probability that is spread evenly over the classes, in the training loss only."""


@dataclass(frozen=True, kw_only=True)
class MnistConfig:
    """Config of `recipes/mnist.py`."""

    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    model: ConvNetConfig = field(default_factory=ConvNetConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: AdadeltaConfig = field(default_factory=AdadeltaConfig)
    run: RunConfig = field(default_factory=RunConfig)
    eval_batch_size_rows: PositiveInt = 500  # type: ignore[valid-type]
    """Images per evaluation batch of one process."""
    eval_every_epochs: NumEpochs = 1.0  # type: ignore[valid-type]
    """Epochs between evaluations, as in 0.5. A part of an epoch is rounded up to whole steps."""
    log_every_steps: PositiveInt = 10  # type: ignore[valid-type]
    """Steps between two lines with loss, learning rate, tokens/s and time left, which a terminal shows in its bar. Each reads the
    loss and so waits for the device."""


def check_mnist_config(config: Any) -> None:
    """Refuse fields that exclude or need each other.

    Raises:
        UserError: naming both fields.
    """
    check_length_and_name(config)
    data = config.data
    if data.source == "idx" and data.folder is None:
        raise UserError("data.source idx needs data.folder: give the folder that holds train-images-idx3-ubyte")
    if data.source != "idx" and data.folder is not None:
        raise UserError(f"data.folder is {data.folder}, which only data.source idx reads: data.source is {data.source}")
