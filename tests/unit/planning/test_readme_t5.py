"""README's T5 command: its model needs the shards on the GPUs that it names, and takes what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.unit.test_docs import REPOSITORY, list_commands
from toolkit.planning.peak import estimate_peak
from toolkit.planning.plan import USABLE_SHARE
from toolkit.planning.strategy import load_strategy
from toolkit.planning.subject import build_subject
from toolkit.planning.trace import fake_ranks

FLAN_T5_XL = json.loads((Path(__file__).parent / "flan_t5_xl.json").read_text())
FLAN_T5_BASE = {**FLAN_T5_XL, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12}


def peak_gib(folder: Path, settings: dict, preset: str, *arguments: str) -> float:
    """Planned for one of 8 ranks, from models with few blocks: for the full ones it takes four times as long."""
    (folder / "config.json").write_text(json.dumps(settings))
    strategy = load_strategy(REPOSITORY / "accelerate_configs" / f"{preset}.yaml", 8, 80)
    subject = build_subject(str(folder), strategy, list(arguments), None)
    with fake_ranks(8):
        return estimate_peak(subject, strategy, subject.config.train.micro_batch_size_rows) / 2**30


def test_readmes_t5_needs_its_shards_and_the_base_size_none(tmp_path: Path) -> None:
    page = (REPOSITORY / "README.md").read_text()
    (command,) = (
        words for words in list_commands(page) if "accelerate_configs/fsdp2_full_shard.yaml" in words and "recipes/t5.py" in words
    )
    flags = command[command.index("recipes/t5.py") + 1 :]
    model = flags.index("--model.name_or_path")
    assert flags[model + 1] == "google/flan-t5-xl"
    del flags[model : model + 2]
    flags[flags.index("--config") + 1] = str(REPOSITORY / "recipes" / "configs" / "t5_csv.yaml")
    gib, needed = (float(figure) for figure in re.findall(r"8 GPUs of (\d+) GiB: planned for ([\d.]+) GiB", page)[0])
    assert f"{peak_gib(tmp_path, FLAN_T5_XL, 'fsdp2_full_shard', *flags):.1f}" == f"{needed:.1f}"
    assert needed < gib * USABLE_SHARE < peak_gib(tmp_path, FLAN_T5_XL, "ddp", *flags)
    said = re.findall(r"planned: ([\d.]+) GiB with micro-batches of one row, ([\d.]+) with eight", page)[0]
    rows = [f"--train.micro_batch_size_rows={number}" for number in (1, 8)]
    assert said == tuple(f"{peak_gib(tmp_path, FLAN_T5_BASE, 'ddp', *flags, number):.1f}" for number in rows)
