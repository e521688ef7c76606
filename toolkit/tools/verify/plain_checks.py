"""Compares runs with plain transformers: rows with their texts, step 1 and the evaluation before it a row at a time in fp64,
buffers, and logits of long rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file

from toolkit.config.load import RecipeConfig
from toolkit.data.rows.example import Example, read_examples
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE
from toolkit.distributed.device import free_memory_bytes
from toolkit.export.compare import LOGIT_TOLERANCE
from toolkit.models.config import load_model_config
from toolkit.models.freeze import hash_tensor
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name
from toolkit.tools.verify import plain, records
from toolkit.tools.verify.checks import RELU_TOLERANCE, largest_gradient
from toolkit.tools.verify.exports import load_plain, quantize_layers
from toolkit.tools.verify.records import NotReached, Proof
from toolkit.tools.verify.runs import WatchedRun

FP64_SHARE_OF_FREE_MEMORY = 0.5
"""fp64 is taken if 16 bytes a parameter, for weights and gradients, are at most this share of the free memory; else fp32."""


def check_plain(runs: dict[str, WatchedRun], config: RecipeConfig, tolerance: float, *, use_cpu: bool) -> list[Proof]:
    """The rows of the checks `buffers`, `positions` and `text`: the last of the reference, with which other checks compare."""
    reference, proofs = runs["reference"], list[Proof | None]()
    fresh = [run for run in runs.values() if run.plan.after is None and not run.plan.flags["model.dropout"]]
    try:
        if (model := _load(reference, config)) is None:  # weights with new tokens, or drawn and frozen ones, are only in the run
            return []
        proofs += [records.prove("buffers", run, partial(_compare_buffers, model)) for run in runs.values()]
        model = model.to("cpu" if use_cpu else "cuda")
        proofs += [records.prove("positions", run, partial(_compare_positions, model)) for run in fresh]
        proofs += [replace(proof, check="text") for proof in _compare_step(model, reference, config, tolerance)]
    except NotReached as missing:
        proofs.append(Proof(check="text", compared=reference.title, is_reached=not missing.args[0].failure))
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:  # of transformers
        proofs.append(Proof(check="text", compared=reference.title, detail=" ".join(str(error).split())))
    return [*filter(None, proofs)]


def _load(run: WatchedRun, config: RecipeConfig) -> Any:
    """The model that a run starts with, by plain transformers in fp32 on the CPU; None if it cannot be had without the run."""
    frozen = records.load_about(run, "loaded")["frozen"]
    if config.model.add_tokens or (config.model.from_scratch and frozen):
        return None
    if not config.model.from_scratch:
        model = load_plain(config, config.model.name_or_path)
        quantize_layers(model, frozen, config.adapter.base_dtype)
        return model
    import transformers

    model_config = load_model_config(config.model, config.task)
    model = getattr(transformers, config.task.auto_class).from_config(model_config, dtype=torch.float32).eval()
    weights = {
        name.removeprefix("model."): torch.from_numpy(weight) for name, weight in records.load_tensors(run, "loaded").items()
    }
    model.load_state_dict(weights, strict=False)
    return model


def _compare_buffers(model: torch.nn.Module, run: WatchedRun) -> Proof | None:
    """Check that every buffer, persistent or not, is bit for bit that of plain transformers, in its dtype; None without any."""
    about = records.load_about(run, "loaded")
    quantized = {name.rpartition(".")[0] for name in about["frozen"] if name.endswith(".codes")}  # have a table of their own
    held = {
        base_name(name) or name: value for name, value in about["buffers"].items() if name.rpartition(".")[0] not in quantized
    }
    expected = {name: [str(buffer.dtype), hash_tensor(buffer, buffer.dtype)] for name, buffer in model.named_buffers()}
    wrong = sorted(name for name in {**expected, **held} if expected.get(name) != held.get(name))
    return (
        records.exact(f"{run.title}: {len(expected)} buffers", len(wrong), records.named(wrong, "is another"))
        if expected or held
        else None
    )


@torch.no_grad()
def _compare_positions(model: Any, run: WatchedRun) -> Proof:
    """Compare the last logits of long rows, relative to the largest."""
    path = run.records / "positions.safetensors"
    if not path.is_file():
        raise NotReached(run)
    looked, worst, where = load_file(path), (0.0, ""), []
    for kind in dict.fromkeys(name.partition(".")[0] for name in looked):
        inputs = {name.partition(".")[2]: t.to(model.device) for name, t in looked.items() if name.startswith(f"{kind}.")}
        expected = inputs.pop("logits")
        logits = model(**inputs, use_cache=False).logits[:, -plain.NUM_LOGITS :]
        difference = float((logits - expected).abs().max() / logits.abs().max().clamp(min=1e-6))
        worst = max(worst, (math.inf if math.isnan(difference) else difference, f"logits of the {kind} row differ"))
        where.append(f"{inputs.get('position_ids', inputs['input_ids'] * 0 + inputs['input_ids'].shape[1] - 1).max() + 1:,}")
    dtype = torch.bfloat16 if run.plan.mapping["mixed_precision"] == "bf16" else torch.float32
    return records.within(f"{run.title}: logits at position {' and '.join(where)}", *worst, LOGIT_TOLERANCE[dtype])


def _read_rows(run: WatchedRun, config: RecipeConfig) -> tuple[Proof, list[plain.Row], list[plain.Row], int]:
    """Check the rows of step 1 and of the evaluation; these rows as their texts say, and the bytes of the latter's targets."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.records / "tokenizer")
    about = json.loads((run.records / "texts.json").read_text())
    examples = dict(zip(about["texts"]["row_id"], read_examples(about["texts"]), strict=True))
    num_known, wrong, most = 0, [], run.plan.flags.get("data.max_length_tokens", getattr(config.data, "max_length_tokens", 0))
    for row in (row for part in about["rows"] for row in part):
        piece, row_id = divmod(row["row_id"], ROW_IDS_OF_A_PIECE)
        known = _expect(tokenizer, examples[row_id], piece, most, config.data)
        num_known += known is not None
        wrong += [f"row {row_id}"] if known not in (None, (row["input_ids"], row["labels"])) else []
        row["known"] = known or (row["input_ids"], row["labels"])
    title = f"{run.title}: tokens and labels of {num_known} of {sum(map(len, about['rows']))} rows, and their texts"
    parts = [[row["known"] for row in part] for part in about["rows"]]
    num_bytes = sum(row["target_bytes"] for row in about["rows"][1])
    return records.exact(title, len(wrong), records.named(wrong, "has other tokens or labels")), *parts, num_bytes


