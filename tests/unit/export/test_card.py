"""The model card has the hub's fields, figures beside their baselines, and no licence that nobody stated."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from tests.support.model_folders import _build_tokenizer
from toolkit.config.python import load_config
from toolkit.export.card import CARD_FILE, Origin, save_card
from toolkit.export.run_data import RunData
from toolkit.export.usage import write_python
from toolkit.objectives import built_in

ROWS = {"rows": "a", "num_beams": 1}
LINES = [
    {"kind": "eval", "step": 0, "loss": 6.0, "rougeL": 1.5, "num_rows": 8, "measured_on": ROWS},
    {"kind": "train", "step": 1, "loss": 5.0},
    {"kind": "eval", "step": 2, "loss": 4.25, "rougeL": 31.257, "mine/x": 2, "num_rows": 8, "measured_on": ROWS},
    {"kind": "eval", "step": 4, "loss": 3.0, "rougeL": 40.0, "num_rows": 8, "measured_on": ROWS},
    {"kind": "baseline", "step": 4, "name": "lead sentence", "rougeL": 17.5, "measured_on": ROWS},
    {"kind": "baseline", "step": 4, "name": "of other rows", "rougeL": 99.0, "measured_on": {"rows": "b"}},
]
DATA = RunData(
    fingerprint="f", num_training_rows=1234, num_held_out_rows=60, num_evaluated_rows=8, stop_token_ids=[], check_rows=[]
)


def card(folder: Path, recipe, model_config=None, step: int = 2, kind="model", lines=LINES, **settings) -> ModelCard:
    required = {"data.source": "csv", "data.files": ["/home/me/rows.csv"], "train.max_steps": 4, "run.name": "my_run"}
    config = load_config(recipe, overrides=required | {key.replace("__", "."): value for key, value in settings.items()})
    origin = Origin(step, "bfloat16", 2, DATA, lines)
    objective = built_in(config.data.objective)
    model_config, tokenizer = model_config or SimpleNamespace(), _build_tokenizer(("<pad>", "</s>"))
    use = write_python(objective, config, model_config, tokenizer, ".", origin, is_adapter=kind == "adapter")
    save_card(folder, config, model_config, origin, kind, "float32", use, objective.pipeline_tag(config))
    return ModelCard.load(folder / CARD_FILE)


def test_figures_stand_beside_their_baselines(tmp_path):
    written = card(tmp_path, "t5", model__name_or_path="google/flan-t5-base", data__prefix="sum: ", optim__lr=3e-4)
    expected = {"license": "unknown", "library_name": "transformers", "pipeline_tag": "summarization"}
    assert written.data.to_dict() == expected | {"base_model": "google/flan-t5-base", "base_model_relation": "finetune"}
    assert written.text.startswith(
        """
# my_run

