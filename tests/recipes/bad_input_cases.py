"""The cases of test_bad_input.py on the T5 recipe: what is wrong, and the one sentence that must be printed."""

from __future__ import annotations

import json

from tests.recipes.bad_input import WAYS_OUT, Case, model_files

NUM_ROWS = 24
T5 = {
    "model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 64,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ROWS = "".join(
    json.dumps({"source": f"alpha {'beta ' * (1 + i % 5)}gamma {i:b}", "target": f"beta {i:b}"}) + "\n" for i in range(NUM_ROWS)
)

TOKENIZER = {
    "model/tokenizer.json": json.dumps(
        {"model": {"type": "WordLevel", "vocab": {"<pad>": 0, "</s>": 1, "<unk>": 2}, "unk_token": "<unk>"}, "added_tokens": []}
    ),
    "model/tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}',
}
OTHER_MODEL = "--model.name_or_path {here}/other"
CSV = "--data.source csv --data.files {here}/rows.csv"

EARLY = {
    # On two real ranks, one or two for each layer; there is no data file. The unit tests of its folder have others.
    "unknown key in the YAML": Case(
        flags="--config {here}/run.yaml",
        files={"run.yaml": "train:\n  seed: 3\noptim:\n  momentum: 0.9\n"},
        sentence="{here}/run.yaml, line 4: unknown key optim.momentum; known are optim.name, …",
    ),
    "unknown nested key of the accelerate YAML": Case(
        overrides={"fsdp_config": {"fsdp_ofload_params": True}},
        sentence="…/fsdp2_cpu.yaml: unknown key fsdp_config.fsdp_ofload_params: did you mean fsdp_offload_params?",
    ),
    "unwritable output folder": Case(
        flags="--run.output_dir {here}/model/config.json/runs",
        sentence="run.output_dir {here}/model/config.json/runs: {here}/model/config.json/runs/run cannot be written "
        "(Not a directory): name a folder that you can write to",
    ),
    "encoder-only model": Case(
        flags=OTHER_MODEL,
        files=model_files({"model_type": "bert", "hidden_size": 16}),
        sentence="model.name_or_path {here}/other is a bert model, not an encoder-decoder that generates text: take one such as "
        "T5, BART or Pegasus",
    ),
    # The first thing to be reported once data is looked for.
    "missing file": Case(
        flags="--data.files {here}/rws.csv --data.source csv",
        files={"rows.csv": "source,target\na,b\n"} | TOKENIZER,
        sentence="data.files: there is no file {here}/rws.csv: did you mean {here}/rows.csv?",
    ),
}

DATA = {
    "missing column": Case(
        flags=CSV,
        files={"rows.csv": "id,source,summary\n1,a,b\n"} | TOKENIZER,
        sentence="{here}/rows.csv has no column 'target' (its columns: id, source, summary): set data.source_column and "
        "data.target_column to columns that exist",
    ),
    "model folder without a tokenizer": Case(
        sentence="the tokenizer of {here}/model could not be read (T5Tokenizer finds no vocabulary); its files are config.json: "
        "put the tokenizer that belongs to the weights there, or name a folder or hub id that has it in model.tokenizer",
    ),
    "model folder without weights": Case(
        files=TOKENIZER,
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
    "never, but there are checkpoints": Case(
        flags="--model.from_scratch true --checkpoint.resume never",
        sentence="checkpoint.resume is never, but {here}/runs/run/checkpoints holds checkpoints up to step 2: take another "
        "run.name, or move them away",
    ),
    "a damaged checkpoint by its name": Case(
        flags="--model.from_scratch true --checkpoint.resume {here}/damaged",
        sentence="checkpoint.resume is {here}/damaged, but damaged/rng-00001.safetensors does not have the sha256 of the "
        "manifest: its content changed: give a whole checkpoint, or auto for the newest",
    ),
}

# In one process, all in one launch; there is no data file but where the case brings one.
ALONE = {
    "no such checkpoint": Case(
        flags="--checkpoint.resume {here}/nowhere",
        sentence="checkpoint.resume is {here}/nowhere, and there is no such folder: give auto, never or a checkpoint, as in "
        "{here}/runs/run/checkpoints/step-00000120",
    ),
    "no weights to start from": Case(
        flags="--model.init_from {here}/nowhere",
        sentence="model.init_from {here}/nowhere holds no valid checkpoint: give a run folder that has one, the checkpoint "
        "itself, or an exported model",
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
    "wrong type in config.json": Case(
        flags=OTHER_MODEL,
        files=model_files({**T5, "d_model": "wide"}),
        sentence="model.name_or_path {here}/other could not be read (config.json: …'d_model'…wide…): give a Hugging Face model "
        "folder, or a hub id within reach",
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
    "more characters than embeddings": Case(
        flags=f"{CSV} --model.from_scratch true",
        files={"rows.csv": "source,target\n" + "".join(f"{chr(0x4E00 + 2 * i)},{chr(0x4E01 + 2 * i)}\n" for i in range(60))},
        sentence="the model has 64 token embeddings, fewer than the rows have different characters: raise vocab_size in its "
        "config.json, or give it a tokenizer",
    ),
}
