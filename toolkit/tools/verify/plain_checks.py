"""Compares runs with plain transformers and peft: rows with their texts, step 1 and the evaluation before it a row at a time in
fp64, buffers, and logits of long rows."""

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.config.load import RecipeConfig
from toolkit.data.rows.example import Example, read_examples
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE
from toolkit.distributed.device import free_memory_bytes
from toolkit.export.compare import LOGIT_TOLERANCE
from toolkit.models.config import load_model_config
from toolkit.models.freeze import hash_tensor
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name
from toolkit.objectives import objective_of
from toolkit.tools.verify import EXPORTED, plain, proofs
from toolkit.tools.verify.checks import RELU_TOLERANCE, largest_gradient
from toolkit.tools.verify.plain_exports import compare_exports, largest_difference, load_plain, logits_of, quantize_layers
from toolkit.tools.verify.proofs import Proof
from toolkit.tools.verify.runs import WatchedRun

FP64_SHARE_OF_FREE_MEMORY = 0.5
"""fp64 is taken if 16 bytes a parameter, for weights and gradients, are at most this share of the free memory; else fp32."""
MANY_PARAMETERS = 10**7
"""Of a model that computes faster with several threads than with one."""


def check_plain(runs: dict[str, WatchedRun], config: RecipeConfig, tolerance: float, *, on_cpu: bool) -> list[Proof]:
    """The rows of `buffers`, `positions` and `text`, the last of the reference, with which other checks compare, and those of
    `export` and `generation`."""
    started = proofs.prove("text", runs["reference"], lambda _: _compare_starts(runs, config, tolerance, on_cpu=on_cpu))
    return [*started, *proofs.prove("export", runs[EXPORTED], partial(compare_exports, config))]


def _compare_starts(runs: dict[str, WatchedRun], config: RecipeConfig, tolerance: float, *, on_cpu: bool) -> Iterator[Proof]:
    reference = runs["reference"]
    if (model := _load(reference, config)) is None:  # frozen weights that were drawn are only in the run
        return
    if sum(parameter.numel() for parameter in model.parameters()) < MANY_PARAMETERS:
        torch.set_num_threads(1)
    for run in runs.values():
        yield from proofs.prove("buffers", run, partial(_compare_buffers, model))
    model, logits = model.to("cpu" if on_cpu else "cuda"), dict[bytes, torch.Tensor]()
    for run in runs.values():
        if run.after is None and not run.flags["model.dropout"]:
            yield from proofs.prove("positions", run, partial(_compare_positions, model, logits))
    yield from _compare_step(model, reference, config, tolerance)


def _load(run: WatchedRun, config: RecipeConfig) -> Any:
    """The model that a run starts with, by plain transformers in fp32 on the CPU; None if it cannot be had without the run."""
    frozen = run.about("loaded")["frozen"]
    if config.model.from_scratch and frozen:
        return None
    if not config.model.from_scratch:
        model = load_plain(config, config.model.name_or_path)
        quantize_layers(model, frozen, config.adapter.base_dtype)
        return model
    objective = objective_of(config)
    model_config = load_model_config(config.model, objective)
    model = objective.loader(model_config).from_config(model_config, dtype=torch.float32).eval()
    weights = {name.removeprefix("model."): torch.from_numpy(w) for name, w in run.tensors("loaded").items()}
    model.load_state_dict(weights, strict=False)
    return model


def _compare_buffers(model: nn.Module, run: WatchedRun) -> Proof | None:
    """Check that every buffer, persistent or not, is bit for bit that of plain transformers, in its dtype; None without any."""
    about = run.about("loaded")
    quantized = {name.rpartition(".")[0] for name in about["frozen"] if name.endswith(".codes")}  # have a table of their own
    of_model = {name: value for name, value in about["buffers"].items() if name.rpartition(".")[0] not in quantized}
    held = {base_name(name) or name: value for name, value in of_model.items()}
    expected = {name: [str(buffer.dtype), hash_tensor(buffer, buffer.dtype)] for name, buffer in model.named_buffers()}
    proof = proofs.equal(f"{run.title}: {len(expected)} buffers", (expected, held), "is another")
    return proof if expected or held else None


def _compare_positions(model: Any, known: dict[bytes, torch.Tensor], run: WatchedRun) -> Proof:
    """Compare the last logits of long rows; `known` has those of plain transformers that another run needed."""
    worst, where = (0.0, ""), []
    looked = {name: torch.from_numpy(t) for name, t in run.tensors("positions").items()}
    for kind in dict.fromkeys(name.partition(".")[0] for name in looked):
        inputs = {name.partition(".")[2]: t for name, t in looked.items() if name.startswith(f"{kind}.")}
        of_run = inputs.pop("logits")
        key = b"".join(t.numpy().tobytes() for t in inputs.values())
        if key not in known:
            known[key] = logits_of(model, inputs)[:, -plain.NUM_LOGITS :]
        worst = max(worst, (largest_difference(of_run, known[key]), f"logits of the {kind} row differ"))
        where.append(f"{inputs.get('position_ids', inputs['input_ids'] * 0 + inputs['input_ids'].shape[1] - 1).max() + 1:,}")
    dtype = torch.bfloat16 if run.mapping["mixed_precision"] == "bf16" else torch.float32
    return proofs.within(f"{run.title}: logits at position {' and '.join(where)}", *worst, LOGIT_TOLERANCE[dtype])