[google/flan-t5-base](https://huggingface.co/google/flan-t5-base), fine-tuned. Weights in float32, after step 2.

Licence: not stated: the card and the config of the base model google/flan-t5-base that were read name none.

## Use

With plain transformers; `.` is this folder, or its id on the hub:

```python
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast
folder, texts = '.', ['A text.']
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="bfloat16")
prompts = ['sum: ' + text for text in texts]
inputs = tokenizer(prompts, truncation=True, max_length=512, padding=True, return_tensors="pt")
ids, mask = inputs["input_ids"], inputs["attention_mask"]
tokens = model.generate(input_ids=ids, attention_mask=mask)
print(tokenizer.batch_decode(tokens, skip_special_tokens=True))
```

## Data

| data |  |
| --- | --- |
| training rows | 1,234 |
| held-out rows | 60 (a fraction of 0.05 by a hash), of which 8 are evaluated |
| data.source | csv |
| data.files | \\['rows.csv'\\] |
| data.prefix | sum: |

## Metrics

On 8 held-out rows.

|  | loss | rougeL | mine/x |
| --- | --- | --- | --- |
| lead sentence | – | 17.5 | – |
| before training | 6 | 1.5 | – |
| these weights | 4.25 | 31.26 | 2 |

## Settings

| setting |  |
| --- | --- |
| train.global_batch_size_rows | 64 |
| train.seed | 0 |
| optim.lr | 0.0003 |
"""
    )
    assert "| computed in | bfloat16 |\n| processes | 2 |\n" in written.text and "/home/me" not in written.text
    # Other rows before training, a step that was not evaluated, and nothing at all.
    others = [LINES[0] | {"measured_on": {"rows": "b"}}, *LINES[1:]]
    files = {"data__eval_files": ["/home/me/eval.csv"]}
    other = card(tmp_path, "t5", lines=others, model__name_or_path="google/flan-t5-base", **files).text
    assert "before training" not in other and "| lead sentence | – | 17.5 | – |\n" in other
    assert "| held-out rows | 60 (files of their own), of which 8 are evaluated |" in other
    later = card(tmp_path, "t5", step=3, model__name_or_path="google/flan-t5-base")
    assert "| step 2; these weights were not evaluated | 4.25 | 31.26 | 2 |\n" in later.text
    none = SimpleNamespace()
    save_card(tmp_path, load_config("t5", overrides=PLAIN), none, Origin(), "model", "float32", "", None)
    assert "\nNo evaluation.\n" in (tmp_path / CARD_FILE).read_text()


def test_what_decides_the_loss_of_pairs_is_named(tmp_path):
    given = {"preference__reference": "/home/me/sft", "preference__label_smoothing": 0.1}
    of_pairs = card(tmp_path, "dpo", model__name_or_path="google/gemma-3-1b-it", **given).text
    assert "| preference.loss | sigmoid |\n| preference.beta | 0.1 |\n" in of_pairs
    assert "| preference.reference | sft |\n| preference.label_smoothing | 0.1 |\n" in of_pairs
    assert "preference." not in card(tmp_path, "llm", model__name_or_path="google/gemma-3-1b-it").text


PLAIN = {"model.name_or_path": "t5-small", "data.source": "org/rows", "train.max_steps": 1}


def save_base(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CARD_FILE).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "model_config", "licence", "sentence"),
    [
        ("---\nlicense: apache-2.0\n---\n", {}, "apache-2.0", "apache-2.0, that of the base model base."),
        ("---\nlicense: other\nlicense_name: own\n---\n", {}, "other", "own, that of the base model base."),
        ("---\nlanguage: en\n---\n", {"license": "mit"}, "mit", "mit, that of the base model base."),
        ("# no fields", {}, "unknown", "not stated: the card and the config of the base model base that were read name none."),
        ("---\nlicense: [a, b]\n---\n", {}, "unknown", "not stated: the card and "),
        ("---\n- {broken\n---\n", {}, "unknown", "not stated: the card and "),
    ],
)
def test_a_licence_is_the_bases_or_not_stated(tmp_path, text, model_config, licence, sentence):
    base = save_base(tmp_path / "base", text)
    written = card(tmp_path, "llm", SimpleNamespace(**model_config), model__name_or_path=str(base))
    assert written.data.license == licence and f"\nLicence: {sentence}" in written.text
    assert written.data.base_model is None and f"`{base.name}`" in written.text and str(tmp_path) not in written.text
    scratch = card(tmp_path, "llm", model__name_or_path=str(base), model__from_scratch=True)
    assert scratch.data.license == "unknown" and "Licence: not stated. These weights were trained from scratch." in scratch.text


@pytest.mark.parametrize(
    ("link", "kept"),
    [
        ("https://ai.google.dev/gemma/terms", True),
        ("LICENSE.md", True),
        ("javascript:alert(1)", False),
        (r"java\nscript:alert(1)", False),
        ("data:text/html,x", False),
        ("//evil.example", False),
        (r"https://a.example/\u202etxt.exe", False),
        ("https://a.example/) [x](javascript:1", False),
    ],
)
def test_the_link_of_a_base_is_a_link_or_left_out(tmp_path, link, kept):
    name = r"own\n---\n# Licence: mine\e[2J"
    text = f'---\nlicense: other\nlicense_name: "{name}"\nlicense_link: "{link}"\n---\n'
    written = card(tmp_path, "llm", SimpleNamespace(), model__name_or_path=str(save_base(tmp_path / "base", text)))
    assert written.data.to_dict().get("license_link") == (link if kept else None)
    assert written.data.license_name == r"own\n---\n# Licence: mine\x1b[2J"
    assert not re.search("^# Licence: mine", written.text, re.MULTILINE)


def test_adapters_and_hub_datasets_are_named_as_the_hub_names_them(tmp_path):
    adapter = {"model__name_or_path": "org/base", "model__revision": "v1", "adapter__method": "dora", "adapter__rank": 8}
    written = card(tmp_path, "llm", kind="adapter", data__source="org/rows", data__files=None, **adapter)
    fields = {"library_name": "peft", "base_model_relation": "adapter", "tags": ["lora"], "datasets": ["org/rows"]}
    assert written.data.to_dict() == fields | {"license": "unknown", "pipeline_tag": "text-generation", "base_model": "org/base"}
    assert "A dora adapter for [org/base](https://huggingface.co/org/base) at revision v1. Weights" in written.text
    assert "| adapter.rank | 8 |\n" in written.text
    budgets = {"train__global_batch_size_rows": 16, "train__global_batch_size_tokens": 4096}
    merged = card(tmp_path, "llm", kind="merged", **adapter, **budgets)
    assert "| train.global_batch_size_tokens | 4096 |\n" in merged.text and "global_batch_size_rows" not in merged.text
    assert merged.data.base_model_relation == "finetune" and "with a dora adapter merged into it." in merged.text
    assert card(tmp_path, "t5", data__target_language="fra_Latn", model__name_or_path="x/y").data.pipeline_tag == "translation"


def test_hostile_texts_stay_in_their_cells(tmp_path):
    hostile = {"data__prefix": "a | b\n```\n## `<script>` \x1b[31m", "run__name": "<b>`n`", "model__revision": "<b>`v`"}
    written = card(tmp_path, "t5", model__name_or_path="x/y", **hostile)
    assert "# &lt;b>\\`n\\`\n" in written.text and " at revision &lt;b>\\`v\\`, fine-tuned" in written.text
    assert "\n| data.prefix | a \\| b \\`\\`\\` ## \\`&lt;script>\\` \\\\x1b\\[31m |\n" in written.text
    assert len(re.findall("^ *```", written.text, re.MULTILINE)) == 2, "the Python ends where it does"
    base = save_base(tmp_path / "<b>base", "")
    named = card(tmp_path, "t5", model__name_or_path=str(base)).text
    assert "of the base model &lt;b>base that" in named and "<b>" not in named
