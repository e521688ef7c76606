"""Compares runs with plain transformers and peft: rows with their texts, step 1 and the evaluation before it a row at a time in
fp64, buffers, logits of long rows, and what was exported, its weights, logits and texts."""

from __future__ import annotations

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
from toolkit.data.rows.example import Example, read_examples
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE
from toolkit.distributed.device import free_memory_bytes
from toolkit.export.compare import LOGIT_TOLERANCE
from toolkit.files.json_lines import load_json_lines
from toolkit.models.config import load_model_config
from toolkit.models.freeze import hash_tensor
from toolkit.models.load import build_on_meta, from_files, grow_vocabulary
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name
from toolkit.models.quantized import dequantize, find_scales, quantize, weight_name
from toolkit.objectives import objective_of
from toolkit.tools.verify import EXPORTED, plain, records
from toolkit.tools.verify.checks import RELU_TOLERANCE, largest_gradient
from toolkit.tools.verify.records import NotReached, Proof, Tensors
from toolkit.tools.verify.runs import GENERATION, NUM_STEPS, WatchedRun

FP64_SHARE_OF_FREE_MEMORY = 0.5
"""fp64 is taken if 16 bytes a parameter, for weights and gradients, are at most this share of the free memory; else fp32."""
MANY_PARAMETERS = 10**7
"""Of a model that computes faster with several threads than with one."""
NUM_TEXTS = 4
"""Number of texts to generate again, on the CPU, where a large model is slow."""


def check_plain(runs: dict[str, WatchedRun], config: RecipeConfig, tolerance: float, *, on_cpu: bool) -> list[Proof]:
    """The rows of `buffers`, `positions` and `text`, the last of the reference, with which other checks compare, and those of
    `export` and `generation`."""
    started = records.prove("text", runs["reference"], lambda _: _compare_starts(runs, config, tolerance, on_cpu=on_cpu))
    return [*started, *records.prove("export", runs[EXPORTED], partial(_compare_exports, config))]


def _compare_starts(runs: dict[str, WatchedRun], config: RecipeConfig, tolerance: float, *, on_cpu: bool) -> Iterator[Proof]:
    reference = runs["reference"]
    if (model := _load(reference, config)) is None:  # frozen weights that were drawn are only in the run
        return
    if sum(parameter.numel() for parameter in model.parameters()) < MANY_PARAMETERS:
        torch.set_num_threads(1)
    for run in runs.values():
        yield from records.prove("buffers", run, partial(_compare_buffers, model))
    model, logits = model.to("cpu" if on_cpu else "cuda"), dict[bytes, torch.Tensor]()
    for run in runs.values():
        if run.after is None and not run.flags["model.dropout"]:
            yield from records.prove("positions", run, partial(_compare_positions, model, logits))
    yield from _compare_step(model, reference, config, tolerance)


def _load(run: WatchedRun, config: RecipeConfig) -> Any:
    """The model that a run starts with, by plain transformers in fp32 on the CPU; None if it cannot be had without the run."""
    frozen = records.load_about(run, "loaded")["frozen"]
    if config.model.from_scratch and frozen:
        return None
    if not config.model.from_scratch:
        model = load_plain(config, config.model.name_or_path)
        quantize_layers(model, frozen, config.adapter.base_dtype)
        return model
    import transformers

    objective = objective_of(config)
    model_config = load_model_config(config.model, objective)
    model = getattr(transformers, objective.auto_class).from_config(model_config, dtype=torch.float32).eval()
    weights = {name.removeprefix("model."): torch.from_numpy(w) for name, w in records.load_tensors(run, "loaded").items()}
    model.load_state_dict(weights, strict=False)
    return model


def _compare_buffers(model: nn.Module, run: WatchedRun) -> Proof | None:
    """Check that every buffer, persistent or not, is bit for bit that of plain transformers, in its dtype; None without any."""
    about = records.load_about(run, "loaded")
    quantized = {name.rpartition(".")[0] for name in about["frozen"] if name.endswith(".codes")}  # have a table of their own
    of_model = {name: value for name, value in about["buffers"].items() if name.rpartition(".")[0] not in quantized}
    held = {base_name(name) or name: value for name, value in of_model.items()}
    expected = {name: [str(buffer.dtype), hash_tensor(buffer, buffer.dtype)] for name, buffer in model.named_buffers()}
    proof = records.equal(f"{run.title}: {len(expected)} buffers", (expected, held), "is another")
    return proof if expected or held else None


def _compare_positions(model: Any, known: dict[bytes, torch.Tensor], run: WatchedRun) -> Proof:
    """Compare the last logits of long rows; `known` has those of plain transformers that another run needed."""
    worst, where = (0.0, ""), []
    looked = {name: torch.from_numpy(t) for name, t in records.load_tensors(run, "positions").items()}
    for kind in dict.fromkeys(name.partition(".")[0] for name in looked):
        inputs = {name.partition(".")[2]: t for name, t in looked.items() if name.startswith(f"{kind}.")}
        of_run = inputs.pop("logits")
        key = b"".join(t.numpy().tobytes() for t in inputs.values())
        if key not in known:
            known[key] = _logits(model, inputs)[:, -plain.NUM_LOGITS :]
        worst = max(worst, (_apart(of_run, known[key]), f"logits of the {kind} row differ"))
        where.append(f"{inputs.get('position_ids', inputs['input_ids'] * 0 + inputs['input_ids'].shape[1] - 1).max() + 1:,}")
    dtype = torch.bfloat16 if run.mapping["mixed_precision"] == "bf16" else torch.float32
    return records.within(f"{run.title}: logits at position {' and '.join(where)}", *worst, LOGIT_TOLERANCE[dtype])


