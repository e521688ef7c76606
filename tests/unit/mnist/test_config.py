"""The config of the image recipe: documented, read back, and refused in one sentence where fields do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from mnist_config import MnistConfig, check_mnist_config

from tests.support.launch import REPOSITORY
from tests.support.refusals import refusal
from toolkit.config.load import load_config, save_config


def load(*flags: str) -> MnistConfig:
    return load_config(MnistConfig, ["--train.max_steps=3", *flags], check=check_mnist_config)


def test_a_saved_config_gives_the_same_config(tmp_path: Path) -> None:
    config = load("--data.source=idx", "--data.folder=mnist", "--optim.gamma=0.5", "--data.num_rows=9")
    save_config(config, tmp_path / "config.yaml")
    again = load_config(MnistConfig, ["--config", str(tmp_path / "config.yaml")], check=check_mnist_config)
    assert again == config and again.optim.gamma == 0.5


def test_the_run_config_of_the_recipe_is_read() -> None:
    path = REPOSITORY / "recipes" / "configs" / "mnist_digits.yaml"
    config = load_config(MnistConfig, ["--config", str(path)], check=check_mnist_config)
    assert config.data.source == "digits" and config.optim.lr == 1.0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data.source=idx"], "data.source idx needs data.folder: give the folder that holds train-images-idx3-ubyte"),
        (["--data.folder=here"], "data.folder is here, which only data.source idx reads: data.source is digits"),
        (["--train.max_steps=null"], "give train.max_steps or train.num_epochs, one of them: neither is given"),
        (["--run.name=a/b"], "run.name 'a/b' is not a plain folder name: take one without slashes"),
        (["--optim.beta1=0.5"], "unknown flag --optim.beta1; known are --optim.lr, --optim.gamma, --optim.label_smoothing"),
        (["--model.conv_dropout=2"], "--model.conv_dropout is 2: give a number from 0 to 1"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], sentence: str) -> None:
    assert refusal(load, *flags) == sentence
