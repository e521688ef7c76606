"""Loads a model to generate with: a run's export, or any folder or id that transformers reads, by the recipes' own checks.

What loads is data: no code of the folder or the hub, no pickle, no file outside the folder but the base that an adapter names.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config.schema import AdapterConfig, EvalConfig, ModelConfig
from toolkit.data.collate import Collator, move_to
from toolkit.data.rows.example import Example
from toolkit.data.tokens.chat_template import RefusedChatError, render_chat, set_content_tokens
from toolkit.data.tokens.prompts import find_omissions
from toolkit.data.tokens.special_tokens import decode_texts, show
from toolkit.data.tokens.tokenizer import load_tokenizer
from toolkit.distributed.comm import on_all_ranks
from toolkit.errors import UserError
from toolkit.evaluation.generate import find_flaws
from toolkit.export.usage import Usage, load_usage
from toolkit.launch.accelerator import cudnn_attention
from toolkit.launch.environment import asked_for_cpu
from toolkit.models.config import load_model_config
from toolkit.models.generation import build_generation, load_settings
from toolkit.models.load import build_skeleton, num_token_embeddings
from toolkit.models.lora import add_adapter
from toolkit.models.lora_files import CONFIG_FILE, find_adapter, read_json
from toolkit.models.position_limits import num_positions
from toolkit.models.tensor_reader import allocate, fill_parameters
from toolkit.models.weights import complete_readers, open_weights
from toolkit.objectives import built_in, check_run_folder
from toolkit.objectives.objective import Objective
from toolkit.tools.recipes import name_of_model
from toolkit.variables import local_rank

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_OWN_WORDS = {
    "set model.attn_implementation sdpa or eager, or model.trust_remote_code true": "take that line out",
    ", or model.from_scratch true for random ones": "",
    ", or model.from_scratch true": "",
    "set data.chat_template to one, or to a file with one": "save the tokenizer with one",
    "set data.format sharegpt": "let the column be named conversations",
    "adapter.name_or_path ": "the adapter ",
    "model.name_or_path ": "the model ",
    "set data.field to one of them": "give a file with one of them",
    "data.csv_delimiter": "--csv-delimiter",
    "data.encoding": "--encoding",
    ", or name a folder or hub id that has it in model.tokenizer": "",
}
"""What the errors of runs say, in words of this command, which has no such settings."""


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A model with what makes tokens of texts; on the meta device until its weights are loaded."""

    folder: Path
    """Of the model, or of its adapter."""
    base: ModelConfig
    config: PretrainedConfig
    model: Any
    tokenizer: PreTrainedTokenizerBase
    usage: Usage
    objective: Objective
    collator: Collator
    omitted: Counter[str] = field(default_factory=Counter)
    """Rows by what the chat template has left out of them."""
    flaws: Counter[str] = field(default_factory=Counter)
    """This process's texts, as `num_texts`, and those of them with each of `FLAWS`."""

    def takes_chats(self, *, plain: bool = False) -> bool:
        """Whether a text is given as a user's turn of a chat, unless it is `plain`: the prompt itself."""
        return self.objective.takes_chats and not plain and self.tokenizer.chat_template is not None

    def encode(self, rows: Sequence[tuple[str, Example]], *, plain: bool) -> list[dict[str, Any]]:
        """Prompts, each with its place for messages, as rows of `generate`. An encoder-decoder's sources are cut as in the run.
        A chat for an encoder-decoder, or that the template refuses, and more tokens than positions are a `UserError`."""
        new = self.model.generation_config.max_new_tokens if self.objective.continues_prompt else 0
        for where in (where for where, row in rows if row.prompt is None and not self.objective.takes_chats):
            raise UserError(f"{where} is a chat, and the model is {self.objective.kind}: give a text")
        are_chats = [self.takes_chats(plain=plain) or row.messages is not None for _, row in rows]
        texts = [self._render(*row) if is_chat else str(row[1].prompt) for row, is_chat in zip(rows, are_chats, strict=True)]
        all_ids, all_lost = self.objective.encode_prompts(self.tokenizer, texts, are_chats, self.usage)
        limit, _ = num_positions(self.config)
        encoded = []
        for (where, _), ids, num_lost in zip(rows, all_ids, all_lost, strict=True):
            if limit is not None and len(ids) + new > limit:
                trouble = f"has {len(ids)} tokens,{f' with --max-new-tokens {new}' if new else ''} more than the model's {limit}"
                raise UserError(f"{where} {trouble} positions: shorten the text{', or lower --max-new-tokens' if new else ''}")
            encoded.append({"input_ids": ids, "prompt_length": len(ids), "num_lost_tokens": num_lost})
        return encoded

    def _render(self, where: str, row: Example) -> str:
        messages = row.messages or [{"role": "user", "content": row.prompt}]
        try:
            text = render_chat(self.tokenizer, messages, row.tools, for_generation=True)
        except RefusedChatError as error:
            raise UserError(f"{where}: the chat template refuses this chat ({error}): change the row") from None
        self.omitted.update({what for what, _, _ in find_omissions(show(self.tokenizer, text), messages, row.tools)})
        return text

    @torch.no_grad()
    @cudnn_attention(False)
    def generate(self, rows: list[dict[str, Any]]) -> list[str]:
        """A text for each row, by the model's generation config; its flaws are counted."""
        prompts, config = self.collator.prompts(rows), self.model.generation_config
        tokens_BT = self.model.generate(**move_to(self.model.device, prompts), tokenizer=self.tokenizer)  # of stop strings
        new_tokens_BT = self.collator.new_tokens(tokens_BT, prompts)
        texts = decode_texts(self.tokenizer, new_tokens_BT.tolist(), self.usage.kept_tokens)
        for flaws in find_flaws(self.model, new_tokens_BT, texts, config.max_new_tokens, config.eos_token_id):
            self.flaws.update(["num_texts", *flaws])
        return texts