Texts = list[plain.Row]
"""The texts of a row: one, or the chosen and the rejected one of a pair."""


def _read_rows(run: WatchedRun, config: RecipeConfig) -> tuple[Proof, list[Texts], list[Texts], int]:
    """Check the rows of step 1 and of the evaluation; these rows as their texts say, and the bytes of the latter's targets."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.records / "tokenizer")
    about = json.loads((run.records / "texts.json").read_text())
    examples = dict(zip(about["texts"]["row_id"], read_examples(about["texts"]), strict=True))
    num_known, wrong, most = 0, [], run.flags.get("data.max_length_tokens", getattr(config.data, "max_length_tokens", 0))
    for row in (row for part in about["rows"] for row in part):
        piece, row_id = divmod(row["row_id"], ROW_IDS_OF_A_PIECE)
        known, held = _expect(tokenizer, examples[row_id], piece, most, config.data), _split(row, config.data.objective)
        num_known += known is not None
        wrong += [f"row {row_id}"] if known not in (None, held) else []
        row["known"] = known or held
    title = f"{run.title}: tokens and labels of {num_known} of {sum(map(len, about['rows']))} rows, and their texts"
    parts = [[row["known"] for row in part] for part in about["rows"]]
    num_bytes = sum(row["target_bytes"] for row in about["rows"][1])
    return proofs.exact(title, len(wrong), proofs.named(wrong, "has other tokens or labels")), *parts, num_bytes


def _split(row: dict[str, Any], objective: str) -> Texts:
    """The texts of a row of the run."""
    ids, labels, place = row["input_ids"], row["labels"], row.get("num_chosen_tokens")
    if place is None:
        return [(ids, labels)]
    both = (ids[:place], ids[place:]) if objective == "preference" else (ids, ids)
    return [(both[0], labels[:place]), (both[1], labels[place:])]


def _expect(tokenizer: Any, example: Example, piece: int, most: int, data: Any) -> Texts | None:
    """What a row's text comes to; None where a rule of the toolkit says it: for chats, and where a token spans a prompt's end."""
    answers = [str(example.completion), *([str(example.rejected)] if example.rejected is not None else [])]
    if hasattr(data, "max_target_length_tokens"):  # this is the reference: it does not ask the objective's own code
        source, limits = data.prefix + str(example.prompt), (data.max_source_length_tokens, data.max_target_length_tokens)
        return [plain.seq2seq_row(tokenizer, source, answer, *limits) for answer in answers]
    if example.messages is not None:
        return None
    texts = [("", example.text)] if example.text is not None else [(str(example.prompt), answer) for answer in answers]
    found = [plain.causal_row(tokenizer, *of_row, most, piece, all_count=data.loss_on == "all") for of_row in texts]
    return [row for row in found if row is not None] if None not in found else None


def _compare_step(model: Any, run: WatchedRun, config: RecipeConfig, tolerance: float) -> Iterator[Proof]:
    """Compare the rows of step 1 and of the evaluation before it, both losses, accuracy, bits per byte, and the gradients."""
    first, (evaluated, *_) = run.lines("train")[0], [*run.lines("eval", needed=False), {}]
    proof, of_step, of_evaluation, num_bytes = _read_rows(run, config)
    yield proof
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if 16 * num_parameters <= FP64_SHARE_OF_FREE_MEMORY * free_memory_bytes(model.device):
        model = model.double()
        model.set_experts_implementation("eager")  # grouped products know no fp64
    dtype = str(model.dtype).removeprefix("torch.")
    references = _references(model, config, [*of_step, *of_evaluation])
    weights = _trained(model, run.tensors("loaded"), config)
    if evaluated.get("step") == 0:
        figures = _evaluate(model, config, of_evaluation, references[len(of_step) :], num_bytes)
        apart = max((proofs.relative(evaluated[name] - value, value), f"{name} differs") for name, value in figures.items())
        title = f"{run.title}: {', '.join(figures)} of {len(of_evaluation)} evaluation rows, {dtype}"
        yield proofs.within(title, *apart, tolerance)
    num_labels, loss = sum(map(_count, of_step)), 0.0
    for row, reference_2 in zip(of_step, references, strict=False):
        of_row = _row_loss(model, config, row, reference_2, config.optim.label_smoothing)[0] / num_labels
        loss += of_row.item()
        if weights:
            of_row.backward()
    detail = "the loss differs"
    if first["num_label_tokens"] != num_labels:
        detail = f"the rows have {num_labels} labels, of which the run counts {first['num_label_tokens']}"
    title = f"{run.title}: loss of step 1, {num_labels} labels, {dtype}"
    yield proofs.within(title, proofs.relative(first["loss"] - loss, loss), detail, tolerance)
    if weights and config.optim.router_aux_loss == "off":
        title = f"{run.title}: gradients of step 1, {len(weights)} tensors, {dtype}"
        computed = {name: (w.grad if w.grad is not None else torch.zeros_like(w)).cpu().numpy() for name, w in weights.items()}
        if run.about("loaded")["has_relu"]:
            title, tolerance = f"{title} (with ReLU)", max(tolerance, RELU_TOLERANCE)
        yield proofs.within(title, *largest_gradient(computed, run.tensors("gradients")), tolerance)


def _count(row: Texts) -> int:
    """What the loss of a row is divided by the number of: its labels, or the pair."""
    return sum(label != plain.IGNORED for label in row[0][1]) if len(row) == 1 else 1


@torch.no_grad()
def _references(model: Any, config: RecipeConfig, rows: list[Texts]) -> list[torch.Tensor]:
    """Log-probabilities of both answers of each pair by the reference model, (2,); zeros for a loss without one."""
    settings = getattr(config, "preference", None)
    if settings is None or settings.loss in ("simpo", "orpo"):
        return [torch.zeros(2)] * len(rows)
    other = load_plain(config, settings.reference).to(model.device, model.dtype) if settings.reference else model
    return [_logps(other, row)[0] for row in rows]


def _logps(model: Any, row: Texts) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of both answers, and their lengths, (2,)."""
    looked = [plain.label_logits(model, text) for text in row]
    logps_2 = torch.stack([-plain.summed_loss(*of_text) for of_text in looked])
    return logps_2, torch.tensor([len(labels_N) for _, labels_N in looked]).to(logps_2)


