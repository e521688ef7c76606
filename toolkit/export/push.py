"""Uploads an export to the Hugging Face hub, and refuses before the work what would fail after it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.config.load import RecipeConfig
from toolkit.errors import UserError
from toolkit.export.card import is_hub_id
from toolkit.models.lora import is_enabled

logger = logging.getLogger("toolkit")


def check_push(config: RecipeConfig, name: str, key: str, *, merge: bool, way_out: str) -> None:
    """Check without network the repository's name, which `key` gives, the adapter's base, `HF_HUB_OFFLINE` and the token;
    `way_out` merges the adapter."""
    from huggingface_hub import constants, get_token

    base = config.model.name_or_path
    if not ("/" in name and is_hub_id(name)):
        raise UserError(f"{key} is {name}: give NAMESPACE/NAME, as in my_name/my_model")
    if is_enabled(config.adapter) and not merge and not is_hub_id(base):
        raise UserError(f"{key} is given, but the adapter's base {base} is a folder here: {way_out}")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{key} is {name}, but HF_HUB_OFFLINE is set: unset it")
    if get_token() is None:
        raise UserError(f"{key} is {name}, but there is no token: type hf auth login, or set HF_TOKEN")


def prepare_push(config: RecipeConfig) -> None:
    """Make the repository of `export.push_to_hub`, a private one, unless it is there; one that this token may not write, or a run
    that exports nothing, is a `UserError`. For one rank."""
    from huggingface_hub import HfApi

    if (name := config.export.push_to_hub) is None:
        return
    check_push(config, name, "export.push_to_hub", merge=config.export.merge, way_out="set export.merge true")
    if config.train.max_steps == 0 and not config.export.merge:
        raise UserError(f"export.push_to_hub is {name}, but a run with train.max_steps 0 exports nothing: leave it out")
    with _refusal_named(f"export.push_to_hub is {name}, where the hub does not let this token write"):
        url = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().auth_check(name, write=True)
        kind = "private" if HfApi().model_info(name).private else "public"
    logger.info(f"the export will be uploaded to {url}, which is {kind}")


def push(folder: Path, name: str, *, private: bool, may_be_public: bool = False) -> None:
    """Upload an export to a repository of the hub, which is made if it is not there. If the hub does not take it, or the
    repository is public, which it may not be, that is a `UserError`, and the folder is as it was."""
    from huggingface_hub import HfApi

    what = f"{folder} was not uploaded to {name}"
    command = f", and type hf upload {name} {shlex.quote(str(folder))}{' --private' * private}"
    with _refusal_named(what, "the folder is whole: ", command):
        url = HfApi().create_repo(name, private=private or None, exist_ok=True)
        if private and not may_be_public and not HfApi().model_info(name).private:
            raise UserError(f"{what}, which is public: make it private, or take another name")
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    logger.info(f"uploaded to {url}")


@contextmanager
def _refusal_named(what: str, state: str = "", next_step: str = "") -> Iterator[None]:
    from huggingface_hub import get_token

    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the client, its transport, or the network
        reason = " ".join(str(error).split()).replace(get_token() or "\n", "the token")
        raise UserError(f"{what} ({reason}): {state}check the name, the token's rights and the network{next_step}") from None
