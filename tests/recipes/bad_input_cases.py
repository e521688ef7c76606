"""The cases of test_bad_input.py: what is wrong, and the one sentence that must be printed."""

from __future__ import annotations

import json

from tests.recipes.bad_input import OTHER_DATA, TOO_MANY_TOKENS, WAYS_OUT, Case, model_files, tokenizer_files

NUM_ROWS = 24
T5 = {
    "model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 64,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 64, "max_position_embeddings": 8,
}  # fmt: skip
ROWS = "".join(
    json.dumps({"source": f"alpha {'beta ' * (1 + i % 5)}gamma {i:b}", "target": f"beta {i:b}"}) + "\n" for i in range(NUM_ROWS)
)


def cut_parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"source": ["a b"] * 50, "target": ["b"] * 50}), sink)
    return sink.getvalue().to_pybytes()[:-20]


OTHER_MODEL = "--model.name_or_path {here}/other"
CSV = "--data.source csv --data.files {here}/rows.csv"

EARLY = {
    # The run config; tests/unit/config/test_load.py has more of these.
    "unknown key in the YAML": Case(
        flags="--config {here}/run.yaml",
        files={"run.yaml": "train:\n  seed: 3\noptim:\n  momentum: 0.9\n"},
        sentence="{here}/run.yaml, line 4: unknown key optim.momentum; known are optim.lr, …",
    ),
    "broken YAML": Case(
        flags="--config {here}/run.yaml",
        files={"run.yaml": "optim:\n  lr: 3\n gamma: 2\n"},
        sentence="{here}/run.yaml, line 3: broken YAML (…): write `key: value`, indented under its section",
    ),
    "unknown metric": Case(
        flags="--eval.best_metric accuracy",
        sentence="eval.best_metric is accuracy: choose one of loss, perplexity, bits_per_byte, token_accuracy",
    ),
    "metric that fails": Case(
        flags="--eval.metrics {here}/own --eval.generate true",
        files={"own/own.py": "raise RuntimeError('no such library')"},
        sentence="eval.metrics {here}/own cannot be loaded (RuntimeError: no such library): name a metric of …",
    ),
    "tracker not installed": Case(
        flags="--tracking.log_with ['{tracker}']",
        sentence="tracking.log_with: '{tracker}' is not installed: pip install …; … (metrics.jsonl is written in any case)",
    ),
    # The accelerate YAML.
    "unknown nested key": Case(
        overrides={"fsdp_config": {"fsdp_ofload_params": True}},
        sentence="…/fsdp2_cpu.yaml: unknown key fsdp_config.fsdp_ofload_params: did you mean fsdp_offload_params?",
    ),
    "accumulation in the accelerate YAML": Case(
        overrides={"fsdp_config": {"gradient_accumulation_steps": 4}},
        sentence="…/fsdp2_cpu.yaml: fsdp_config.gradient_accumulation_steps is 4: leave it out, accumulation is derived from "
        "train.global_batch_size_rows and train.micro_batch_size_rows",
    ),
    "fp16": Case(
        overrides={"mixed_precision": "fp16"},
        sentence="…/fsdp2_cpu.yaml: mixed_precision is fp16, which is not supported: use bf16, which needs no loss scaling",
    ),
    "unknown wrap class": Case(
        overrides={"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "T5Blok"}},
        sentence="fsdp_transformer_layer_cls_to_wrap names T5Blok, which is not in T5ForConditionalGeneration; "
        "classes that exist: …, T5Block, …",
    ),
    # The run's folder.
    "fewer rows in a batch than processes": Case(
        flags="--train.global_batch_size_rows 1",
        sentence="train.global_batch_size_rows is 1, smaller than the 2 processes: give each at least one row, 2 or more",
    ),
    "unwritable output folder": Case(
        flags="--run.output_dir {here}/model/config.json/runs",
        sentence="run.output_dir {here}/model/config.json/runs: {here}/model/config.json/runs/run cannot be written "
        "(Not a directory): name a folder that you can write to",
    ),
    "a file in the run folder's place": Case(
        flags="--run.output_dir {here}/model --run.name config.json",
        sentence="run.output_dir {here}/model: {here}/model/config.json cannot be written (File exists): name a folder that you "
        "can write to",
    ),
    "no such checkpoint": Case(
        flags="--checkpoint.resume {here}/nowhere",
        sentence="checkpoint.resume is {here}/nowhere, and there is no such folder: give auto, never or a checkpoint, as in "
        "{here}/runs/run/checkpoints/step-00000120",
    ),
    "no checkpoint but another folder": Case(
        flags="--checkpoint.resume {here}/model",
        sentence="checkpoint.resume is {here}/model, but model has no manifest.json: it was never finished: give a whole "
        "checkpoint, or auto for the newest",
    ),
    "no weights to start from": Case(
        flags="--model.init_from {here}/nowhere",
        sentence="model.init_from {here}/nowhere holds no valid checkpoint: give a run folder that has one, the checkpoint "
        "itself, or an exported model",
    ),
    # The model.
    "no such model folder": Case(
        flags="--model.name_or_path {here}/nowhere",
        sentence="model.name_or_path {here}/nowhere is not a folder here: give an existing folder or a hub id",
    ),
    "no such model on the hub": Case(
        flags="--model.name_or_path no-such-model",
        sentence="model.name_or_path no-such-model could not be read (…): give a Hugging Face model folder, or a hub id within "
        "reach",
    ),
    "model folder without config": Case(
        flags=OTHER_MODEL,
        files={"other/model.safetensors": ""},
        sentence="model.name_or_path {here}/other has no config.json: give a Hugging Face model folder",
    ),
    "config.json that is not JSON": Case(
        flags=OTHER_MODEL,
        files=model_files("{"),
        sentence="model.name_or_path {here}/other could not be read (…config.json' is not a valid JSON file): give a Hugging "
        "Face model folder, or a hub id within reach",
    ),
    "wrong type in config.json": Case(
        flags=OTHER_MODEL,
        files=model_files({**T5, "d_model": "wide"}),
        sentence="model.name_or_path {here}/other could not be read (config.json: …'d_model'…wide…): give a Hugging Face model "
        "folder, or a hub id within reach",
    ),
    "encoder-only model": Case(
        flags=OTHER_MODEL,
        files=model_files({"model_type": "bert", "hidden_size": 16}),
        sentence="model.name_or_path {here}/other is a bert model, not an encoder-decoder that generates text: take one such as "
        "T5, BART or Pegasus",
    ),
    "mixture of experts": Case(
        flags=OTHER_MODEL,
        files=model_files({**T5, "model_type": "switch_transformers", "num_experts": 2}),
        sentence="model.name_or_path {here}/other is a mixture of experts: …, so it is not supported: take a dense model",
    ),
    "unknown attention": Case(
        flags="--model.attn_implementation sdpaa",
        sentence="model.attn_implementation sdpaa cannot be used with {here}/model (…): take sdpa or eager, or leave it out",
    ),
    "freezing nothing": Case(
        flags="--model.freeze ['encodr.*']",
        sentence="model.freeze 'encodr.*' matches no parameter; names look like shared.weight, …",
    ),
    "freezing by no regular expression": Case(
        flags="--model.freeze ['(']", sentence="model.freeze '(' is not a regular expression (missing ), …)"
    ),
    "freezing everything": Case(
        flags="--model.freeze ['.*']", sentence="model.freeze ['.*'] freezes every parameter: leave something to train"
    ),
    # The first thing to be reported once data is looked for.
    "missing file": Case(
        flags="--data.files {here}/rws.csv --data.source csv",
        files={"rows.csv": "source,target\na,b\n"},
        sentence="data.files: there is no file {here}/rws.csv: did you mean {here}/rows.csv?",
    ),
    "tokenizer larger than the embeddings": Case(
        flags=OTHER_MODEL,
        files=model_files(T5) | tokenizer_files(TOO_MANY_TOKENS, pad_token="<pad>"),
        sentence="the tokenizer of {here}/other has 100 tokens, but the model only 64 embeddings: take the tokenizer that "
        "belongs to the model; the vocabulary is not resized under sharding: resize the model with transformers' "
        "resize_token_embeddings and save it first",
    ),
}

DATA = {
    "unknown source": Case(
        flags="--data.source jsonll --data.files null",
        sentence="data.source jsonll is not one of …, and the hub cannot be reached: did you mean jsonl?",
    ),
    "error in a function of one's own": Case(
        flags="--data.source {here}/my_rows.py:load_rows",
        files={"my_rows.py": "def load_rows(config):\n    yield {'source': 'a', 'target': 'b'}\n    yield config.nothing\n"},
        sentence="{here}/my_rows.py:load_rows: line 3 of the file raised AttributeError: 'DataConfig' object has no attribute "
        "'nothing': correct it there",
    ),
    "missing column": Case(
        flags=CSV,
        files={"rows.csv": "id,source,summary\n1,a,b\n"},
        sentence="{here}/rows.csv has no column 'target' (its columns: id, source, summary): set data.source_column and "
        "data.target_column to columns that exist",
    ),
    "empty file": Case(flags=CSV, files={"rows.csv": ""}, sentence="{here}/rows.csv is empty: give a file with rows"),
    "header only": Case(
        flags=CSV,
        files={"rows.csv": "source,target\n"},
        sentence="{here}/rows.csv holds no rows: give a source with at least one",
    ),
    "all rows bad": Case(
        flags=CSV,
        files={"rows.csv": "source,target\na,\n,b\nc,\n"},
        sentence="none of the 3 rows can be used: skipped 2 of 3 rows of {here}/rows.csv with an empty target (first: rows 1, "
        "3); skipped 1 of 3 rows of {here}/rows.csv with an empty source (row 2); give a source with usable rows",
    ),
    "invalid UTF-8": Case(
        flags=CSV,
        files={"rows.csv": b"source,target\na,b\n\xffb,c\n"},
        sentence="{here}/rows.csv, line 3: byte 0xff is not valid UTF-8 (invalid start byte): set data.encoding (cp1252 for "
        "files of Western Windows), or convert the file",
    ),
    "line that is not JSON": Case(
        files={"rows.jsonl": ROWS + "{'source': 'a'}\n"},
        sentence=f"{{here}}/rows.jsonl, line {NUM_ROWS + 1}: not JSON (…): write one object a line, or one array of objects",
    ),
    "truncated parquet": Case(
        flags="--data.source parquet --data.files {here}/rows.parquet",
        files={"rows.parquet": cut_parquet},
        sentence="{here}/rows.parquet is not a complete parquet file (…): copy or write it again",
    ),
    "every row held out": Case(
        flags="--data.eval_fraction 1",
        sentence="all rows are held out, none is left to train on: lower data.eval_fraction or give more rows",
    ),
    "more characters than embeddings": Case(
        flags=CSV,
        files={"rows.csv": "source,target\n" + "".join(f"{chr(0x4E00 + 2 * i)},{chr(0x4E01 + 2 * i)}\n" for i in range(60))},
        sentence="the model has 64 token embeddings, fewer than the rows have different characters: raise vocab_size in its "
        "config.json, or give it a tokenizer",
    ),
    "unwritable cache": Case(
        flags="--data.cache_dir {here}/rows.jsonl/cache",
        sentence="the cache folder {here}/rows.jsonl/cache/rows cannot be written (Not a directory): set data.cache_dir",
    ),
    "rows longer than the model's positions": Case(
        flags=OTHER_MODEL,
        files=model_files(BART),
        sentence="the longest source has … tokens, but {here}/other has only 8 positions: set data.max_source_length_tokens to "
        "at most 8",
    ),
    "warm-up longer than the epochs": Case(
        flags="--train.max_steps null --train.num_epochs 1 --data.eval_fraction 0 --optim.warmup_steps 9",
        sentence="optim.warmup_steps is 9, but the run has only 6 steps: warm up for fewer",
    ),
    "model folder without weights": Case(
        sentence="model {here}/model has no loadable safetensors weights (…): give a folder with them, or model.from_scratch "
        "true for random ones",
    ),
}

# In the folder of a finished run, which must stay as it is.
AFTER_A_RUN = {
    "another run's config": Case(
        flags="--model.from_scratch true --optim.lr 0.5 --data.files {here}/nowhere.jsonl",  # refused before data is looked for
        sentence=f"optim.lr is 0.5, but {{here}}/runs/run/checkpoints/step-00000002 was made with 0.001: {WAYS_OUT}",
    ),
    "another run's data": Case(
        flags="--model.from_scratch true --data.files {here}/other.jsonl",
        files={"other.jsonl": ROWS.replace("alpha", "omega")},
        sentence=f"the data is not what {{here}}/runs/run/checkpoints/step-00000002 was trained on, {OTHER_DATA}: {WAYS_OUT}",
    ),
    "another precision": Case(
        flags="--model.from_scratch true --data.files {here}/nowhere.jsonl",  # refused before data is looked for
        overrides={"mixed_precision": "no"},
        sentence=f"mixed_precision is 'no', but {{here}}/runs/run/checkpoints/step-00000002 was made with 'bf16': {WAYS_OUT}",
    ),
    "another config.json of the model": Case(
        flags="--model.from_scratch true",
        files={"model/config.json": json.dumps({**T5, "layer_norm_epsilon": 1e-5})},
        sentence=f"the model's config.json is not the one …/step-00000002 was trained with: {WAYS_OUT}",
    ),
    "never, but there are checkpoints": Case(
        flags="--model.from_scratch true --checkpoint.resume never",
        sentence="checkpoint.resume is never, but {here}/runs/run/checkpoints holds checkpoints up to step 2: take another "
        "run.name, or move them away",
    ),
}