@torch.no_grad()
def _logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**{name: t.to(model.device) for name, t in inputs.items()}, use_cache=False).logits.cpu()


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of logits, relative to the largest of one; infinity for NaN, which `max` would overlook."""
    difference = float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))
    return math.inf if math.isnan(difference) else difference


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
    return records.exact(title, len(wrong), records.named(wrong, "has other tokens or labels")), *parts, num_bytes


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
    if example.text is not None:
        found = [plain.causal_row(tokenizer, "", example.text, most, piece, all_count=data.loss_on == "all")]
    else:
        counts = {"all_count": data.loss_on == "all"}
        found = [plain.causal_row(tokenizer, str(example.prompt), answer, most, piece, **counts) for answer in answers]
    return [row for row in found if row is not None] if None not in found else None


def _compare_step(model: Any, run: WatchedRun, config: RecipeConfig, tolerance: float) -> Iterator[Proof]:
    """Compare the rows of step 1 and of the evaluation before it, both losses, accuracy, bits per byte, and the gradients."""
    first, (evaluated, *_) = records.load_lines(run, "train")[0], [*records.load_lines(run, "eval", needed=False), {}]
    proof, of_step, of_evaluation, num_bytes = _read_rows(run, config)
    yield proof
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if 16 * num_parameters <= FP64_SHARE_OF_FREE_MEMORY * free_memory_bytes(model.device):
        model = model.double()
        model.set_experts_implementation("eager")  # grouped products know no fp64
    dtype = str(model.dtype).removeprefix("torch.")
    references = _references(model, config, [*of_step, *of_evaluation])
    weights = _trained(model, records.load_tensors(run, "loaded"), config)
    if evaluated.get("step") == 0:
        figures = _evaluate(model, config, of_evaluation, references[len(of_step) :], num_bytes)
        apart = max((records.relative(evaluated[name] - value, value), f"{name} differs") for name, value in figures.items())
        title = f"{run.title}: {', '.join(figures)} of {len(of_evaluation)} evaluation rows, {dtype}"
        yield records.within(title, *apart, tolerance)
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
    yield records.within(title, records.relative(first["loss"] - loss, loss), detail, tolerance)
    if weights and config.optim.router_aux_loss == "off":
        title = f"{run.title}: gradients of step 1, {len(weights)} tensors, {dtype}"
        computed = {name: (w.grad if w.grad is not None else torch.zeros_like(w)).cpu().numpy() for name, w in weights.items()}
        if records.load_about(run, "loaded")["has_relu"]:
            title, tolerance = f"{title} (with ReLU)", max(tolerance, RELU_TOLERANCE)
        yield records.within(title, *largest_gradient(computed, records.load_tensors(run, "gradients")), tolerance)


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


# --- Exports.


def _compare_exports(config: RecipeConfig, run: WatchedRun) -> Iterator[Proof]:
    """Weights, logits and texts of `export/` and, for an adapter, of `merged/`, reloaded."""
    if not (check_file := run.folder / "export_check.safetensors").is_file():
        raise NotReached(run)
    check = load_file(check_file)  # a forward's arguments, and the trained model's logits for them
    of_run = check.pop("logits")
    trained = {name.removeprefix("model."): weight for name, weight in records.load_tensors(run, "trained").items()}

    def compare_logits(what: str, model: nn.Module) -> Proof:
        detail, tolerance = "logits differ from those of the trained model", LOGIT_TOLERANCE[torch.float32]
        return records.within(f"{run.title}: {what} reloaded, logits", _apart(of_run, _logits(model, check)), detail, tolerance)

    if is_enabled(config.adapter):
        from peft import PeftModel

        base = load_plain(config, config.model.name_or_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about transformers' names
            adapted: Any = PeftModel.from_pretrained(base, str(run.folder / "export")).eval()
        coded = quantize_layers(adapted.base_model.model, records.load_about(run, "trained")["frozen"], config.adapter.base_dtype)
        yield _compare_weights(run, "adapter and base", adapted.base_model.model, trained, coded)
        yield compare_logits("adapter", adapted)
        model = load_plain(config, run.folder / "merged")
        yield compare_logits("merged model", model)
    else:
        model = load_plain(config, run.folder / "export")
        yield _compare_weights(run, "export", model, trained, {})
        yield compare_logits("export", model)
    yield from records.prove("generation", run, partial(_compare_texts, model))


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
    auto_class: Any = getattr(transformers, objective.auto_class)
    options |= {"dtype": torch.float32, "attn_implementation": attention, "ignore_mismatched_sizes": False}
    base = config.model
    loaded, _ = from_files(
        auto_class, str(name_or_path), f"model {name_or_path}", options,
        lambda: build_on_meta(base, load_model_config(base, objective), objective, torch.float32),
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
    frozen: dict[str, str] = records.load_about(run, "trained")["frozen"]
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)} | coded
    differences = {
        name: records.largest(loaded[name].numpy() if name in loaded else None, weight) for name, weight in trained.items()
    }
    unequal = [name for name, difference in differences.items() if difference]
    unequal += [
        name for name, digest in frozen.items() if name not in loaded or hash_tensor(loaded[name], loaded[name].dtype) != digest
    ]
    title = f"{run.title}: {what} reloaded, {len(trained) + len(frozen)} tensors"
    return records.exact(title, max(differences.values(), default=0.0), records.named(unequal, "is not what was trained"))


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
    return records.exact(title, float(max(num_other, num_repeating)), detail)
