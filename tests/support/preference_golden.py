"""Writes `preference_golden.json`: losses of TRL's trainers on one pair at a time, of a tiny Llama and another one as reference.

With TRL 1.16, which is not a dependency, in PYTHONPATH: `python -m tests.support.preference_golden`.
"""

import json
import tempfile
from pathlib import Path

import torch

FILE = Path(__file__).with_suffix(".json")
BETA, SMOOTHING, MARGIN = 0.3, 0.2, 0.5
PAIRS = [
    {"prompt": [5, 6, 7, 8], "chosen": [9, 10, 11, 1], "rejected": [12, 1]},
    {"prompt": [20, 21], "chosen": [22, 1], "rejected": [23, 24, 25, 26, 27, 1]},
    {"prompt": [30, 31, 32, 33, 34, 35, 36], "chosen": [3, 4, 1], "rejected": [4, 3, 1]},
]


def build_model(seed: int):
    """A tiny Llama; its weights are large, so that answers differ in likelihood."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=48, initializer_range=0.3, pad_token_id=0, eos_token_id=1, **sizes)).eval()


def main() -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    from tests.support.model_folders import _build_tokenizer

    tokenizer = _build_tokenizer(("<pad>", "</s>"))
    model, reference, losses = build_model(0), build_model(1), dict[str, list[float]]()
    columns = [{f"{name}_ids": pair[name] for name in pair} for pair in PAIRS]
    rows = Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}] * len(PAIRS))
    of_trl = {"sigmoid": {}, "robust": {"label_smoothing": SMOOTHING}, "ipo": {}}
    for loss, options in of_trl.items():
        with tempfile.TemporaryDirectory() as folder:
            config = DPOConfig(folder, loss_type=[loss], beta=BETA, use_cpu=True, bf16=False, report_to=[], **options)
            trainer = DPOTrainer(model, reference, config, train_dataset=rows, processing_class=tokenizer)
            trainer.model.eval()
            of_rows = [trainer.data_collator([columns_of]) for columns_of in columns]
            with torch.no_grad():
                losses[loss] = [trainer.compute_loss(trainer.model, batch).item() for batch in of_rows]

    # The other two trainers' functions alone: their own data code takes texts, and ORPO's cross-entropy also counts prompts.
    class Settings:
        beta, alpha, label_smoothing, simpo_gamma, loss_type = BETA, 0.0, 0.0, MARGIN, "simpo"

        class accelerator:
            device = torch.device("cpu")

    losses["simpo"], losses["orpo"] = [], []
    for pair in PAIRS:
        means = []
        for answer in ("chosen", "rejected"):
            ids = torch.tensor([pair["prompt"] + pair[answer]])
            labels = torch.tensor([[-100] * len(pair["prompt"]) + pair[answer]])
            with torch.no_grad():
                means.append(CPOTrainer.get_batch_logps(model(ids).logits, labels, average_log_prob=True))
        losses["simpo"].append(CPOTrainer.cpo_loss(Settings, *means)[0].item())
        losses["orpo"].append((-means[0] - ORPOTrainer.odds_ratio_loss(Settings, *means)[0]).item())
    FILE.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
