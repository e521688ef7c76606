"""What the parts of `make gpu` share: their options, their presets for one process, how they hand figures to the driver."""

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from benchmarks.measuring import REPOSITORY

MARK, LEFT_OUT = "FIGURES ", "left out: "


def part_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a part."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models and few steps, to try it on a CPU")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for weights that several parts use")
    return parser


def emit(table: str, **figures: Any) -> None:
    """Print figures for a table of the report; what stands there when a part is killed counts."""
    rounded = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}
    print(MARK + json.dumps({"table": table} | rounded), flush=True)


def preset_file(name: str, folder: Path, cpu_precision: str = "no") -> Path:
    """A preset for one process on this machine's GPU or, if torch sees none, for the CPU, in fp32 unless said.

    There blocks are not compiled by inductor, which takes minutes: what dynamo traces is the same.
    """
    import torch

    from toolkit.tools.preset_runs import adapt_preset, save_preset

    mapping = yaml.safe_load((REPOSITORY / "accelerate_configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    on_cpu = mapping["use_cpu"] or not torch.cuda.is_available()
    adapted = adapt_preset(mapping, num_processes=1, use_cpu=on_cpu)
    if on_cpu:
        adapted["mixed_precision"] = cpu_precision
        if "dynamo_config" in adapted:
            adapted["dynamo_config"] = adapted["dynamo_config"] | {"dynamo_backend": "EAGER"}
    return save_preset(adapted, folder / f"{name}.yaml")


def finetune_here(preset: Path | None, recipe: str, flags: dict[str, Any], after_step: Callable[[Any], Any] | None = None) -> Any:
    """`finetune` in this process as `accelerate launch` would start it under the preset; None: as it was launched."""
    import torch

    from toolkit import load_config
    from toolkit.training import finetune

    with mock.patch.dict(os.environ, {"TOOLKIT_ACCELERATE_YAML": str(preset)} if preset else {}):
        result = finetune.finetune(load_config(recipe, overrides=flags), after_step=after_step)
    gc.collect()  # the run's memory, for the next one
    torch.cuda.empty_cache()
    if preset and preset.stem in ("fsdp2_compile", "fsdp2_fp8"):
        torch.compiler.reset()  # its limit of compilations counts those of all runs
    return result
