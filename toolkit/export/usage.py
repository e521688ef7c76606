"""What using an exported model needs beside its weights: the run's generation settings, and how a text becomes tokens.

Generation settings go into the model's own `generation_config.json`, which every tool of transformers reads; without
`max_new_tokens` in it, plain `generate` stops after 20 tokens. What it has no key for goes into `toolkit.json`.

Also the commands that follow an export: to use, convert, serve, score and share the model, as far as each tool takes it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.config.load import RecipeConfig
from toolkit.config.schema import ModelConfig
from toolkit.errors import UserError
from toolkit.export.card import Origin, is_hub_id
from toolkit.export.paths import ExportPaths
from toolkit.models.config import PROCESSOR_FILES
from toolkit.models.generation import list_end_ids

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from toolkit.objectives.objective import Objective

SETTINGS_FILE = "toolkit.json"
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""What its `--max-lora-rank` takes, from the default."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How the run made tokens of texts, and how many rows its evaluations took at once. `toolkit.json` holds these fields."""

    prefix: str = ""
    """Text before every source."""
    max_source_length_tokens: int | None = None
    """Where an encoder-decoder's sources were cut; None: they were not."""
    source_language: str | None = None
    target_language: str | None = None
    source_column: str | None = None
    csv_delimiter: str | None = None
    encoding: str | None = None
    batch_size_rows: int = 8
    dtype: str = "float32"
    """Of the run's forward passes."""
    step: int | None = None
    """Of the run, whose weights these are."""
    weights_dtype: str | None = None
    """Of the exported weights."""
    add_tokens: list[str] | None = None
    """Tokens that an adapter's base lacks."""
    kept_tokens: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The special tokens that belong to texts, as `special_tokens.Kept`."""


def set_generation(
    model: Any, stop_token_ids: tuple[int, ...], pad_token_id: int, task_params: dict[str, Any] | None = None
) -> None:
    """Make `generate` do, without an argument, what the run's evaluations did.

    Pipelines of transformers 4 (not 5) let `task_specific_params` overrule that: those of T5 or GPT-2 are replaced by the run's.
    Both configs of the model are changed. `stop_token_ids` end a text in the rows, in addition to the model's own.
    """
    stops = list_end_ids(model, stop_token_ids)
    model.generation_config.update(pad_token_id=pad_token_id, eos_token_id=stops[0] if len(stops) == 1 else stops or None)
    vars(model.config).pop("task_specific_params", None)
    if task_params is not None:
        model.config.task_specific_params = task_params


class TextUsage(NamedTuple):
    """How texts become prompts and new tokens become texts, as Python: of `write_python`."""

    prompts: str = "texts"
    how: str = 'padding_side="left"'
    """More arguments of the tokenizer."""
    end: str = ""
    """What is cut off the prompts' tokens,"""
    new: str = "[:, ids.shape[1] :]"
    """and off the generated ones."""


def write_python(
    objective: Objective,
    config: RecipeConfig,
    model_config: PretrainedConfig,
    tokenizer: Any,
    folder: str,
    origin: Origin,
    *,
    is_adapter: bool,
) -> str:
    """Python that loads the model with plain transformers (an adapter with peft), and generates as the run's evaluations did."""
    auto_class, base, imports, adapt = objective.loader(model_config).__name__, "folder", "", []
    if is_adapter:
        base = "PeftConfig.from_pretrained(folder).base_model_name_or_path"
        base += f", revision={config.model.revision!r}" if config.model.revision else ""
        imports = ", GenerationConfig\nfrom peft import PeftConfig, PeftModel"
        adapt = ["model.generation_config = GenerationConfig.from_pretrained(folder)"]
        if config.model.add_tokens:  # the adapter brings the rows that its base lacks
            rows = f"max({1 + max(tokenizer.get_vocab().values())}, len(model.get_input_embeddings().weight))"
            adapt.append(f"model.resize_token_embeddings({rows}, mean_resizing=False)")
        adapt += ["model = PeftModel.from_pretrained(model, folder)"]
    # A plain tokenizer, for which `AutoTokenizer` takes the class of some models, and version 4 none.
    reader = {"TokenizersBackend": "PreTrainedTokenizerFast"}.get(type(tokenizer).__name__, "AutoTokenizer")
    lines = [
        f"from transformers import {auto_class}, {reader}{imports}",
        f"folder, texts = {folder!r}, ['A text.']",
        f"tokenizer = {reader}.from_pretrained(folder)",
        f'model = {auto_class}.from_pretrained({base}, dtype="{origin.computed_in}")',
        *adapt,
    ]
    if (texts := objective.write_usage(config, tokenizer, origin.data)) is None:
        return "\n".join([*lines, 'print(model(**tokenizer(texts, return_tensors="pt")).logits)'])
    prompts, how, end, new = texts
    lines += [
        f"prompts = {prompts}",
        f'inputs = tokenizer(prompts, {how}, padding=True, return_tensors="pt")',
        f'ids, mask = inputs["input_ids"]{end}, inputs["attention_mask"]{end}',
        "tokens = model.generate(input_ids=ids, attention_mask=mask)",
        f"print(tokenizer.batch_decode(tokens{new}, skip_special_tokens=True))",
    ]
    if kept := origin.data.kept_tokens if origin.data else {}:
        places = [pair for pair in kept.values() if pair[0] != re.escape(pair[1])]
        lines[0] = f"import re\n{lines[0]}" if places else lines[0]
        lines[-1:] = [
            f"kept, added = {[*kept]!r}, tokenizer.added_tokens_decoder",
            "left_out = [i for i in added if added[i].special and str(added[i]) not in kept]",
            f"texts = tokenizer.batch_decode([[i for i in row if i not in left_out] for row in tokens{new}.tolist()])",
            *(f"texts = [re.sub({place!r}, lambda _: {spaced!r}, text) for text in texts]" for place, spaced in places),
            "print(texts)",
        ]
    return "\n".join(lines)