@contextmanager
def in_own_words() -> Iterator[None]:
    """Errors name the flags of this command, not the settings of a run."""
    try:
        yield
    except UserError as error:
        sentence = str(error)
        for theirs, own in _OWN_WORDS.items():
            sentence = sentence.replace(theirs, own)
        error.args = (sentence,)
        raise


def find_folder(name: str) -> str:
    """The model of a run folder (`merged`, else `export`), or the name itself; a `UserError` for a run folder without an
    export, or a file."""
    run = Path(name)
    if run.is_file():
        raise UserError(f"{name} is a file: give a run folder, an export or a model folder")
    check_run_folder(run)
    for kind in ("merged", "export"):
        if (run / kind).is_dir():
            return str(run / kind)
    if (run / "checkpoints").is_dir():
        export = f"python -m toolkit export {name}"
        raise UserError(f"{name} is a run folder without an export: let the run end, or give the folder that {export} writes")
    return name


def open_model(name: str) -> Generator:
    """Read and check everything but the weights; a `UserError` if no model can be read there, or it names code, or weights
    elsewhere."""
    folder = Path(find_folder(name))
    usage = load_usage(folder) or Usage()
    is_adapter = (folder / CONFIG_FILE).is_file()
    name_or_path, add_tokens = (read_base_name(folder), usage.add_tokens) if is_adapter else (str(folder), None)
    base = ModelConfig(name_or_path=name_or_path, add_tokens=add_tokens)
    try:
        objective = built_in(name_of_model(base.name_or_path))
        config = load_model_config(base, objective, is_trained=False)
        skeleton = build_skeleton(base, config, objective)
    except UserError as error:
        if is_adapter and not Path(base.name_or_path).is_dir():
            what = f"the adapter {folder} needs its base {base.name_or_path}, not found from here ({error})"
            merged = "a merged model, as `python -m toolkit export RUN_FOLDER --merge` writes it"
            raise UserError(f"{what}: start where that path leads to it, or give {merged}") from None
        raise
    if is_adapter:
        find_adapter(str(folder))
    tokenizer: Any = load_tokenizer(ModelConfig(name_or_path=str(folder)), num_token_embeddings(skeleton))
    set_content_tokens(tokenizer, usage.add_tokens)
    objective.set_languages(tokenizer, name, usage)
    collator = objective.build_collator(skeleton, tokenizer.pad_token_id)
    known: Any = {"folder": folder, "base": base, "config": config, "objective": objective}
    return Generator(**known, model=skeleton, tokenizer=tokenizer, usage=usage, collator=collator)


def load_generator(generator: Generator, dtype: str | None, settings: dict[str, Any]) -> Generator:
    """Load the weights, in the dtype of the run's forward passes unless one is given; `settings` as in `Options`. Weights
    that cannot be read, do not fit the device, or generate in a way that is code of the hub are a `UserError`. Collective."""
    from transformers.utils.logging import disable_progress_bar

    folder, base, config = generator.folder, generator.base, generator.config
    loaded_as = getattr(torch, dtype or generator.usage.dtype)
    if not sys.stderr.isatty():  # bars are for terminals
        disable_progress_bar()
    device = _choose_device()
    generation = on_all_ranks(lambda: _choose_generation(generator, settings))
    model: Any
    model, weights = open_weights(base, config, generator.objective, generator.model, loaded_as)
    adapter = AdapterConfig(name_or_path=str(folder) if (folder / CONFIG_FILE).is_file() else None)
    if adapter.name_or_path:
        on_all_ranks(lambda: add_adapter(model, adapter, base))
    readers = complete_readers(model, weights, adapter, base, seed=0)
    model.generation_config = generation

    def take_memory() -> None:
        try:
            allocate(model, device)
            model.to(device)
        except torch.OutOfMemoryError as error:
            remedy = "try --dtype bfloat16, or serve it with a tool that splits a model over GPUs, as vLLM"
            raise UserError(f"the model does not fit {device} ({str(error).splitlines()[0]}): {remedy}") from None

    on_all_ranks(take_memory)
    fill_parameters(model, readers)
    return replace(generator, model=model.eval())


def _choose_generation(generator: Generator, settings: dict[str, Any]) -> Any:
    """The generation config; one with more new tokens than the model has positions is a `UserError`."""
    has_own = (generator.folder / "generation_config.json").is_file()
    base = replace(generator.base, name_or_path=str(generator.folder)) if has_own else generator.base
    theirs = {key: value for key, value in load_settings(base).items() if key not in settings}
    new = theirs.get("max_new_tokens", EvalConfig().max_new_tokens)  # without it `generate` would stop after 20 tokens
    generation = build_generation(
        generator.model, theirs, {"max_new_tokens": new, **settings}, {}, base.name_or_path, logging.WARNING
    )
    _, limit = num_positions(generator.config)
    if limit is not None and generation.max_new_tokens > limit:
        raise UserError(f"--max-new-tokens is {generation.max_new_tokens}, and the model has {limit} positions: lower it")
    return generation


def _choose_device() -> torch.device:
    if not torch.cuda.is_available() or asked_for_cpu():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def read_base_name(folder: Path) -> str:
    """The base that an adapter names: a path, from the directory of its run, or a hub id; a `UserError` if it names none."""
    base = read_json(folder / CONFIG_FILE, f"adapter.name_or_path {folder}").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"the {CONFIG_FILE} of {folder} names no base (base_model_name_or_path): write its folder there")
    return base
