"""Checks a run's exports: loads them with plain transformers and peft in a fresh process, and compares with what was trained."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from toolkit.config.load import RecipeConfig
from toolkit.config.schema import AdapterConfig
from toolkit.export.compare import LOGIT_TOLERANCE
from toolkit.models.load import fastest_attention
from toolkit.tools.verify.records import Proof, exact, failed, load_list, named, within
from toolkit.tools.verify.runs import GENERATION, WatchedRun
from toolkit.tools.verify.watched_run import hash_tensor

Tensors = dict[str, torch.Tensor]
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
    check = load_file(check_file)
    trained = {name: t for name, t in load_file(run.records / "trained.safetensors").items() if name.startswith("model.")}
    trained = {name.removeprefix("model."): t for name, t in trained.items()}
    frozen: dict[str, str] = json.loads((run.records / "trained.json").read_text(encoding="utf-8"))["frozen"]
    try:
        if config.adapter.method == "none":
            model = _load(config, run.folder / "export")
            weights = _compare_weights(run, "export", model, trained, frozen)
            return [weights, _compare_logits(run, "export", model, check), *_compare_texts(run, model)]
        adapted = _load_adapter(_load(config, config.model.name_or_path), run.folder / "export")
        named = {f"base_model.model.{name}": t for name, t in trained.items()}
        frozen = {f"base_model.model.{name}": digest for name, digest in frozen.items()}
        weights = _compare_weights(run, "adapter and base", adapted, named, frozen)
        merged = _load(config, run.folder / "merged")
        logits = [_compare_logits(run, "adapter", adapted, check), _compare_logits(run, "merged model", merged, check)]
        return [weights, *logits, *_compare_scale(run, config.adapter, adapted, merged, trained), *_compare_texts(run, merged)]
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # of transformers and peft: they cannot load a folder
        return [failed("export", run.title, " ".join(str(error).split()))]


def _load(config: RecipeConfig, name_or_path: str | Path) -> nn.Module:
    import transformers

    options: dict[str, Any] = {}
    if str(name_or_path) == config.model.name_or_path:
        options["revision"] = config.model.revision or "main"
    options["trust_remote_code"] = config.model.trust_remote_code
    if config.model.attn_implementation in ("eager", "sdpa"):  # others may not run on a CPU
        options["attn_implementation"] = config.model.attn_implementation
    elif config.model.attn_implementation is None:
        model_config = transformers.AutoConfig.from_pretrained(name_or_path, **options)
        options["attn_implementation"] = fastest_attention(model_config, "cpu")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    auto_class: Any = getattr(transformers, config.task.auto_class)
    return auto_class.from_pretrained(name_or_path, dtype=torch.float32, use_safetensors=True, **options).eval()


def _load_adapter(base: Any, folder: Path) -> nn.Module:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns about transformers' names
        return PeftModel.from_pretrained(base, str(folder)).eval()


def _compare_weights(run: WatchedRun, what: str, model: nn.Module, trained: Tensors, frozen: dict[str, str]) -> Proof:
    """Compare weights bit for bit, frozen ones by their hash."""
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    differences = {name: _difference(loaded.get(name), weight) for name, weight in trained.items()}
    unequal = [name for name, difference in differences.items() if difference]
    unequal += [name for name, digest in frozen.items() if name not in loaded or hash_tensor(loaded[name]) != digest]
    title = f"{run.title}: {what} reloaded, {len(trained) + len(frozen)} tensors"
    return exact("export", title, max(differences.values(), default=0.0), named(unequal, "is not what was trained"))


def _difference(loaded: torch.Tensor | None, weight: torch.Tensor) -> float:
    if loaded is None or loaded.shape != weight.shape:
        return float("inf")
    return 0.0 if torch.equal(loaded, weight) else float((loaded - weight).abs().max().nan_to_num(float("inf")))


@torch.no_grad()
def _compare_logits(run: WatchedRun, what: str, model: nn.Module, check: Tensors) -> Proof:
    """Compare logits, relative to the largest: the reloaded model runs on one process, the trained one was sharded."""
    inputs = {name: tensor for name, tensor in check.items() if name != "logits"}
    logits_BTV = model(**inputs, use_cache=False).logits
    difference = float((logits_BTV - check["logits"]).abs().max() / check["logits"].abs().max().clamp(min=1e-6))
    title, detail = f"{run.title}: {what} reloaded, logits", "logits differ from those of the trained model{}"
    return within("export", title, difference, "", LOGIT_TOLERANCE[torch.float32], detail)


def _compare_scale(run: WatchedRun, config: AdapterConfig, adapted: Any, merged: nn.Module, trained: Tensors) -> list[Proof]:
    """Check that the merge added alpha / rank * B A to each layer of the base, with the alpha of the run's config."""
    from transformers.pytorch_utils import Conv1D

    if config.method == "dora" or config.name_or_path is not None:  # DoRA has another formula, a loaded adapter its own config
        return []
    scale = config.alpha / (math.sqrt(config.rank) if config.method == "rslora" else config.rank)
    worst, num_layers = (0.0, ""), 0
    for name, a in trained.items():
        module, is_a, _ = name.partition(".lora_A.")
        if not is_a:
            continue
        base: Any = adapted.get_submodule(f"base_model.model.{module}").base_layer
        added = merged.get_parameter(f"{module}.weight").detach().double() - base.weight.detach().double()
        product = trained[name.replace(".lora_A.", ".lora_B.")].double() @ a.double() * scale
        product = product.T if isinstance(base, Conv1D) else product
        difference = float((added - product).norm() / product.norm().clamp(min=1e-30))
        worst, num_layers = max(worst, (math.inf if math.isnan(difference) else difference, module)), num_layers + 1
    if not num_layers:
        return []
    title = f"{run.title}: merged less base is {scale:g} B A, {num_layers} layers"
    return [within("adapter", title, *worst, SCALE_TOLERANCE, "what the adapter adds to {} is not what alpha and rank say")]


