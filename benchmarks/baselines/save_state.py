"""`Accelerator.save_state` of a peft LoRA under FSDP2 on CPU: prints one JSON line of figures, knows no toolkit.

`accelerate launch --config_file FSDP2.yaml benchmarks/baselines/save_state.py CONFIG.json`; the fields of the config are those of
`PeerConfig`. One update comes first, so that the optimizer has its moments.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """One measurement."""

    model_folder: str
    """With weights."""
    work_folder: str
    """Where checkpoints are written."""
    target_modules: list[str] | str
    rank: int
    num_saves: int = 3


def measure_saves(config: PeerConfig) -> dict[str, float | list[float]]:
    """Bytes of a checkpoint, and the seconds that each save keeps the training waiting. Collective."""
    PartialState(cpu=True)
    # accelerate takes FSDP back on a CPU, but does it there when told that this is an accelerator.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")
    accelerator = Accelerator(cpu=True)
    base = AutoModelForCausalLM.from_pretrained(config.model_folder, dtype=torch.bfloat16)
    lora = LoraConfig(r=config.rank, lora_alpha=2 * config.rank, target_modules=config.target_modules, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_parameters = sum(p.numel() for p in model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "not sharded"
    input_ids = torch.arange(16).expand(2, -1)
    accelerator.backward(model(input_ids=input_ids, labels=input_ids, use_cache=False).loss)
    optimizer.step()
    blocking_s = []
    for save in range(config.num_saves):
        folder = Path(config.work_folder) / f"checkpoint-{save}"
        accelerator.wait_for_everyone()
        start_s = time.perf_counter()
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()
        blocking_s.append(time.perf_counter() - start_s)
    return {
        "num_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "blocking_s": blocking_s,
        "num_trainable": num_trainable,
        "num_parameters": num_parameters,
    }


def main() -> None:
    figures = measure_saves(PeerConfig(**json.loads(Path(sys.argv[1]).read_text())))
    if PartialState().is_main_process:
        print(json.dumps(figures), flush=True)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