def save_usage(config: RecipeConfig, folder: Path, **facts: Any) -> None:
    """Write `toolkit.json`; `facts` are the fields of `Usage` that are not the config's."""
    of_data = {f.name: getattr(config.data, f.name) for f in dataclasses.fields(Usage) if hasattr(config.data, f.name)}
    usage = Usage(batch_size_rows=config.eval.batch_size_rows, add_tokens=config.model.add_tokens, **of_data, **facts)
    (folder / SETTINGS_FILE).write_text(json.dumps(dataclasses.asdict(usage), indent=1) + "\n", encoding="utf-8")


def load_usage(folder: Path) -> Usage | None:
    """The settings of an exported model; None for a model that no run of ours exported. Another file of that name is a
    `UserError`."""
    path = folder / SETTINGS_FILE
    try:
        return Usage(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not what an export writes ({error}): export the model again, or remove the file") from None


def copy_processors(config: ModelConfig, folder: Path) -> None:
    """Copy what the base has of `PROCESSOR_FILES`; its images and sound are processed by it as before."""
    from transformers.utils import cached_file

    # A processor prefers an old base's template to that of the tokenizer, where the run has one.
    old = () if (folder / "chat_template.jinja").is_file() else ("chat_template.json",)
    for file in (*PROCESSOR_FILES, *old):
        with suppress(OSError):  # the base has none, or is no longer within reach
            shutil.copyfile(str(cached_file(config.name_or_path, file, revision=config.revision)), folder / file)


def list_commands(
    objective: Objective, config: RecipeConfig, skeleton: PreTrainedModel, tokenizer: Any, origin: Origin, places: ExportPaths
) -> list[str]:
    """A line for each tool that takes the exported model, or the adapter if that is all there is, and Python to use it."""
    folder = places.model or places.adapter
    assert folder is not None
    is_adapter, place = places.model is None, shlex.quote(str(folder))
    plain = " --plain" if tokenizer.chat_template and origin.data is not None and not origin.data.has_chats else ""
    python = write_python(objective, config, skeleton.config, tokenizer, str(folder), origin, is_adapter=is_adapter)
    lines = ["use it in Python:", *python.splitlines()]
    if not config.has_own_objective:
        lines.insert(0, f"use it: python -m toolkit generate {place} --file FILE.csv --output OUT.jsonl{plain}")
    lines += objective.list_commands(config, skeleton, folder, is_adapter=is_adapter)
    if config.export.push_to_hub:
        return lines
    if is_adapter and not is_hub_id(config.model.name_or_path):
        base = shlex.quote(config.model.name_or_path)
        lines.append(f"share it: export it with --merge first, as its base {base} is a folder here")
    else:
        lines.append(f"share it: hf upload USER/NAME {place}")
    return lines


def vllm_command(config: RecipeConfig, skeleton: PreTrainedModel, folder: Path, *, is_adapter: bool) -> str | None:
    """vLLM's command; None for an adapter that it does not take (DoRA, or one that trains modules or token rows fully), or a
    model with images whose folder does not say how they are processed."""
    if not is_adapter:
        lacks = skeleton.input_modalities != "text" and not any((folder / file).is_file() for file in PROCESSOR_FILES)
        return None if lacks else f"vllm serve {shlex.quote(str(folder))}"
    lora: Any = skeleton.peft_config["default"]  # type: ignore[index]
    rank = max(lora.r, *lora.rank_pattern.values()) if lora.rank_pattern else lora.r
    if lora.use_dora or lora.modules_to_save or lora.trainable_token_indices or rank > _VLLM_RANKS[-1]:
        return None
    needed = min(allowed for allowed in _VLLM_RANKS if allowed >= rank)
    ranks = f" --max-lora-rank {needed}" if needed > _VLLM_RANKS[0] else ""
    at = f" --revision {config.model.revision}" if config.model.revision else ""
    base, name, place = (shlex.quote(str(part)) for part in (config.model.name_or_path, config.run.name, folder))
    return f"vllm serve {base}{at} --tokenizer {place} --enable-lora --lora-modules {name}={place}{ranks}"
