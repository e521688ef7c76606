"""A run's exports, loaded by plain transformers and peft in a process that has not trained, against what was trained."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from toolkit.config import RecipeConfig
from toolkit.export_check import LOGIT_TOLERANCE
from toolkit.model_config import AutoClass
from toolkit.verification.checks import Proof, failed, named, not_reached
from toolkit.verification.runs import WatchedRun
from toolkit.verification.watched_run import hash_tensor

Tensors = dict[str, torch.Tensor]


def check_exports(run: WatchedRun, config: RecipeConfig, auto_class: AutoClass) -> list[Proof]:
    """Rows for `export/`, its weights and its logits, and for an adapter those of `merged/`."""
    check_file = run.folder / "export_check.safetensors"
    if not check_file.is_file():
        return [not_reached("export", run) if run.failure else failed("export", run.title, "nothing was exported")]
    check = load_file(check_file)
    trained = {name: t for name, t in load_file(run.records / "trained.safetensors").items() if name.startswith("model.")}
    trained = {name.removeprefix("model."): t for name, t in trained.items()}
    frozen: dict[str, str] = json.loads((run.records / "trained.json").read_text(encoding="utf-8"))["frozen"]
    try:
        if config.adapter.method == "none":
            model = _load(config, auto_class, run.folder / "export")
            weights = _compare_weights(run, "export", model, trained, frozen)
            return [weights, _compare_logits(run, "export", model, check)]
        adapted = _load_adapter(_load(config, auto_class, config.model.name_or_path), run.folder / "export")
        named = {f"base_model.model.{name}": t for name, t in trained.items()}
        frozen = {f"base_model.model.{name}": digest for name, digest in frozen.items()}
        weights = _compare_weights(run, "adapter and base", adapted, named, frozen)
        merged = _load(config, auto_class, run.folder / "merged")
        return [weights, _compare_logits(run, "adapter", adapted, check), _compare_logits(run, "merged model", merged, check)]
    except (
        OSError,
        ValueError,
        RuntimeError,
        SafetensorError,
    ) as error:  # what transformers and peft raise at a folder they cannot load
        return [failed("export", run.title, " ".join(str(error).split()))]


def _load(config: RecipeConfig, auto_class: AutoClass, name_or_path: str | Path) -> nn.Module:
    import transformers

    options: dict[str, Any] = {}
    if config.model.attn_implementation in ("eager", "sdpa"):  # others may not run on a CPU
        options["attn_implementation"] = config.model.attn_implementation
    if str(name_or_path) == config.model.name_or_path:
        options["revision"] = config.model.revision or "main"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return (
        getattr(transformers, auto_class)
        .from_pretrained(
            name_or_path,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=config.model.trust_remote_code,
            **options,
        )
        .eval()
    )


def _load_adapter(base: Any, folder: Path) -> nn.Module:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about transformers' names
        return PeftModel.from_pretrained(base, str(folder)).eval()


def _compare_weights(run: WatchedRun, what: str, model: nn.Module, trained: Tensors, frozen: dict[str, str]) -> Proof:
    """Bit for bit; frozen ones by their hash."""
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    differences = {name: _difference(loaded.get(name), weight) for name, weight in trained.items()}
    unequal = [name for name, difference in differences.items() if difference]
    unequal += [name for name, digest in frozen.items() if name not in loaded or hash_tensor(loaded[name]) != digest]
    return Proof(
        check="export",
        compared=f"{run.title}: {what} reloaded, {len(trained) + len(frozen)} tensors",
        difference=max(differences.values(), default=0.0),
        tolerance=0.0,
        passed=not unequal,
        detail=named(unequal, "is not what was trained"),
    )


def _difference(loaded: torch.Tensor | None, weight: torch.Tensor) -> float:
    if loaded is None or loaded.shape != weight.shape:
        return float("inf")
    return 0.0 if torch.equal(loaded, weight) else float((loaded - weight).abs().max().nan_to_num(float("inf")))


@torch.no_grad()
def _compare_logits(run: WatchedRun, what: str, model: nn.Module, check: Tensors) -> Proof:
    """As a share of the largest logit: the reloaded model computes on one process, the trained one was sharded."""
    inputs = {name: tensor for name, tensor in check.items() if name != "logits"}
    logits_BTV = model(**inputs, use_cache=False).logits
    difference = float((logits_BTV - check["logits"]).abs().max() / check["logits"].abs().max().clamp(min=1e-6))
    tolerance = LOGIT_TOLERANCE[torch.float32]
    passed = difference <= tolerance  # False of a NaN
    title, detail = f"{run.title}: {what} reloaded, logits", "" if passed else "logits differ from those of the trained model"
    return Proof(check="export", compared=title, difference=difference, tolerance=tolerance, passed=passed, detail=detail)
