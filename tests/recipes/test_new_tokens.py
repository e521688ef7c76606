"""`model.add_tokens` through the recipes: exact on two ranks, resumed bit for bit, and plain libraries load what is exported."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.chats import say
from tests.support.launch import REPOSITORY
from tests.support.model_folders import make_rows, save_jsonl, save_resized
from tests.support.python_in_card import python_in_card, texts_of_python
from tests.support.workbench import FP32, RELOAD, Workbench, call_toolkit, run_without_toolkit

TOKENS = ["<|im_start|>", "<|im_end|>", "<|rare|>"]
"""Three rows for two ranks; the last occurs nowhere."""
TEMPLATE = REPOSITORY / "recipes" / "chat_templates" / "chatml_generation.jinja"
LR, EPS, NUM_ROWS, NUM_STEPS = 1e-2, 1e-3, 8, 4
CHATS = {
    "model__add_tokens": TOKENS, "data__chat_template": TEMPLATE, "data__eval_fraction": 0.0, "eval__generate": False,
    "train__global_batch_size_rows": NUM_ROWS, "train__micro_batch_size_rows": 2, "train__max_steps": NUM_STEPS,
    "optim__lr": LR, "optim__eps": EPS, "optim__weight_decay": 0.0, "optim__schedule": "constant", "optim__max_grad_norm": None,
    "checkpoint__every_steps": 2,
}  # fmt: skip
"""Each step takes all rows."""
LORA = {"adapter__method": "lora", "adapter__rank": 3, "adapter__alpha": 6, "export__merge": True}
RUNS = {
    "full-tied": ("small_llama_tied", {}),
    "full-untied": ("small_llama", {}),
    "lora-tied": ("small_llama_tied", LORA),
    "lora-untied": ("small_llama", LORA),
    "lora-in-free-rows": ("llama", LORA),
}

LOOK_AT_TOKENS = """
    about["ids"] = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|rare|>"])
    about["text"] = tokenizer.decode(tokenizer("<|im_start|>alpha<|im_end|>")["input_ids"], skip_special_tokens=True)
