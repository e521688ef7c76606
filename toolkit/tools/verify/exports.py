"""Checks a run's exports: loads them with plain transformers and peft in a fresh process, and compares with what was trained."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from toolkit.config.load import RecipeConfig
from toolkit.config.schema import AdapterConfig
from toolkit.export.compare import LOGIT_TOLERANCE
from toolkit.files.json_lines import load_json_lines
from toolkit.models.config import load_model_config
from toolkit.models.freeze import hash_tensor
from toolkit.models.load import build_on_meta, from_files
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name
from toolkit.models.quantized import dequantize, find_scales, quantize, weight_name
from toolkit.tools.verify.records import Proof, Tensors, exact, largest, load_about, load_tensors, named, relative, within
from toolkit.tools.verify.runs import GENERATION, NUM_STEPS, WatchedRun

SCALE_TOLERANCE = 1e-2
"""Relative tolerance of what a merge adds, which is rounded to the last bits of the weights."""
NUM_TEXTS = 4
"""Number of texts to generate again, on the CPU, where a large model is slow."""


def check_exports(run: WatchedRun, config: RecipeConfig) -> list[Proof]:
    """Rows for the weights, logits and texts of `export/` and, for an adapter, also for `merged/` and its scale."""
    check_file = run.folder / "export_check.safetensors"
    if not check_file.is_file():
        detail = "" if run.failure else "nothing was exported"
        return [Proof(check="export", compared=run.title, is_reached=not run.failure, detail=detail)]
    try:
        rows = list(_compare_exports(run, config, load_file(check_file)))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # of transformers and peft: they cannot load a folder
        rows = [("export", Proof(compared=run.title, detail=" ".join(str(error).split())))]
    return [replace(proof, check=check) for check, proof in rows if proof is not None]


def _compare_exports(run: WatchedRun, config: RecipeConfig, check: dict[str, torch.Tensor]) -> Iterator[tuple[str, Proof | None]]:
    """Each row with the name of its check; `check` has a forward's arguments, and the trained model's `logits` for them."""
    trained = {name.removeprefix("model."): weight for name, weight in load_tensors(run, "trained").items()}
    if is_enabled(config.adapter):
        from peft import PeftModel

        base = load_plain(config, config.model.name_or_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about transformers' names
            adapted: Any = PeftModel.from_pretrained(base, str(run.folder / "export")).eval()
        coded = quantize_layers(adapted.base_model.model, load_about(run, "trained")["frozen"], config.adapter.base_dtype)
        yield "export", _compare_weights(run, "adapter and base", adapted.base_model.model, trained, coded)
        model = load_plain(config, run.folder / "merged")
        yield "export", _compare_logits(run, "adapter", adapted, check)
        yield "export", _compare_logits(run, "merged model", model, check)
        yield "adapter", _compare_scale(run, config.adapter, adapted, model, trained)
    else:
        model = load_plain(config, run.folder / "export")
        yield "export", _compare_weights(run, "export", model, trained, {})
        yield "export", _compare_logits(run, "export", model, check)
    yield "generation", _compare_texts(run, model)


def load_plain(config: RecipeConfig, name_or_path: str | Path) -> Any:
    import transformers

    options: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    if str(name_or_path) == config.model.name_or_path:
        options["revision"] = config.model.revision or "main"
    named = config.model.attn_implementation
    attention = named if named in ("eager", "sdpa") else None  # others may not run on a CPU
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    auto_class: Any = getattr(transformers, config.task.auto_class)
    options |= {"dtype": torch.float32, "attn_implementation": attention, "ignore_mismatched_sizes": False}
    base, task = config.model, config.task
    loaded, _ = from_files(
        auto_class, str(name_or_path), f"model {name_or_path}", options,
        lambda: build_on_meta(base, load_model_config(base, task), task, torch.float32),
    )  # fmt: skip
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
    frozen: dict[str, str] = load_about(run, "trained")["frozen"]
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)} | coded
    differences = {name: largest(loaded[name].numpy() if name in loaded else None, weight) for name, weight in trained.items()}
    unequal = [name for name, difference in differences.items() if difference]
    unequal += [
        name for name, digest in frozen.items() if name not in loaded or hash_tensor(loaded[name], loaded[name].dtype) != digest
    ]
    title = f"{run.title}: {what} reloaded, {len(trained) + len(frozen)} tensors"
    return exact(title, max(differences.values(), default=0.0), named(unequal, "is not what was trained"))


@torch.no_grad()
def _compare_logits(run: WatchedRun, what: str, model: nn.Module, check: dict[str, torch.Tensor]) -> Proof:
    """Compare logits, relative to the largest: the reloaded model runs on one process, the trained one was sharded."""
    inputs = {name: tensor for name, tensor in check.items() if name != "logits"}
    logits_BTV = model(**inputs, use_cache=False).logits
    difference = float((logits_BTV - check["logits"]).abs().max() / check["logits"].abs().max().clamp(min=1e-6))
    detail = "logits differ from those of the trained model"
    return within(f"{run.title}: {what} reloaded, logits", difference, detail, LOGIT_TOLERANCE[torch.float32])


def _compare_scale(run: WatchedRun, config: AdapterConfig, adapted: Any, merged: nn.Module, trained: Tensors) -> Proof | None:
    """Check that the merge added alpha / rank * B A to each layer of the base, with the alpha of the run's config."""
    from transformers.pytorch_utils import Conv1D

    if config.method == "dora" or config.name_or_path is not None:  # DoRA has another formula, a loaded adapter its own config
        return None
    scale = config.alpha / (math.sqrt(config.rank) if config.method == "rslora" else config.rank)
    differences = []
    for name, a in trained.items():
        module, is_a, _ = name.partition(".lora_A.")
        if not is_a:
            continue
        layer = adapted.get_submodule(f"base_model.model.{module}")
        base, held = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")  # of experts, or of a layer
        own: Any = base_name(f"{module}.base_layer.{held}")
        added = (merged.get_parameter(own).double() - getattr(base, held).double()).detach().numpy()
        a_ERI = a.astype(np.float64).reshape(getattr(layer, "num_experts", 1), -1, a.shape[1])
        b_ORE = trained[name.replace(".lora_A.", ".lora_B.")].reshape(-1, a_ERI.shape[1], len(a_ERI))
        product = np.einsum("ore,eri->eoi", b_ORE, a_ERI) * scale
        is_transposed = isinstance(base, Conv1D) or getattr(base, "is_transposed", False)
        product = (product.swapaxes(1, 2) if is_transposed else product).reshape(added.shape)
        detail = f"what the adapter adds to {module} is not what alpha and rank say"
        differences.append((relative(added - product, product), detail))
    title = f"{run.title}: merged less base is {scale:g} B A, {len(differences)} layers"
    return within(title, *max(differences), SCALE_TOLERANCE) if differences else None


def _compare_texts(run: WatchedRun, model: Any) -> Proof | None:
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
    return exact(title, float(max(num_other, num_repeating)), detail)
