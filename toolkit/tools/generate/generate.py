"""`python -m toolkit generate`: reads rows, generates in batches as an evaluation does, and writes the texts in input order.

Rows are read, made into tokens, generated for and written window by window, so memory does not grow with their number.
"""

import hashlib
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.data.rows.example import Example
from toolkit.data.rows.inputs import RowInput
from toolkit.data.sources.row import check_text
from toolkit.data.tokens.special_tokens import compile_special_tokens, mark, mark_content
from toolkit.distributed.comm import gather_objects, on_all_ranks, on_rank_0, rank, world_size
from toolkit.distributed.progress import Phase
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError, escape_controls, one_line
from toolkit.evaluation.generate import describe_flaws
from toolkit.launch.accelerator import build_accelerator
from toolkit.launch.environment import is_launched
from toolkit.launch.log import lost_outputs
from toolkit.launch.rank_consistency import describe_files
from toolkit.models.position_limits import group_by_rope, list_shared_ropes
from toolkit.tools.generate.files import Options, Row, append_texts, begin_output, end_output, open_rows, read_notes, read_prompts
from toolkit.tools.generate.model import Generator, find_folder, in_own_words, load_generator, open_model
from toolkit.training.run import release
from toolkit.variables import num_launched

logger = logging.getLogger("toolkit")

BATCHES_AT_ONCE = 64
"""Batches of each process that are a window: read, sorted by length and written together."""


def run(*, is_chat: bool, max_new_tokens: int | None, num_beams: int | None, **options: Any) -> None:
    """The command, with the errors of `generate` and `chat`."""
    settings = {"max_new_tokens": max_new_tokens, "num_beams": num_beams}
    given = {name: number for name, number in settings.items() if number is not None}
    if is_chat:
        chat(options["model"], options["dtype"], given)
    else:
        generate(Options(settings=given, **options))


def generate(options: Options) -> None:
    """Generate a text for every item, and write or print them in input order. A model, input or output that is not usable is a
    `UserError`, with file and row. Collective under `accelerate launch`.

    An output that was not finished is continued.
    """
    is_one_of_several = is_launched() or num_launched() > 1  # torchrun sets this alone
    with in_own_words():
        if is_one_of_several:
            found = describe_files(Path(find_folder(options.model)))
            given = vars(options) | {"model": None, "file": None, "output": options.output is not None}  # paths may differ
            started_with = {f"{name} of generate": value for name, value in given.items()}
            build_accelerator(started_with=started_with | {f"{name} of the model": about for name, about in found.items()})
        _generate(options)
    if is_one_of_several:  # after an error, others may still be in a collective
        release()


def chat(name: str, dtype: str | None, settings: dict[str, Any]) -> None:
    """Read a turn, print the answer, until the input ends; an empty line, or an error, begins a new chat. An
    encoder-decoder, or a tokenizer without a chat template, is a `UserError`."""
    with in_own_words():
        opened = open_model(name)
        if not opened.takes_chats():
            why = "has no chat template" if opened.objective.takes_chats else f"is {opened.objective.kind}"
            raise UserError(f"--chat: {name} {why}: give the text as --text")
        generator = load_generator(opened, dtype, settings)
    print("An empty line begins a new chat; Ctrl-D ends.")
    messages: list[dict[str, Any]] = []
    while True:
        try:
            if said := input("> ").strip():
                check_text(said, "this turn")
                messages.append({"role": "user", "content": said})
                [answer] = generator.generate(generator.encode([("this chat", Example(messages=messages))], plain=False))
                print(escape_controls(answer), flush=True)
                # What its template writes is not said again as text.
                said = compile_special_tokens(generator.tokenizer, mark).sub("", mark_content(generator.tokenizer, answer))
                messages.append({"role": "assistant", "content": said})
                continue
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except (UserError, UnicodeDecodeError) as error:
            print(f"error: {escape_controls(str(error))}", flush=True)
        messages = []
        print("(a new chat)")