def _row_loss(
    model: Any, config: Any, row: Texts, reference_2: torch.Tensor, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a row, summed over what it counts; and the number of labels ranked first, or both log-probabilities of a pair,
    per token for SimPO and ORPO."""
    if len(row) == 1:
        logits_NV, labels_N = plain.label_logits(model, row[0])
        num_correct = (logits_NV.argmax(-1) == labels_N).sum()[None]
        return plain.summed_loss(logits_NV, labels_N, label_smoothing), num_correct
    logps_2, lengths_2 = _logps(model, row)
    per_token = lengths_2 if config.preference.loss in ("simpo", "orpo") else 1
    return plain.pair_loss(config.preference, logps_2, reference_2.to(logps_2), lengths_2), logps_2.detach() / per_token


@torch.no_grad()
def _evaluate(
    model: Any, config: RecipeConfig, rows: list[Texts], references: list[torch.Tensor], num_bytes: int
) -> dict[str, float]:
    """The figures of an evaluation that must be equal."""
    looked = [_row_loss(model, config, row, reference_2) for row, reference_2 in zip(rows, references, strict=True)]
    num_labels, loss = sum(map(_count, rows)), sum(of_row.item() for of_row, _ in looked)
    seconds = (sum(second for _, second in looked) / num_labels).tolist()  # type: ignore[union-attr]
    if len(seconds) == 2:
        return {"loss": loss / num_labels, "logps/chosen": seconds[0], "logps/rejected": seconds[1]}
    figures = {"loss": loss / num_labels, "token_accuracy": 100 * seconds[0]}
    return figures | ({"bits_per_byte": loss / math.log(2) / num_bytes} if num_bytes else {})


def _trained(model: Any, loaded: dict[str, Any], config: RecipeConfig) -> dict[str, torch.Tensor]:
    """The parameters of a plain model that the run trains; none for an adapter that is not LoRA on linear layers alone."""
    from transformers.pytorch_utils import Conv1D

    names = [name.removeprefix("model.") for name in loaded if name.startswith("model.")]
    if not is_enabled(config.adapter):
        return {name: model.get_parameter(name) for name in names}
    layers = {name.partition(".lora_")[0] for name in names if ".lora_A." in name}
    modules = dict(model.named_modules())
    is_plain = all(isinstance(modules.get(layer), nn.Linear | Conv1D) for layer in layers) and len(names) == 2 * len(layers)
    if config.adapter.method not in ("lora", "rslora") or config.adapter.name_or_path or not is_plain:
        return {}
    scale = config.adapter.alpha / (math.sqrt(config.adapter.rank) if config.adapter.method == "rslora" else config.adapter.rank)
    return plain.add_lora(model, {name: torch.from_numpy(loaded[f"model.{name}"]) for name in names}, scale)
