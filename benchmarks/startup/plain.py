"""The plain side of `startup.py`: `plain.py WEIGHTS FOLDER`, by itself or under `torch.distributed.run`.

What a script does that nobody has made fast or safe: load the rows and the model, add an adapter, take one step.
"""

import json
import os
import sys
import time

seen = [("Python, launcher", float(os.environ["STARTED_AT_S"]), 0.0)]


def note(phase: str) -> None:
    seen.append((phase, time.time(), time.process_time()))


note("imports")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from datasets import load_dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

note("rows")
weights, folder = sys.argv[1:]
shards = "WORLD_SIZE" in os.environ
if shards:
    dist.init_process_group("gloo")
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(weights)
tokenizer.pad_token = tokenizer.eos_token
rows = load_dataset("json", data_files=f"{folder}/rows.jsonl", split="train", cache_dir=f"{folder}/plain")
rows = rows.map(lambda row: {"ids": tokenizer(row["prompt"] + row["completion"], truncation=True, max_length=32)["input_ids"]})
ids = torch.tensor(rows[: 2 * (dist.get_world_size() if shards else 1)]["ids"])
ids = ids[dist.get_rank() :: dist.get_world_size()] if shards else ids

note("weights")
device = "cuda" if torch.cuda.is_available() and not shards else "cpu"
model = AutoModelForCausalLM.from_pretrained(
    weights, dtype=torch.bfloat16, **({"device_map": device} if device == "cuda" else {})
)

note("adapter, wrapping, optimizer")
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
if shards:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
model.train()

note("first step")
ids = ids.to(device)
with torch.autocast(device, dtype=torch.bfloat16, enabled=not shards):
    loss = model(input_ids=ids, labels=ids).loss
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
loss.item()
if device == "cuda":
    torch.cuda.synchronize()
note("end")
if shards:
    import psutil

    launcher = psutil.Process(os.getppid()).cpu_times()
    seen[0] = (*seen[0][:2], -launcher.user - launcher.system)
if os.environ.get("RANK", "0") == "0":
    pairs = zip(seen[:-1], seen[1:], strict=True)
    print(json.dumps({phase: [end_s - begin_s, end - begin] for (phase, begin_s, begin), (_, end_s, end) in pairs}))
sys.stdout.flush()
os._exit(0)