def _generate(options: Options) -> None:
    enter_phase("reading the rows", counts_cpu=True)
    # What can be known before the weights are read. Rank 0 alone reads rows, and gives each window of them to all.
    opened = on_all_ranks(lambda: open_model(options.model))
    open_input = partial(open_rows, options, opened.usage, has_chat_template=opened.takes_chats(plain=options.plain))
    rows, num_rows = on_all_ranks(lambda: open_input() if rank() == 0 else (None, None))
    num_done = on_rank_0(lambda: begin_output(options)) if options.output else 0
    batch_size = options.batch_size_rows or opened.usage.batch_size_rows
    windows = _read_windows(rows, options.output, num_done, batch_size * BATCHES_AT_ONCE * world_size()) if rows else iter(())
    read_window = partial(on_rank_0, partial(next, windows, ([], "")))
    window, digest = read_window()
    enter_phase("loading the model", counts_cpu=True)  # one GPU may lack room
    generator = load_generator(opened, options.dtype, options.settings)
    if rows:
        _describe(generator, options, rows, num_rows, num_done)
    num_cut = 0
    with Phase("generating", num_rows, "texts", done=num_done, enabled=options.output is not None) as generating:
        while window:
            try:
                encoded = on_all_ranks(partial(generator.encode, window, plain=options.plain))
                num_cut += sum(row["num_lost_tokens"] > 0 for row in encoded)
                texts = _generate_window(generator, encoded, batch_size)
                on_rank_0(partial(append_texts, options.output, num_done, texts, digest))
                num_done += len(window)
                generating.add(len(window))
                if options.output is None and on_rank_0(lambda: "stdout" in lost_outputs()):
                    break  # nobody reads more of them
                enter_phase("reading the rows", counts_cpu=True)
                window, digest = read_window()
            except UserError as error:
                if options.output and num_done:
                    kept = f"{options.output} keeps its {num_done:,} texts, and the same command goes on after them"
                    error.args = (f"{error}; {kept}",)
                raise
    if num_cut:
        _say(options, f"cut {num_cut:,} of {num_done:,} texts to {opened.usage.max_source_length_tokens} tokens")
    if flaws := describe_flaws(sum(gather_objects(generator.flaws), Counter()), ""):
        _say(options, flaws)
    for what, num in sorted(generator.omitted.items()):
        _say(options, f"the chat template left out context of {num:,} of {num_done:,} rows: {what}")
    if options.output and rank() == 0:
        end_output(options.output)
        logger.info(f"{num_done:,} texts are in {options.output}")


def _read_windows(rows: RowInput, output: Path | None, num_done: int, size: int) -> Iterator[tuple[list[Row], str]]:
    """The rows without a text, window by window, each with a digest of all rows up to its end.

    An unfinished output notes these digests. So it is continued after a row has been corrected or added, but not with other rows
    than those that its texts were generated for.
    """
    other = UserError(f"--output {output} has texts of other rows than the first {num_done:,} now: name another file")
    notes = read_notes(output) if output and num_done else {}
    digest, window, number = hashlib.sha256(), [], 0
    for number, row in enumerate(read_prompts(rows), start=1):
        digest.update(repr(row[1]).encode())
        if number > num_done:
            window.append(row)
        elif notes.get(number, digest.hexdigest()) != digest.hexdigest():
            raise other
        if len(window) == size:
            yield window, digest.hexdigest()
            window = []
    if number < num_done:
        raise other
    if window:
        yield window, digest.hexdigest()


def _generate_window(generator: Generator, rows: list[dict[str, Any]], batch_size: int) -> list[str]:
    """The texts of a window, in its order. Collective.

    Rows are sorted by length, longest first, and batches are dealt out to the ranks, as in an evaluation.
    """
    new, ropes = generator.model.generation_config.max_new_tokens, list_shared_ropes(generator.config)
    groups = [group_by_rope(ropes, length, length + new) for length in (len(row["input_ids"]) for row in rows)]
    order = sorted(range(len(rows)), key=lambda i: (groups[i], -len(rows[i]["input_ids"])))
    together = [list(part) for _, part in itertools.groupby(order, key=groups.__getitem__)]
    batches = [part[i : i + batch_size] for part in together for i in range(0, len(part), batch_size)]
    own: dict[int, str] = {}
    for batch in batches[rank() :: world_size()]:
        enter_phase("generating")
        own.update(zip(batch, generator.generate([rows[i] for i in batch]), strict=True))
    gathered = {index: text for part in gather_objects(own) for index, text in part.items()}
    return [gathered[index] for index in sorted(gathered)]


def _describe(generator: Generator, options: Options, rows: RowInput, num_rows: int | None, num_done: int) -> None:
    """Print what will be done, with which settings."""
    if rows.reading:
        _say(options, f"{rows.label}: {num_rows:,} rows, read as {rows.reading}")
    config, usage = generator.model.generation_config, generator.usage
    settings = f"max_new_tokens {config.max_new_tokens}, num_beams {config.num_beams or 1}"
    form = "a text is a user's turn of its chat template"
    if not generator.takes_chats(plain=options.plain):
        form = "a text is the prompt" if generator.objective.continues_prompt else f"prefix {usage.prefix!r}"
    dtype = str(next(generator.model.parameters()).dtype).removeprefix("torch.")
    _say(options, f"{generator.folder} on {generator.model.device} in {dtype}: {settings}; {form}")
    if num_done:
        of = "" if num_rows is None else f" of {num_rows:,}"
        _say(options, f"{options.output} has {num_done:,}{of} texts already")


def _say(options: Options, sentence: str) -> None:
    """Print a remark; on stderr where the texts go to stdout."""
    if options.output:
        logger.info(sentence)
    elif rank() == 0:
        print(one_line(sentence), file=sys.stderr, flush=True)
