"""Every model family trains, generates, saves, resumes and exports under FSDP2; plain transformers reads the export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import FAMILIES
from tests.recipes.conftest import Workbench

LOGIT_TOLERANCE = 1e-4
"""Largest difference of the plain model's logits from those of the sharded one, as a share of the largest."""

RELOAD = """
import json, sys, pathlib
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

found = {}
for run in map(pathlib.Path, sys.argv[1:]):
    check = load_file(run / "export_check.safetensors")
    logits = check.pop("logits")
    model, loading = AutoModelForSeq2SeqLM.from_pretrained(run / "export", output_loading_info=True)
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    stored = [key for file in run.glob("export/*.safetensors") for key in safe_open(file, "pt").keys()]
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    text = tokenizer("alpha beta gamma")["input_ids"]
    generated = model.eval().generate(**tokenizer("alpha beta gamma", return_tensors="pt"), max_new_tokens=3)
    difference = (model(**check, use_cache=False).logits - logits).abs().max() / logits.abs().max()
    found[run.name] = {
        "difference": difference.item(),
        "missing": sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"]) + sorted(loading["mismatched_keys"]),
        "stored_times": sorted({sum(name in stored for name in tied) for tied in names.values()}),
        "num_stored_twice": len(stored) - len(set(stored)),
        "num_tied": sum(len(tied) > 1 for tied in names.values()),
        "text": tokenizer.decode(text, skip_special_tokens=True),
        "decoder_start_token_id": GenerationConfig.from_pretrained(run / "export").decoder_start_token_id,
        "num_generated": generated.shape[1],
        "imported_toolkit": "toolkit" in sys.modules,
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory, model_folders: dict[str, Path], data_folder: Path) -> dict[str, Any]:
    """All families' runs, by name: what was printed and left, and what plain transformers found in the export."""
    bench = Workbench(runs=tmp_path_factory.mktemp("families"), models=model_folders, data=data_folder)
    found: dict[str, Any] = {}
    for family in FAMILIES:
        bench.run(family, model=family)
        before = bench.lines(family, "train")
        printed = bench.run(family, model=family, train__max_steps=5)
        found[family] = {"before": before, "printed": printed, "lines": bench.lines(family, "train")}
    return found
