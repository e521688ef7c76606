"""`python -m toolkit generate`: reads texts, generates in batches as an evaluation does, and writes the texts in input order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.cli.generate.inputs import Item, read_items
from toolkit.cli.generate.model import Generator, find_folder, load_generator
from toolkit.data.sources.text_files import build_form
from toolkit.data.tokens.chat_template import TEMPLATE_ERRORS
from toolkit.distributed.comm import close_groups, control_group, gather_objects, on_all_ranks, on_rank_0, rank, world_size
from toolkit.distributed.progress import Phase
from toolkit.errors import UserError, escape_controls, one_line
from toolkit.export.usage import Usage, load_usage
from toolkit.files.json_lines import encode_json_line, load_json_lines
from toolkit.launch.environment import asked_for_cpu, is_launched, read_launch
from toolkit.launch.log import lost_outputs

logger = logging.getLogger("toolkit")

BATCHES_AT_ONCE = 256
"""Batches of each process that are sorted by length together, and written together."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    model: str
    file: str | None
    texts: list[str]
    column: str | None
    csv_delimiter: str | None = None
    encoding: str | None = None
    plain: bool
    """Whether a text is the prompt itself, not a user's turn of a chat."""
    output: Path | None
    batch_size_rows: int | None
    dtype: str | None
    settings: dict[str, Any]
    """Of generation, that replace the model's own: `max_new_tokens`, `num_beams`."""


def generate(options: Options) -> None:
    """Generate a text for every item, and write or print them in input order. Collective under `accelerate launch`.

    An output that was not finished is continued.

    Raises:
        UserError: model, input or output are not usable; with file and row.
    """
    is_one_of_several = is_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets this alone
    if is_one_of_several:
        from accelerate import PartialState

        read_launch()
        PartialState(cpu=asked_for_cpu())
        control_group()
    try:
        items, how = _read(options)
        num_done = on_rank_0(lambda: _begin_output(options, items)) if options.output else 0
        # One GPU may lack room.
        generator = on_all_ranks(lambda: load_generator(options.model, options.dtype, options.settings))
        _describe(generator, options, how, len(items), num_done)
        rows = [_encode(generator, item, options.plain) for item in items]
        _check_lengths(generator, rows, items)
        if num_cut := sum(row["num_lost_tokens"] > 0 for row in rows):
            _say(options, f"cut {num_cut:,} of {len(rows):,} texts to {generator.usage.max_source_length_tokens} tokens")
        with Phase("generating", len(items), "texts", done=num_done, enabled=options.output is not None) as generating:
            for first, texts in _generate_chunks(generator, rows, options, num_done):
                on_rank_0(partial(_write, options.output, first, texts))
                generating.add(len(texts))
                if options.output is None and on_rank_0(lambda: "stdout" in lost_outputs()):
                    break  # nobody reads more of them
        if options.output and rank() == 0:
            _about_file(options.output).unlink(missing_ok=True)
            logger.info(f"{len(items):,} texts are in {options.output}")
    finally:
        if is_one_of_several:
            close_groups()


def _read(options: Options) -> tuple[list[Item], str]:
    """The items, and how they were read. Collective: standard input is rank 0's."""
    usage = load_usage(Path(find_folder(options.model))) or Usage()
    try:
        form = build_form(options.csv_delimiter or usage.csv_delimiter, options.encoding or usage.encoding)
        given = (options.file, options.texts, options.column, usage.source_column, form)
        read = partial(read_items, *given, may_be_utf8=options.encoding is None)
        return on_rank_0(read) if options.file == "-" else read()
    except UserError as error:
        error.args = (str(error).replace("data.csv_delimiter", "--csv-delimiter").replace("data.encoding", "--encoding"),)
        raise


def _describe(generator: Generator, options: Options, how: str, num_items: int, num_done: int) -> None:
    """Print what will be done, with which settings."""
    if how:
        _say(options, how)
    config = generator.model.generation_config
    settings = f"max_new_tokens {config.max_new_tokens}, num_beams {config.num_beams or 1}"
    if generator.is_seq2seq:
        form = f"prefix {generator.usage.prefix!r}"
    else:
        form = "a text is a user's turn of its chat template" if _is_chat(generator, options.plain) else "a text is the prompt"
    dtype = str(next(generator.model.parameters()).dtype).removeprefix("torch.")
    _say(options, f"{find_folder(options.model)} on {generator.device} in {dtype}: {settings}; {form}")
    if num_done:
        _say(options, f"{options.output} has {num_done:,} of {num_items:,} texts already")


