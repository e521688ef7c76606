"""Every example of docs/data_formats.md, from its file to tokens: the line that a run prints, and what is trained on."""

import re
from pathlib import Path

import pytest
import yaml

from tests.support.chats import CHATML, build_chat_tokenizer
from tests.support.launch import REPOSITORY
from tests.support.rows import prepare_rows
from toolkit.config.data import DataConfig, LLMDataConfig, MixEntry, PreferenceDataConfig
from toolkit.config.schema import ModelConfig

PAGE = (REPOSITORY / "docs" / "data_formats.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:] if "```yaml" in part}
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