"""


@pytest.fixture(scope="module")
def trained(llm_bench, tmp_path_factory) -> Workbench:
    """A bench with chats, models with as many rows as their tokenizers have tokens, and the finished `RUNS`."""
    folder = tmp_path_factory.mktemp("chats")
    small = {f"small_{name}": save_resized(llm_bench.models[name], folder / name) for name in ("t5", "llama", "llama_tied")}
    rows = make_rows(NUM_ROWS)
    save_jsonl(folder / "chats.jsonl", [{"messages": say(row["source"], row["target"])} for row in rows])
    save_jsonl(folder / "rows.jsonl", [{"source": f"<|im_start|> {r['source']}", "target": r["target"]} for r in rows])
    bench = replace(llm_bench, models=llm_bench.models | small, data=folder, rows="chats.jsonl", changes=CHATS)
    bench.run_all({name: {"model": model} | settings for name, (model, settings) in RUNS.items()})
    return bench


def train_plain(folder: Path, rows: list[dict], *, has_adapter: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain transformers and peft on one process: the losses, and what was trained, by its names in an export."""
    import transformers
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from toolkit.models.weights import draw_new

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    tokenizer.chat_template = TEMPLATE.read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    old = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > old:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for weight in (model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data):
            weight[old:] = weight[:old].bfloat16().double().mean(dim=0).float()
    if has_adapter:
        ids = tokenizer.convert_tokens_to_ids(TOKENS)
        rows_of = {"embed_tokens": ids, "lm_head": ids}
        config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", trainable_token_indices=rows_of)
        model = get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.data.copy_(draw_new(name.removeprefix("base_model.model."), parameter.shape, 0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=EPS, weight_decay=0.0, betas=(0.9, 0.999))
    losses = []
    for _ in range(NUM_STEPS):
        total, num = torch.zeros(()), 0
        for row in rows:
            encoded = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            tokens_T, is_label_T = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"]).bool()
            logits_TV = model(input_ids=tokens_T[None]).logits[0]
            labels_T = torch.where(is_label_T, tokens_T, -100)
            total = total + torch.nn.functional.cross_entropy(logits_TV[:-1], labels_T[1:], reduction="sum")
            num += int(is_label_T.sum())
        optimizer.zero_grad()
        (total / num).backward()
        optimizer.step()
        losses.append(total.item() / num)
    state = get_peft_model_state_dict(model, save_embedding_layers=False) if has_adapter else model.state_dict()
    return losses, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_what_plain_libraries_train(trained, name):
    model, settings = RUNS[name]
    rows = [json.loads(line) for line in (trained.data / "chats.jsonl").read_text().splitlines()]
    losses, expected = train_plain(trained.models[model], rows, has_adapter=bool(settings))
    assert [line["loss"] for line in trained.lines(name, "train")] == pytest.approx(losses, rel=1e-5)
    export = trained.runs / name / "export"
    exported = load_file(export / ("adapter_model.safetensors" if settings else "model.safetensors"))
    assert exported.keys() == expected.keys() - ({"lm_head.weight"} if name == "full-tied" else set())
    torch.testing.assert_close(exported, {tensor: expected[tensor] for tensor in exported}, rtol=1e-5, atol=1e-5)
    # The rows of tokens that occur have moved apart: they begin equal, as the mean, except where the model has had rows for them.
    embedding = next(value for tensor, value in exported.items() if "embed_tokens" in tensor)
    start, end = embedding[-3:-1] if not settings else embedding[:2]
    assert (start - end).abs().max() > 1e-3


def test_plain_libraries_give_the_trained_models_logits(trained, tmp_path):
    changes = {key: value for key, value in CHATS.items() if key != "data__chat_template"}
    replace(trained, recipe="t5", rows="rows.jsonl", changes=changes).run("t5-lora", model="small_t5", **LORA)
    found = run_without_toolkit(RELOAD + LOOK_AT_TOKENS, [trained.runs / name for name in (*RUNS, "t5-lora")], tmp_path)
    for name, about in found.items():
        assert max(about["export"], about.get("merged", 0.0)) <= 1e-5, (name, about)
        assert about["ids"] == sorted(about["ids"]) and about["text"].strip() == "alpha"


@pytest.mark.parametrize(
    ("num_processes", "tolerance", "names"),
    [(2, 0.0, ("full-untied", "lora-tied", "lora-in-free-rows")), (3, 1e-5, ("full-tied", "lora-untied"))],
)
def test_a_resume_is_the_same_run(trained, num_processes, tolerance, names):
    end = f"-on-{num_processes}"
    for name in names:
        later = shutil.ignore_patterns(f"step-{NUM_STEPS:08d}", "export", "merged")
        shutil.copytree(trained.runs / name, trained.runs / f"{name}{end}", ignore=later)
    runs = {f"{name}{end}": {"model": RUNS[name][0]} | RUNS[name][1] for name in names}
    trained.run_all(runs, overrides=FP32 | {"num_processes": num_processes})
    for name in names:
        expected, found = (trained.lines(run, "train") for run in (name, f"{name}{end}"))
        assert [line["step"] for line in trained.lines(f"{name}{end}", "resume")] == [2]
        assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=tolerance)
        whole, again = (next((trained.runs / run / "export").glob("*model.safetensors")) for run in (name, f"{name}{end}"))
        assert num_processes == 3 or whole.read_bytes() == again.read_bytes()


def test_an_adapter_with_new_tokens_goes_on_and_generates(trained, capsys):
    adapter = trained.runs / "lora-untied" / "export"
    more = {"adapter__method": "lora", "adapter__name_or_path": adapter}
    trained.run("further", model="small_llama", **more)
    assert trained.lines("further", "train")[0]["loss"] < trained.lines("lora-untied", "train")[-1]["loss"]
    refused = trained.attempt("others", model="small_llama", **more, model__add_tokens=TOKENS[:2])
    assert "of model.add_tokens are" in refused.refusal()
    assert call_toolkit("generate", adapter, "--text", "alpha beta") == 0, capsys.readouterr()


@pytest.mark.parametrize("name", ["lora-untied", "lora-in-free-rows"])
def test_the_cards_python_gives_the_base_its_new_rows(trained, name):
    folder = trained.runs / name / "export"
    [text] = texts_of_python(python_in_card(folder), folder, ["alpha beta"])
    assert isinstance(text, str)