def _compare_texts(run: WatchedRun, model: Any) -> list[Proof]:
    """Check that the run generated the same tokens as plain transformers does from the same prompts, and repeated no n-gram."""
    generated = load_list(run, "generated")[:NUM_TEXTS]
    if not generated:  # rows of plain text have no prompt
        return []
    size = GENERATION["eval.no_repeat_ngram_size"]
    num_other = num_repeating = 0
    for item in generated:
        tokens_T = model.generate(
            input_ids=torch.tensor([item["prompt"]]),
            attention_mask=torch.ones(1, len(item["prompt"]), dtype=torch.int64),
            num_beams=GENERATION["eval.num_beams"],
            no_repeat_ngram_size=size,
            max_new_tokens=GENERATION["eval.max_new_tokens"],
            eos_token_id=item["eos"],
            pad_token_id=item["pad"],
            do_sample=False,
        )[0]
        plain = tokens_T.tolist() if model.config.is_encoder_decoder else tokens_T[len(item["prompt"]) :].tolist()
        new = _strip(item["new"], item["pad"])
        num_other += new != _strip(plain, item["pad"])
        ngrams = [tuple(new[place : place + size]) for place in range(len(new) - size + 1)]
        num_repeating += len(set(ngrams)) < len(ngrams)
    detail = f"{num_other} of {len(generated)} texts are not those of plain transformers" if num_other else ""
    detail = detail or (f"{num_repeating} of {len(generated)} texts repeat {size} tokens" if num_repeating else "")
    title = f"{run.title}: {len(generated)} texts, {GENERATION['eval.num_beams']} beams, no {size} tokens repeated"
    return [exact("generation", title, float(max(num_other, num_repeating)), detail)]


def _strip(tokens: list[int], pad: int) -> list[int]:
    """`tokens` without the padding at the end."""
    while tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens
