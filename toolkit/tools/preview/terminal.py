"""The view in the terminal, by `rich`: coloured there; plain where it is piped, with marks in the colours' place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.errors import align, visible
from toolkit.tools.preview import wording
from toolkit.tools.preview.row import CONTEXT, LOSS, LOST, PADDING, RowView, Side, Span
from toolkit.tools.preview.step import Pack, StepView
from toolkit.tools.preview.summary import Summary
from toolkit.tools.preview.wording import NAMES
from toolkit.tools.report import rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from toolkit.tools.preview.facts import Preview

STYLES = {LOSS: "bold green", CONTEXT: "", PADDING: "dim", LOST: "strike red"}
MARKS = {LOSS: ("[[", "]]"), CONTEXT: ("", ""), PADDING: ("", ""), LOST: ("~~", "~~")}
"""Around tokens where there is no colour."""
BARS = {LOSS: "█", CONTEXT: "▒", PADDING: "·"}
BAR_WIDTH = 60


def print_preview(preview: Preview, console: Console) -> None:
    """Print the view. Its lines are `Text`, in which rich interprets nothing."""
    for line in _Lines(console).preview(preview):
        console.print(line, soft_wrap=True)


class _Lines:
    """The lines of the view for one console."""

    def __init__(self, console: Console) -> None:
        from rich.text import Text

        self._console, self._text = console, Text
        self._has_colour = console.is_terminal and not console.no_color and console.color_system is not None

    def preview(self, preview: Preview) -> Iterator[Text]:
        yield self._text()
        yield from self._block([preview.title, preview.processes], indent=0, first_style="bold")
        if preview.summary:
            yield from self._summary(preview.summary)
        if preview.step:
            yield from self._step(preview.step)
        if preview.rows:
            yield self._text()
            yield from self._block([self._legend()], indent=0)
        for row in preview.rows:
            yield from self._row(row, preview.step, is_whole=preview.is_whole)

    def _summary(self, summary: Summary) -> Iterator[Text]:
        yield from self._heading("Rows")
        data = summary.as_dict()
        yield from self._table(rows.list_splits(data))
        if summary.sources:
            yield from self._block([""])
            yield from self._table(rows.list_sources(data))
        yield from self._block([f"duplicates: {'; '.join(summary.duplicates) or 'none'}"])
        for lengths in data["lengths"]:
            yield from self._heading(rows.name_lengths(lengths))
            yield from self._block([rows.describe_percentiles(lengths)])
            bins = rows.name_bins(lengths)
            width, most = max(len(label) for label, _ in bins), max(count for _, count in bins)
            for label, count in bins:
                yield self._text(f"  {label:>{width}}  {'█' * -(-BAR_WIDTH * count // most)} {count:,}")
        yield from self._heading("Special tokens")
        yield from self._table(rows.list_special_tokens(data), left=(0, 3))
        yield from self._block([rows.describe_tokenizer(data)])

    def _step(self, step: StepView) -> Iterator[Text]:
        yield from self._heading(f"Step 1 of {step.num_steps:,} ({step.steps_per_epoch:,} an epoch)")
        legend = ", ".join(f"{bar} {NAMES[kind]}" for kind, bar in BARS.items())
        yield from self._block([*wording.describe_step(step), legend])
        longest = max(sum(num for _, num in pack.parts) for pack in step.first_packs)
        place = None
        for pack in step.first_packs:
            if place != (pack.rank, pack.micro_batch):
                place = (pack.rank, pack.micro_batch)
                yield self._text(f"  process {pack.rank}, micro-batch {pack.micro_batch + 1}")
            yield self._bar(pack, longest)
        yield from self._block([wording.not_shown(step)] if wording.not_shown(step) else [])

    def _bar(self, pack: Pack, longest: int) -> Text:
        """Parts are as wide as their share of the longest pack; `|` is between two rows."""
        line, done, drawn = self._text("    "), 0, 0
        for place, (kind, num) in enumerate(pack.parts):
            if place in pack.begins[1:]:
                line.append("|", style="dim")
            done += num
            end = round(BAR_WIDTH * done / longest)
            line.append(BARS[kind] * (end - drawn), style=STYLES[kind])
            drawn = end
        names = ", ".join(map(str, pack.row_ids))
        return line.append(f"  {'row' if len(pack.row_ids) == 1 else 'rows'} {names}")

    def _legend(self) -> Text:
        legend = self._text("tokens, with | between two: ")
        for place, kind in enumerate((LOSS, CONTEXT, LOST)):
            legend.append(", " if place else "").append_text(self._marked(kind, NAMES[kind]))
        return legend

    def _row(self, row: RowView, step: StepView | None, *, is_whole: bool) -> Iterator[Text]:
        heading, *lines = wording.describe_row(row, step)
        yield from self._heading(heading)
        yield from self._block(lines)
        yield from self._block(wording.describe_turns(row))
        for side in row.sides:
            yield from self._block([f"{side.name}: {wording.describe_side(side)}"], first_style="bold")
            yield from self._block(wording.shorten_text(side.text, row.row_id, is_whole=is_whole), indent=4)
            yield from self._block(["as tokens:"], indent=2)
            yield from self._block(self._tokens(side, wording.padding_behind(row, step, side), row.row_id, is_whole), indent=4)

    def _tokens(self, side: Side, padding: int, row_id: int, is_whole: bool) -> list[Text | str]:
        pieces = wording.shorten_spans(side.spans, row_id, is_whole=is_whole)
        parts: list[Text | str] = [piece if isinstance(piece, str) else self._spans(piece) for piece in pieces]
        return [*parts, f"and padding: {wording.plural(padding, 'token')}"] if padding else parts

    def _spans(self, spans: Sequence[Span]) -> Text:
        line = self._text()
        for place, (kind, tokens) in enumerate(spans):
            line.append("|" if place else "", style="dim")
            line.append_text(self._marked(kind, "|".join(visible(token).replace("\n", "⏎\n") for token in tokens)))
        return line

    def _marked(self, kind: str, text: str) -> Text:
        before, after = ("", "") if self._has_colour else MARKS[kind]
        return self._text(f"{before}{text}{after}", style=STYLES[kind])

    def _heading(self, text: str) -> Iterator[Text]:
        yield self._text()
        yield from self._block([text], indent=0, first_style="bold cyan")

    def _table(self, rows: list[list[str]], left: Sequence[int] = (0,)) -> Iterator[Text]:
        for number, line in enumerate(align([list(map(visible, row)) for row in rows], left)):
            yield self._text(f"  {line}".rstrip(), style="" if number else "dim")

    def _block(self, parts: Sequence[Text | str], indent: int = 2, first_style: str = "") -> Iterator[Text]:
        """Texts line by line; in a terminal wrapped to its width, elsewhere never."""
        for number, part in enumerate(parts):
            text = self._text(visible(part), style="" if number else first_style) if isinstance(part, str) else part
            lines = text.split("\n", allow_blank=True)
            for line in lines:
                width = max(20, self._console.width - indent)
                wrapped = line.wrap(self._console, width, overflow="fold") if self._console.is_terminal else [line]
                for piece in wrapped:
                    yield self._text(" " * (indent if piece.plain else 0)).append_text(piece)
