"""Compares what runs have exported with plain transformers and peft: its weights, logits and texts."""

import json
import math
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from toolkit.config.load import RecipeConfig
from toolkit.export.compare import LOGIT_TOLERANCE
from toolkit.files.json_lines import load_json_lines
from toolkit.models.config import load_model_config
from toolkit.models.freeze import hash_tensor
from toolkit.models.load import build_on_meta, from_files, grow_vocabulary
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name
from toolkit.models.quantized import dequantize, find_scales, quantize, weight_name
from toolkit.objectives import objective_of
from toolkit.tools.verify import proofs
from toolkit.tools.verify.proofs import Proof
from toolkit.tools.verify.runs import GENERATION, NUM_STEPS, NotReached, Tensors, WatchedRun

NUM_TEXTS = 4
"""Number of texts to generate again, on the CPU, where a large model is slow."""


def compare_exports(config: RecipeConfig, run: WatchedRun) -> Iterator[Proof]:
    """Weights, logits and texts of `export/` and, for an adapter, of `merged/`, reloaded."""
    if not (check_file := run.folder / "export_check.safetensors").is_file():
        raise NotReached(run)
    check = load_file(check_file)  # a forward's arguments, and the trained model's logits for them
    of_run = check.pop("logits")
    trained = {name.removeprefix("model."): weight for name, weight in run.tensors("trained").items()}

    def compare_logits(what: str, model: nn.Module) -> Proof:
        detail, tolerance = "logits differ from those of the trained model", LOGIT_TOLERANCE[torch.float32]
        return proofs.within(
            f"{run.title}: {what} reloaded, logits", largest_difference(of_run, logits_of(model, check)), detail, tolerance
        )

    if is_enabled(config.adapter):
        from peft import PeftModel

        base = load_plain(config, config.model.name_or_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about transformers' names
            adapted: Any = PeftModel.from_pretrained(base, str(run.folder / "export")).eval()
        coded = quantize_layers(adapted.base_model.model, run.about("trained")["frozen"], config.adapter.base_dtype)
        yield _compare_weights(run, "adapter and base", adapted.base_model.model, trained, coded)
        yield compare_logits("adapter", adapted)
        model = load_plain(config, run.folder / "merged")
        yield compare_logits("merged model", model)
    else:
        model = load_plain(config, run.folder / "export")
        yield _compare_weights(run, "export", model, trained, {})
        yield compare_logits("export", model)
    yield from proofs.prove("generation", run, partial(_compare_texts, model))


def load_plain(config: RecipeConfig, name_or_path: str | Path) -> Any:
    """The model of a folder in fp32; the base with rows of `model.add_tokens` too, the mean of the others in bf16."""
    import transformers

    options: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    if str(name_or_path) == config.model.name_or_path:
        options["revision"] = config.model.revision or "main"
    named = config.model.attn_implementation
    attention = named if named in ("eager", "sdpa") else None  # others may not run on a CPU
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    objective = objective_of(config)
    options |= {"dtype": torch.float32, "attn_implementation": attention, "ignore_mismatched_sizes": False}
    base, model_config = config.model, load_model_config(config.model, objective)
    loaded, _ = from_files(
        objective.loader(model_config), str(name_or_path), f"model {name_or_path}", options,
        lambda: build_on_meta(base, model_config, objective, torch.float32),
    )  # fmt: skip
    known = {name: weight.detach() for name, weight in loaded.named_parameters(remove_duplicate=False)}
    for name in grow_vocabulary(loaded, base) if "revision" in options else ():
        loaded.get_parameter(name).data[len(known[name]) :] = known[name].bfloat16().double().mean(dim=0).float()
    return loaded.eval()


def quantize_layers(model: nn.Module, names: Iterable[str], kind: str | None) -> dict[str, torch.Tensor]:
    """Quantize in place the layers that have codes among `names`, of a model adapted or not; returns codes and scales by name."""
    coded, weights = dict[str, torch.Tensor](), dict[str | None, nn.Parameter](model.named_parameters())  # type: ignore[arg-type]
    for layer_name in [name.removesuffix(".codes") for name in names if kind and name.endswith(".codes")]:
        weight = next(weights[name] for rule in (weight_name, base_name) if (name := rule(f"{layer_name}.codes")) in weights)
        codes, scales = quantize(weight.data, str(kind)), find_scales(weight.data)
        weight.data = dequantize(codes, scales)
        coded |= {f"{layer_name}.codes": codes, f"{layer_name}.scales": scales}
    return coded


def _compare_weights(run: WatchedRun, what: str, model: nn.Module, trained: Tensors, coded: dict[str, torch.Tensor]) -> Proof:
    """Compare weights bit for bit, frozen ones by their hash; `coded` are codes and scales of the model's quantized layers."""
    frozen: dict[str, str] = run.about("trained")["frozen"]
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)} | coded
    differences = {
        name: proofs.largest(loaded[name].numpy() if name in loaded else None, weight) for name, weight in trained.items()
    }
    unequal = [name for name, difference in differences.items() if difference]
    unequal += [
        name for name, digest in frozen.items() if name not in loaded or hash_tensor(loaded[name], loaded[name].dtype) != digest
    ]
    title = f"{run.title}: {what} reloaded, {len(trained) + len(frozen)} tensors"
    return proofs.exact(title, max(differences.values(), default=0.0), proofs.named(unequal, "is not what was trained"))


def _compare_texts(model: Any, run: WatchedRun) -> Proof | None:
    """Check that the run generated the same texts as plain transformers does from the same prompts, and repeated no n-gram; None
    without prompts, as in rows of plain text."""
    from transformers import AutoTokenizer

    path, rows = run.folder / f"predictions-{NUM_STEPS}.jsonl", json.loads((run.records / "texts.json").read_text())["rows"][1]
    if not path.exists():
        return None
    prompts = {row["row_id"]: row["input_ids"][: row.get("prompt_length")] for row in rows}
    tokenizer, size = AutoTokenizer.from_pretrained(run.records / "tokenizer"), GENERATION["eval.no_repeat_ngram_size"]
    num_other = num_repeating = 0
    for line in (lines := load_json_lines(path)[:NUM_TEXTS]):
        prompt_1S = torch.tensor([prompts[line["row_id"]]])
        settings = {name.partition(".")[2]: value for name, value in GENERATION.items() if name != "eval.generate"}
        tokens_T = model.generate(prompt_1S, attention_mask=torch.ones_like(prompt_1S), do_sample=False, **settings)[0].tolist()
        new = tokens_T if model.config.is_encoder_decoder else tokens_T[prompt_1S.shape[1] :]
        num_other += tokenizer.decode(new, skip_special_tokens=True) != line["prediction"]
        ngrams = [tuple(new[place : place + size]) for place in range(len(new) - size + 1)]
        num_repeating += len(set(ngrams)) < len(ngrams)
    detail = f"{num_other} of {len(lines)} texts are not those of plain transformers" if num_other else ""
    detail = detail or (f"{num_repeating} of {len(lines)} texts repeat {size} tokens" if num_repeating else "")
    title = f"{run.title}: {len(lines)} texts, {GENERATION['eval.num_beams']} beams, no {size} tokens repeated"
    return proofs.exact(title, float(max(num_other, num_repeating)), detail)


@torch.no_grad()
def logits_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """On the CPU."""
    return model(**{name: t.to(model.device) for name, t in inputs.items()}, use_cache=False).logits.cpu()


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of logits, relative to the largest of one; infinity for NaN, which `max` would overlook."""
    difference = float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))
    return math.inf if math.isnan(difference) else difference
