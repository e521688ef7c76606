"""The files of `recipes/sources/` as modules, run as a run does."""

from tests.support.launch import REPOSITORY
from toolkit.data.sources.own_function import run_file

SOURCES = REPOSITORY / "recipes" / "sources"
docstrings, functions, pairs, stdlib, wikihow = (
    run_file(SOURCES / f"{name}.py", name)[0] for name in ("docstrings", "functions", "pairs", "stdlib", "wikihow")
)
