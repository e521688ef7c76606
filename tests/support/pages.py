"""A page of `report` or `preview`, read back as a browser would parse it."""

import json
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """The elements of a page with their attributes, its texts by element and by the class of their `div`, and its scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.blocks: dict[str, list[str]] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open: list[str] = [""]
        self._divs: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        elif tag == "div":
            self._divs.append(str(dict(attrs).get("class")))
            self.blocks.setdefault(self._divs[-1], []).append("")

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        else:
            self.texts.setdefault(self._open[-1], []).append(data)
        if self._divs:
            self.blocks[self._divs[-1]][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open.append("")
        if tag == "div":
            self._divs.pop()

    def data(self, name: str):
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("id") == f"data-{name}")

    @property
    def words(self) -> str:
        return " ".join(part for tag, parts in self.texts.items() if tag != "style" for part in parts)