def _say(options: Options, sentence: str) -> None:
    """Print a remark; on stderr where the texts go to stdout."""
    if options.output:
        logger.info(sentence)
    elif rank() == 0:
        print(one_line(sentence), file=sys.stderr, flush=True)


def _encode(generator: Generator, item: Item, plain: bool) -> dict[str, Any]:
    """The tokens of an item, as a row of `Generator.generate`."""
    if generator.is_seq2seq and item.text is None:
        raise UserError(f"{item.where} is a chat, and the model is an encoder-decoder: give a text")
    messages = item.messages
    if item.text is not None and not _is_chat(generator, plain):
        return generator.encode_text(item.text)
    if messages is None:
        messages = [{"role": "user", "content": item.text}]
    try:
        return generator.encode_chat(messages, item.tools)
    except UserError:
        raise
    except TEMPLATE_ERRORS as error:
        raise UserError(f"{item.where}: the chat template refuses this chat ({error}): change the row") from None


def _is_chat(generator: Generator, plain: bool) -> bool:
    """Whether a text is given as a user's turn."""
    return not generator.is_seq2seq and not plain and generator.tokenizer.chat_template is not None


def _check_lengths(generator: Generator, rows: list[dict[str, Any]], items: list[Item]) -> None:
    """Refuse prompts that leave a causal model no position for the generated tokens."""
    limit = getattr(generator.model.config.get_text_config(), "max_position_embeddings", None)
    if generator.is_seq2seq or limit is None:
        return
    new = generator.model.generation_config.max_new_tokens
    for row, item in zip(rows, items, strict=True):
        if len(row["input_ids"]) + new > limit:
            raise UserError(
                f"{item.where} has {len(row['input_ids'])} tokens, with --max-new-tokens {new} more than the model's {limit} "
                "positions: shorten the text, or lower --max-new-tokens"
            )


def _generate_chunks(
    generator: Generator, rows: list[dict[str, Any]], options: Options, num_done: int
) -> Iterator[tuple[int, list[str]]]:
    """(first row, texts) of each chunk, in input order, on rank 0; no texts on others. Collective.

    In a chunk, rows are sorted by length, longest first, and batches are dealt out to the ranks, as in an evaluation.
    """
    size = options.batch_size_rows or generator.usage.batch_size_rows
    chunk = size * BATCHES_AT_ONCE * world_size()
    for first in range(num_done, len(rows), chunk):
        order = sorted(range(first, min(first + chunk, len(rows))), key=lambda i: -len(rows[i]["input_ids"]))
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        own: dict[int, str] = {}
        for batch in batches[rank() :: world_size()]:
            own.update(zip(batch, generator.generate([rows[i] for i in batch]), strict=True))
        gathered = {index: text for part in gather_objects(own) for index, text in part.items()}
        yield first, [gathered[index] for index in sorted(gathered)]


def _about_file(output: Path) -> Path:
    """What an unfinished output belongs to; removed at the end."""
    return output.with_name(f"{output.name}.unfinished")


def _begin_output(options: Options, items: list[Item]) -> int:
    """The number of texts that an earlier, unfinished call has written; a torn line is removed.

    Raises:
        UserError: the output exists and is not an unfinished one of this call, or cannot be written.
    """
    output = options.output
    assert output is not None
    digest = hashlib.sha256()
    weights = sorted(Path(find_folder(options.model)).glob("*.safetensors"))
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    settings = {**dataclasses.asdict(options), "output": None, "batch_size_rows": None, "file": None}
    for part in (state, settings, *((item.text, item.messages) for item in items)):
        digest.update(json.dumps(part, default=str).encode() + b"\n")
    about, mine = _about_file(output), digest.hexdigest()
    try:
        if output.exists():
            if not about.exists() or about.read_text(encoding="utf-8") != mine:
                raise UserError(f"--output {output} exists, and is not what this command left unfinished: name another file")
            lines = load_json_lines(output, skip_torn_end=True)
            output.write_bytes(b"".join(map(encode_json_line, lines)))
            return len(lines)
        about.write_text(mine, encoding="utf-8")
        output.touch()
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}): name a file that you can write") from None
    return 0


def _write(output: Path | None, first: int, texts: list[str]) -> None:
    """Append lines of `row` (from 1) and `prediction`, or print the texts."""
    if output is None:
        for text in texts:
            print(escape_controls(text), flush=True)
        return
    lines = [{"row": number, "prediction": text} for number, text in enumerate(texts, start=first + 1)]
    try:
        with output.open("ab") as file:
            file.write(b"".join(map(encode_json_line, lines)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror}): make room, and give the same command again"
        ) from None
