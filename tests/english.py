"""Turns of phrase that are not English, and what to write in their place. `make check` looks for them in code and docs.

python -m tests.english
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ["toolkit", "recipes", "accelerate_configs", "docs", "benchmarks", "tests", "Makefile"]
PLACES += ["README.md", "CONTRIBUTING.md", "AGENTS.md"]
SUFFIXES = {".py", ".md", ".yaml", ".sbatch", ".txt", ""}
TURNS = {
    r"\b(the|its|their|a|from|at) begin\b": "start",
    r"(?<!here )(?<!which )\b(is|was|are|were|be) no "
    r"(?!(longer|few|small|larg|more|less|great|high|low|old|new|good|bett|wors|short|way|such|one\b|effect|use))": "is not a",
    r"\b(is|are|was|were) none of\b": "is not one of",
    r"\bbut for\b": "except",
    r"\b(is|are) told\b": "prints, reports, says",
    r"\b(nothing|what) that it has\b": "what it has",
    r"\bis of no (use|effect)\b": "has no use, has no effect",
    r"\bof before\b": "before",
    r"\bas well the\b": "the",
    r"\bweightless\b": "on the meta device",
    r"\bthat (it|they) ha(s|ve) be (\w+ed)\b": "subject first",
    r"\bheld[- ]back rows\b": "evaluation split",
    r"\ba (text|row|line|file|chat) a (line|row|rank|file)\b": "one per line",
}


def find_turns() -> list[str]:
    """FILE:LINE, the turn, and what to write, for each found."""
    found = []
    for place in PLACES:
        paths = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*"))
        for path in paths:
            if path.suffix not in SUFFIXES or not path.is_file() or path == Path(__file__) or "results" in path.parts:
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), start=1):
                for turn, instead in TURNS.items():
                    if match := re.search(turn, line, re.IGNORECASE):
                        found.append(f"{path.relative_to(ROOT)}:{number}: “{match[0].strip()}”: write “{instead}”")
    return found


if __name__ == "__main__":
    found = find_turns()
    print("\n".join(found) or "English: no turn of tests/english.py found")
    sys.exit(bool(found))
