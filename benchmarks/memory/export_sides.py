"""One launch of `export_memory.py`, on every rank: `export_sides.py CHECKOUT FOLDER SIZES`; rank 0 prints figures as JSON.

CHECKOUT is the repository whose toolkit exports, SIZES a JSON object: those of a Llama, and `num_row_tokens`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.measuring import memory_gib

checkout, folder_name, sizes = sys.argv[1:]
sys.path.insert(0, checkout)

import psutil  # noqa: E402
import torch  # noqa: E402
from accelerate import init_empty_weights  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from toolkit.config.data import LLMDataConfig  # noqa: E402
from toolkit.config.schema import LLMConfig, ModelConfig  # noqa: E402
from toolkit.data.collate import CausalCollator  # noqa: E402
from toolkit.distributed.comm import gather_objects, rank  # noqa: E402
from toolkit.evaluation.rows import EvaluationRows  # noqa: E402
from toolkit.export.card import Origin  # noqa: E402
from toolkit.export.places import run_places  # noqa: E402
from toolkit.export.write import export_model  # noqa: E402
from toolkit.launch.accelerator import build_accelerator  # noqa: E402
from toolkit.models.shard_reader import Source  # noqa: E402
from toolkit.parallel.wrap import shard_model  # noqa: E402

SAMPLED_EVERY_S = 0.02
LEAST_AVAILABLE_BYTES = 2**30
"""With less, the launch ends itself: other work shares the machine."""
NUM_ROWS = 4


def main() -> None:
    # A model of random weights, sharded; rows of random tokens.
    folder, settings = Path(folder_name), json.loads(sizes)
    num_row_tokens = settings.pop("num_row_tokens")
    accelerator = build_accelerator()
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(LlamaConfig(**settings, tie_word_embeddings=False)).eval()
    sources = {name: Source(tuple(p.shape), random_weights) for name, p in model.named_parameters()}
    sharded = shard_model(accelerator, model, sources)
    tokens = torch.randint(settings["vocab_size"], (NUM_ROWS, num_row_tokens)).tolist()
    rows = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda folder: None)
    data = EvaluationRows(rows=rows, tokenizer=tokenizer, collator=CausalCollator(pad_token_id=0))
    config = LLMConfig(model=ModelConfig(name_or_path="random"), data=LLMDataConfig(source="none"))
    gc.collect()
    gather_objects(None)

    # The export, watched.
    figures = {"shard_gib": memory_gib("RssAnon")}
    peak = {"anonymous": 0.0, "resident": 0.0}
    stands_s: list[float] = []
    ended, started = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(SAMPLED_EVERY_S):
            peak["anonymous"] = max(peak["anonymous"], memory_gib("RssAnon"))
            peak["resident"] = max(peak["resident"], memory_gib("VmRSS"))
            if not stands_s and (folder / "export").is_dir():
                stands_s.append(time.monotonic() - started)
            if psutil.virtual_memory().available < LEAST_AVAILABLE_BYTES:
                print(f"the machine runs out of memory: {peak}", file=sys.stderr, flush=True)
                os._exit(1)

    logged: list[str] = []
    log = logging.getLogger("toolkit")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: logged.append(record.getMessage()) or True)
    watcher = threading.Thread(target=watch)
    before_gib = {"anonymous": memory_gib("RssAnon"), "resident": memory_gib("VmRSS")}
    watcher.start()
    export_model(config, sharded, data, Origin(), run_places(config, folder))
    ended.set()
    watcher.join()
    figures |= {f"{kind}_gib": peak[kind] - before_gib[kind] for kind in peak}
    figures |= {"stands_s": stands_s[0] if stands_s else time.monotonic() - started, "seconds": time.monotonic() - started}
    figures["num_parameters"] = sum(parameter.numel() for parameter in sharded.plain.parameters())
    figures["compares_logits"] = not any("not compared" in message for message in logged)
    gather_objects(None)
    if rank() == 0:
        print(*logged, sep="\n", flush=True)
        print(json.dumps(figures), flush=True)


def random_weights(box: tuple[slice, ...]) -> torch.Tensor:
    return torch.empty([part.stop - part.start for part in box]).uniform_(-0.02, 0.02)


if __name__ == "__main__":
    main()