def _expect(tokenizer: Any, example: Example, piece: int, most: int, data: Any) -> plain.Row | None:
    """What a row's text comes to; None where a rule of the toolkit says it: for chats, and where a token spans a prompt's end."""
    if "row" not in data.task.sides:
        texts = (data.prefix + str(example.prompt), str(example.completion))
        return plain.seq2seq_row(tokenizer, *texts, data.max_source_length_tokens, data.max_target_length_tokens)
    if example.text is not None:
        return plain.causal_row(tokenizer, "", example.text, most, piece)
    if example.messages is not None:
        return None
    texts = (str(example.prompt), str(example.completion))
    return plain.causal_row(tokenizer, *texts, most, all_count=data.loss_on == "all")


def _compare_step(model: Any, run: WatchedRun, config: RecipeConfig, tolerance: float) -> Iterator[Proof]:
    """Compare the rows of step 1 and of the evaluation before it, both losses, accuracy, bits per byte, and the gradients."""
    first, (evaluated, *_) = records.load_lines(run, "train")[0], [*records.load_lines(run, "eval", needed=False), {}]
    proof, of_step, of_evaluation, num_bytes = _read_rows(run, config)
    yield proof
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if 16 * num_parameters <= FP64_SHARE_OF_FREE_MEMORY * free_memory_bytes(model.device):
        model = model.double()
        model.set_experts_implementation("eager")  # grouped products know no fp64
    dtype, weights = str(model.dtype).removeprefix("torch."), _trained(model, records.load_tensors(run, "loaded"), config)
    if evaluated.get("step") == 0:
        with torch.no_grad():
            looked = [plain.label_logits(model, row) for row in of_evaluation]
            loss, num_labels = sum(plain.summed_loss(*pair).item() for pair in looked), sum(len(labels) for _, labels in looked)
            num_correct = sum(int((logits_NV.argmax(-1) == labels_N).sum()) for logits_NV, labels_N in looked)
        figures = {"loss": loss / num_labels, "token_accuracy": 100 * num_correct / num_labels}
        figures |= {"bits_per_byte": loss / math.log(2) / num_bytes} if num_bytes else {}
        apart = max((records.relative(evaluated[name] - value, value), f"{name} differs") for name, value in figures.items())
        yield records.within(f"{run.title}: {', '.join(figures)} of {len(looked)} evaluation rows, {dtype}", *apart, tolerance)
    num_labels, loss = sum(label != plain.IGNORED for _, labels in of_step for label in labels), 0.0
    for row in of_step:
        of_row = plain.summed_loss(*plain.label_logits(model, row), config.optim.label_smoothing) / num_labels
        loss += of_row.item()
        if weights:
            of_row.backward()
    detail = "the loss differs"
    if first["num_label_tokens"] != num_labels:
        detail = f"the rows have {num_labels} labels, of which the run counts {first['num_label_tokens']}"
    title = f"{run.title}: loss of step 1, {num_labels} labels, {dtype}"
    yield records.within(title, records.relative(first["loss"] - loss, loss), detail, tolerance)
    if weights and config.optim.router_aux_loss == "off":
        title = f"{run.title}: gradients of step 1, {len(weights)} tensors, {dtype}"
        computed = {name: (w.grad if w.grad is not None else torch.zeros_like(w)).cpu().numpy() for name, w in weights.items()}
        if records.load_about(run, "loaded")["has_relu"]:
            title, tolerance = f"{title} (with ReLU)", max(tolerance, RELU_TOLERANCE)
        yield records.within(title, *largest_gradient(computed, records.load_tensors(run, "gradients")), tolerance)


def _trained(model: Any, loaded: dict[str, Any], config: RecipeConfig) -> dict[str, torch.Tensor]:
    """The parameters of a plain model that the run trains; none for an adapter that is not LoRA on linear layers alone."""
    names = [name.removeprefix("model.") for name in loaded if name.startswith("model.")]
    if not is_enabled(config.adapter):
        return {name: model.get_parameter(name) for name in names}
    layers = {name.partition(".lora_")[0] for name in names if ".lora_A." in name}
    modules = dict(model.named_modules())
    is_plain = all(isinstance(modules.get(layer), torch.nn.Linear) for layer in layers) and len(names) == 2 * len(layers)
    if config.adapter.method not in ("lora", "rslora") or config.adapter.name_or_path or not is_plain:
        return {}
    scale = config.adapter.alpha / (math.sqrt(config.adapter.rank) if config.adapter.method == "rslora" else config.adapter.rank)
    return plain.add_lora(model, {name: torch.from_numpy(loaded[f"model.{name}"]) for name in names}, scale)
