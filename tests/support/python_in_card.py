"""The Python that an export's model card shows, and what it prints."""

import ast
import contextlib
import io
import re
from pathlib import Path


def python_in_card(folder: Path) -> str:
    [lines] = re.findall("^```python\n(.*?)^```$", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return lines


def texts_of_python(lines: str, folder: Path, given: list[str]) -> list[str]:
    assert lines.count("['A text.']") == 1
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        exec(lines.replace("['A text.']", repr(given)), {})
    found: list[str] = ast.literal_eval(out.getvalue())
    return found
