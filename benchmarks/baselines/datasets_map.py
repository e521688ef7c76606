"""The other side of `benchmarks.throughput.tokenizing`: `load_dataset` of JSON lines and a plain `datasets.map`.

python benchmarks/baselines/datasets_map.py KIND ROWS.jsonl TOKENIZER CACHE
"""

import json
import sys
import time


def main() -> None:
    kind, file, folder, cache = sys.argv[1:]
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    start = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def once(rows: dict[str, list]) -> dict[str, list]:
        """A pair as one text, every token a label."""
        ids = tokenizer([a + b for a, b in zip(rows["prompt"], rows["completion"], strict=True)])["input_ids"]
        return {"input_ids": ids, "labels": ids}

    def twice(rows: dict[str, list]) -> dict[str, list]:
        """Prompts alone too, as TRL does, to mask them."""
        prompts, ids = tokenizer(rows["prompt"])["input_ids"], once(rows)["input_ids"]
        return {"input_ids": ids, "labels": [[-100] * len(a) + b[len(a) :] for a, b in zip(prompts, ids, strict=True)]}

    def chat(rows: dict[str, list]) -> dict[str, list]:
        out = tokenizer.apply_chat_template(rows["messages"], return_dict=True, return_assistant_tokens_mask=True)
        masked = zip(out["input_ids"], out["assistant_masks"], strict=True)
        return {
            "input_ids": out["input_ids"],
            "labels": [[i if m else -100 for i, m in zip(*row, strict=True)] for row in masked],
        }

    tokenize = {"pairs, one call": once, "pairs, prompts masked": twice, "chats": chat}[kind]
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
    tokenized = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
    print(json.dumps({"cpu_s": time.process_time() - start, "rows": len(tokenized)}))


if __name__ == "__main__":
    main()
