"""What pages say is what the code does: every sentence that `docs/troubleshooting.md` quotes is one that it prints, every
example of `docs/data_formats.md` is read as shown, and an argument of another trainer is answered with its line of
`toolkit/config/migrating.md`."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import accelerate.utils.launch
import pytest
import transformers.utils.hub
import yaml

from tests.support.chats import CHATML, build_chat_tokenizer
from tests.support.launch import REPOSITORY
from tests.support.rows import prepare_rows
from toolkit.config.data import DataConfig, LLMDataConfig, MixEntry, PreferenceDataConfig
from toolkit.config.messages import known_keys, suggestion
from toolkit.config.schema import LLMConfig, ModelConfig, PreferenceConfig, SummarizationConfig

TROUBLESHOOTING = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```$", TROUBLESHOOTING, re.MULTILINE | re.DOTALL)]
FILES = [*(REPOSITORY / "toolkit").rglob("*.py"), *(REPOSITORY / "recipes").rglob("*.py"), Path(accelerate.utils.launch.__file__)]
MARK = re.compile(r"^((error|WARNING): )?(PRESET\.yaml: |accelerate launch: )?")
"""What stands before a sentence: its level, and the YAML or the flags that a rule of launches is about."""
VALUE = re.compile(r"'?[A-Z][A-Z_0-9-]*(?:\.[a-z]+)?'?|[a-z]+\.[a-z_]+")
"""What the page writes in the place of a value: N, FILE.csv, data.files."""


def list_pieces(path: Path) -> set[str]:
    """The strings of a file, and what stands between the values of its f-strings; no docstrings, and no single letters."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings)
    texts = {node.value for node in nodes if isinstance(node.value, str)}
    texts |= {f"{text.partition('. ')[0]}." for text in texts if ". " in text}  # a quote may end after a sentence
    return {text for text in texts if len(text) > 2 or not re.search(r"\w", text)} - {""}


PIECES = [list_pieces(path) for path in FILES]


def is_printed(quote: str) -> bool:
    """Whether pieces of one file make the sentence, with the page's values between them."""
    for pieces in PIECES:
        near, ends = [piece for piece in pieces if piece in quote], {0}
        for place in range(len(quote)):
            if place in ends:
                ends |= {place + len(piece) for piece in near if quote.startswith(piece, place)}
                ends |= {value.end() for value in [VALUE.match(quote, place)] if value}
        if len(quote) in ends:
            return True
    return False


@pytest.mark.parametrize("quote", QUOTES, ids=[MARK.sub("", quote)[:40] for quote in QUOTES])
def test_the_code_prints_it(quote):
    quote = quote.removesuffix(" …")
    assert is_printed(quote) or is_printed(MARK.sub("", quote))
    word = max(re.findall(r"(?<![.\w])[a-z]+(?![.\w])", MARK.sub("", quote)), key=len)
    assert not is_printed(MARK.sub("", quote).replace(word, f"{word}s")), "another word is found"


def test_the_reasons_of_the_hub_are_those_of_transformers():
    source = Path(transformers.utils.hub.__file__).read_text(encoding="utf-8")
    reasons = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", TROUBLESHOOTING)
    assert len(reasons) == 3 and all(reason in source for reason in reasons)


DATA_FORMATS = (REPOSITORY / "docs" / "data_formats.md").read_text(encoding="utf-8")
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^## ", DATA_FORMATS, flags=re.MULTILINE)[1:] if "```yaml" in part
}
BLOCK = re.compile(r"(?:^`([^`\n]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[bool, str]:
    """Folders of a base model's tokenizer, and of one with a chat template."""
    folder = tmp_path_factory.mktemp("models")
    for has_template in (False, True):
        tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML if has_template else None)
        tokenizer.save_pretrained(folder / str(has_template))
    return {has_template: str(folder / str(has_template)) for has_template in (False, True)}


@pytest.mark.parametrize("section", SECTIONS)
def test_an_example_is_read_as_the_page_says(section, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = {}
    block, is_base, is_llm = "", False, False
    num_shown = 0
    for name, language, content in BLOCK.findall(SECTIONS[section]):
        if name:
            Path(name).write_text(content, encoding="utf-8")
        elif language == "python":
            exec(content, {})
        elif language == "yaml":
            settings = yaml.safe_load(content)["data"]
            block, is_llm, is_base = content, "llm.py" in content, "base model" in content
        elif language == "text":
            of = PreferenceDataConfig if "dpo.py" in block else LLMDataConfig if is_llm else DataConfig
            assert show(settings, models[not is_base], of, printed=capsys) == content
            num_shown += 1
    assert num_shown


def show(settings: dict, model: str, of, *, printed: pytest.CaptureFixture[str]) -> str:
    """What the run prints on reading, then each row as text; in an LLM's rows, `[[ ]]` is around what counts in the loss."""
    settings = {"eval_fraction": 0.0, "cache_dir": "cache", **settings}
    if "mix" in settings:
        settings["mix"] = [MixEntry(**entry) for entry in settings["mix"]]
    rows = prepare_rows(of(**settings), ModelConfig(name_or_path=model), 400)
    lines = [line for line in printed.readouterr().out.splitlines() if ": read as " in line]
    lines += [remark for remark in rows.remarks if remark.startswith("skipped")]
    decode = rows.tokenizer.decode
    for row in rows.train:
        ids = row["input_ids"]
        if of is DataConfig:
            lines += ["", f"{decode(ids)} -> {decode(row['labels'])}"]
            continue
        text, is_open = "", False
        for token, label in zip(ids, row["labels"], strict=True):
            text += ("[[" if label != -100 else "]]") * ((label != -100) != is_open) + f"\0{token}\0"
            is_open = label != -100
        parts = re.split(r"(\[\[|\]\])", text + "]]" * is_open)
        shown = "".join(decode([int(i) for i in part.split("\0") if i]) if "\0" in part else part for part in parts)
        lines += ["", shown.strip()]
    return "\n".join(lines) + "\n"


MIGRATING = (REPOSITORY / "toolkit" / "config" / "migrating.md").read_text(encoding="utf-8")
CLASSES = {"recipes/t5.py": SummarizationConfig, "recipes/llm.py": LLMConfig, "recipes/dpo.py": PreferenceConfig}
FIELD = re.compile(r"`(\S+)`( \(.+\))?")
TABLES = MIGRATING.split("\n## ")[1:]


def rows_of(table: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE)


@pytest.mark.parametrize("table", TABLES, ids=[table.partition("\n")[0] for table in TABLES])
def test_a_flag_is_answered_with_its_line(table):
    config_classes = [found for script, found in CLASSES.items() if script in table.partition("|")[0]]
    wrong = []
    for name, line in rows_of(table):
        key = FIELD.fullmatch(line)
        having = [found for found in config_classes if not key or key[1] in known_keys(found)[0]]
        answers = [suggestion(name.split(".")[-1], found) for found in having]
        expected = f"did you mean {key[1]}{key[2] or ''}?" if key else line
        wrong += [(name, line, answers)] * (not answers or any(expected not in answer for answer in answers))
    assert rows_of(table) and not wrong


def test_every_argument_of_the_seq2seq_trainer_has_a_line():
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    listed = {name for name, _ in rows_of(TABLES[0])}
    of_trainer = set(inspect.signature(Seq2SeqTrainer.__init__).parameters) - {"self", "model", "args"}
    assert {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} | of_trainer <= listed
