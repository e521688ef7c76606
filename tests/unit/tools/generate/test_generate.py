"""`generate` as it is called: rows window by window, one sentence for what cannot be used, and nothing that is code or lies
outside of the model's folder; and how it takes the launch and its devices."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from tests.support.launch import REPOSITORY, run_on_ranks
from tests.support.model_folders import save_jsonl
from tests.support.tiny_models import causal_config
from tests.support.workbench import call_toolkit
from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer
from toolkit.errors import UserError
from toolkit.files.json_lines import load_json_lines
from toolkit.launch.environment import read_launch
from toolkit.tools.generate import generate as command
from toolkit.tools.generate import model
from toolkit.tools.generate.model import _choose_device, load_generator, open_model
from toolkit.training.run import release

POSITIONS, NEW = 64, 4
TEMPLATE = (
    "{% for m in messages %}{% if 'never' in m.content %}{{ raise_exception('never') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`llama` and `t5`, models of one layer, and `adapter`, a LoRA on the former."""
    parent = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tokenizer = train_byte_level_tokenizer(["hello"], 300)
    sizes = {"vocab_size": 300, "pad_token_id": 0, "eos_token_id": 1}
    of_llama = causal_config("llama", **sizes, num_hidden_layers=1, max_position_embeddings=POSITIONS, bos_token_id=1)
    llama = transformers.LlamaForCausalLM(of_llama)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, **sizes)
    )
    llama.save_pretrained(parent / "llama")
    adapted = get_peft_model(llama, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(parent / "llama")
    adapted.save_pretrained(parent / "adapter")
    t5.save_pretrained(parent / "t5")
    for name in ("t5", "adapter", "llama"):
        tokenizer.chat_template = TEMPLATE if name != "t5" else None
        tokenizer.save_pretrained(parent / name)
    return parent


@pytest.fixture
def copies(folders: Path, tmp_path) -> Path:
    """Copies of the models, to be changed."""
    return Path(shutil.copytree(folders, tmp_path / "models"))


def change_json(path: Path, **changes) -> None:
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, **changes}))


def call(*arguments: object, stdin: bytes | io.BytesIO = b"") -> int:
    """The exit status of `python -m toolkit generate`, in this process."""
    if "--chat" not in arguments:
        arguments = (*arguments, "--max-new-tokens", NEW)
    with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin, "utf-8")):
        return call_toolkit("generate", *arguments)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, stdin: bytes = b"") -> str:
    """The sentence of a call that a user's mistake ends."""
    capsys.readouterr()
    assert call(*arguments, stdin=stdin) == 2
    [sentence] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return sentence.removeprefix("error: ")


def predictions(output: Path) -> list[str]:
    lines = load_json_lines(output)
    assert [line["row"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["prediction"] for line in lines]


def test_no_text_is_generated_with_cudnns_attention(folders, monkeypatch):
    """It plans each new shape, and each token that is generated makes one."""
    seen, generate = [], transformers.LlamaForCausalLM.generate

    def see_generate(*args, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return generate(*args, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", see_generate)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert call(folders / "llama", "--text", "hello") == 0
    assert seen == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled(), "and afterwards as before"


def test_a_row_that_is_refused_keeps_the_texts_before_and_is_gone_on_from(folders, tmp_path, monkeypatch, capsys):
    rows = [{"text": chr(97 + i) * (1 + i % 5)} for i in range(12)]
    file, output = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    arguments = (folders / "llama", "--file", file, "--batch-size-rows", 2, "--output")
    save_jsonl(file, rows)
    assert call(*arguments, tmp_path / "expected.jsonl") == 0
    expected = predictions(tmp_path / "expected.jsonl")
    assert len(expected) == 12 and len(set(expected)) > 1

    monkeypatch.setattr(command, "BATCHES_AT_ONCE", 2)  # windows of 4 rows
    kept = f"{output} keeps its 8 texts, and the same command goes on after them"
    save_jsonl(file, [*rows[:10], {"text": "y" * 100}, *rows[11:]])
    assert refused(capsys, *arguments, output) == (
        f"{file}, row 11 has 106 tokens, with --max-new-tokens 4 more than the model's 64 positions: shorten the text, or lower "
        f"--max-new-tokens; {kept}"
    )
    save_jsonl(file, [*rows[:10], {"text": "never"}, *rows[11:]])
    assert refused(capsys, *arguments, output) == (
        f"{file}, row 11: the chat template refuses this chat (never): change the row; {kept}"
    )
    # Rows that have a text are not changed below it.
    save_jsonl(file, [rows[0], {"text": "other"}, *rows[2:]])
    sentence = f"--output {output} has texts of other rows than the first 8 now: name another file"
    assert refused(capsys, *arguments, output) == sentence
    save_jsonl(file, rows[:7])
    assert refused(capsys, *arguments, output) == sentence
    save_jsonl(file, [*rows[:10], {"text": "hello"}, *rows[11:]])
    assert call(*arguments, output) == 0
    assert predictions(output)[:10] + predictions(output)[11:] == expected[:10] + expected[11:]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]


def test_rows_are_read_window_by_window(folders, monkeypatch):
    """All rows were read and made into tokens before the first text."""
    num_read, num_written = 0, 0

    class Lines(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            nonlocal num_read
            assert num_read <= num_written + 8  # the window, and the next line
            num_read += 1
            return b"hello\n" * (num_read <= 40)

    def write(output: Path | None, first: int, texts: list[str], digest: str) -> None:
        nonlocal num_written
        assert first == num_written
        num_written += len(texts)

    monkeypatch.setattr(command, "BATCHES_AT_ONCE", 2)
    monkeypatch.setattr(command, "append_texts", write)
    assert call(folders / "t5", "--file", "-", "--batch-size-rows", "2", stdin=Lines()) == 0
    assert num_written == 40


def test_a_chat_beyond_the_positions_ends_with_a_sentence(folders, monkeypatch, capsys):
    turns = iter(["hello", "x" * 60, "never", "hello"])
    monkeypatch.setattr("builtins.input", lambda _: next(turns, None) or (_ for _ in ()).throw(EOFError))
    assert call(folders / "llama", "--chat", "--max-new-tokens", NEW) == 0
    printed = capsys.readouterr().out
    assert "error: this chat has " in printed and "more than the model's 64 positions: shorten the text" in printed
    assert "error: this chat: the chat template refuses this chat (never): change the row" in printed
    assert printed.count("(a new chat)") == 2


def test_a_folder_reaches_no_code(copies, capsys, tmp_path):
    """It asked on stdin, and ran the folder's code after "y"."""
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\n"
    for name in ("modeling", "configuration", "tokenization"):
        (copies / "llama" / f"{name}.py").write_text(code)
    (copies / "llama" / "custom_generate").mkdir()
    (copies / "llama" / "custom_generate" / "generate.py").write_text(code)
    arguments = (copies / "llama", "--text", "hello")
    yes = b"y\ny\ny\ny\n"
    assert call(*arguments, stdin=yes) == call(copies / "adapter", "--text", "hello") == 0
    for name in ("llama", "adapter"):
        change_json(copies / name / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization.A", None]})
    auto_map = {"AutoConfig": "configuration.A", "AutoModelForCausalLM": "modeling.A"}
    change_json(copies / "llama" / "config.json", auto_map=auto_map)
    call(*arguments, stdin=yes)
    change_json(copies / "llama" / "config.json", model_type="unheard", architectures=["A"])
    sentence = refused(capsys, *arguments, stdin=yes)
    assert sentence.startswith(
        f"the model {copies / 'llama'} could not be read (The repository {copies / 'llama'} contains custom"
    )
    # peft would import what this names.
    change_json(copies / "adapter" / "adapter_config.json", megatron_config={"a": 1}, megatron_core="evil")
    assert refused(capsys, copies / "adapter", "--text", "hello") == (
        f"the adapter {copies / 'adapter'} has megatron_config {{'a': 1}} in its adapter_config.json, which is not supported"
    )
    changes = {"base_model_name_or_path": str(copies / "llama"), "megatron_config": None, "megatron_core": None}
    change_json(copies / "adapter" / "adapter_config.json", **changes)
    assert refused(capsys, copies / "adapter", "--text", "hello", stdin=yes) == sentence
    assert not ran.exists()


def test_a_folder_reaches_no_kernel_and_no_mode_of_the_hub(copies, capsys):
    folder = copies / "llama"
    change_json(folder / "generation_config.json", penalty_alpha=0.6, top_k=4)
    assert call(folder, "--text", "hello") == 0
    printed, what = capsys.readouterr(), f"of the generation config of {folder} is left out"
    assert f"WARNING: penalty_alpha 0.6 {what}: transformers runs it by code of the hub\n" in printed.err
    assert f"WARNING: top_k 4 {what}: it needs sampling\n" in printed.err and printed.out.count("\n") == 1
    change_json(folder / "generation_config.json", num_beams="x")
    sentence = refused(capsys, folder, "--text", "hello")
    assert sentence.startswith(f"the generation config of {folder} cannot be read (")
    (folder / "generation_config.json").unlink()
    for given in ("user/kernel", "user/kernel@v1:name"):
        change_json(folder / "config.json", attn_implementation=given)
        assert refused(capsys, folder, "--text", "hello") == (
            f"the config.json of {folder} names the attention {given}, which is code of the hub: take that line out"
        )


def test_texts_do_not_depend_on_the_batch_where_the_rope_follows_its_longest_row(folders, tmp_path):
    """Rows that stay below the limit, cross it, and begin above it."""
    torch.manual_seed(0)
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 4.0, 16.0, 32.0]}
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        eos_token_id=1, max_position_embeddings=POSITIONS, initializer_range=0.6,
        rope_parameters={**factors, "factor": 4.0, "original_max_position_embeddings": 24},
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "longrope")
    for file in (folders / "t5").glob("token*"):
        shutil.copy(file, tmp_path / "longrope")
    rows = save_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abcde fghij klmno pqrst uvwxy z"[:n]} for n in range(14, 31)])

    def generate(num: int) -> list[str]:
        output = tmp_path / f"{num}.jsonl"
        output.unlink(missing_ok=True)
        assert call(tmp_path / "longrope", "--file", rows, "--output", output, "--batch-size-rows", num) == 0
        return predictions(output)

    alone = generate(1)
    assert generate(8) == alone
    with patch.object(command, "group_by_rope", lambda *lengths: ()):
        assert generate(8) != alone  # the rows tell


@pytest.mark.parametrize(("preset", "expected"), [("ddp_cpu", "cpu"), ("ddp", "cuda:1"), (None, None)])
def test_several_processes_of_a_cpu_preset_leave_gpus_alone_and_those_of_torchrun_are_connected_too(
    monkeypatch, preset, expected
):
    """The launcher passes use_cpu to a single process only (accelerate/utils/launch.py:133, and nothing of it below). Each alone,
    processes of torchrun would all write every text into the output."""
    path = REPOSITORY / "accelerate_configs" / f"{preset}.yaml"
    launched = (
        {"ACCELERATE_MIXED_PRECISION": "no", "TOOLKIT_ACCELERATE_YAML": str(path)} if preset else {"WORLD_SIZE": "2", "RANK": "1"}
    )
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "LOCAL_RANK": "1", **launched})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ends = Mock(side_effect=ConnectionAbortedError)
    monkeypatch.setattr(command, "build_accelerator", (lambda **_: read_launch()) if preset else ends)
    monkeypatch.setattr(command, "_generate", ends if preset else Mock())
    with pytest.raises(ConnectionAbortedError):
        command.generate(SimpleNamespace(model="m", output=None))
    assert expected is None or str(_choose_device()) == expected


@pytest.mark.parametrize("base", ["runs/base/export", "../base/export"])
def test_an_adapter_whose_base_is_elsewhere_is_named(tmp_path, base):
    """Its path counts from the directory of the run."""
    LoraConfig(base_model_name_or_path=base, task_type="CAUSAL_LM").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"the adapter {tmp_path} needs its base {base}, not found from here .*export"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(("asked", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_a_model_computes_as_its_run_did(copies, asked, expected):
    (copies / "llama" / "toolkit.json").write_text('{"dtype": "bfloat16"}')
    generator = load_generator(open_model(str(copies / "llama")), asked, {})
    assert {weight.dtype for weight in generator.model.parameters()} == {expected}


def test_a_model_beyond_the_device_is_named_on_all_ranks(folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
    monkeypatch.setattr(model, "allocate", Mock(side_effect=full))
    sentence = r"^the model does not fit cuda:0 \(CUDA out .* 2.00 GiB.\): try --dtype bfloat16"
    with pytest.raises(UserError, match=sentence) as raised:
        load_generator(open_model(str(folders / "llama")), "float32", {})
    assert raised.value.printed_by == "run"


def test_several_processes_are_watched_and_started_alike():
    """A stopped rank was waited for without a word, and each rank took settings of its own."""
    plain = {"settings": {"num_beams": 3}, "dtype": None, "batch_size_rows": None, "output": Path("texts.jsonl")}
    others = [{"output": Path("elsewhere/texts.jsonl")}, {"settings": {"num_beams": 4}}, {"batch_size_rows": 2}, {"output": None}]
    ends = run_on_ranks(_start_generate, preset="ddp_cpu", args=([(plain, plain | other) for other in others],))
    assert ends[0] == ends[1] == [
        "watched", "settings of generate is {'num_beams': 4}", "batch_size_rows of generate is 2", "output of generate is False"
    ]  # fmt: skip


def _start_generate(cases: list[tuple[dict, ...]]) -> list[str]:
    """How `generate` ends with each rank's options: watched, or with the start of its error."""
    from toolkit.distributed import watchdog

    ends: list[str] = []
    with patch.object(command, "_generate", lambda _: ends.append("watched" if watchdog._current else "not watched")):
        for options in cases:
            try:
                command.generate(SimpleNamespace(model="m", **options[int(os.environ["RANK"])]))
            except UserError as error:
                ends.append(str(error).partition(" on rank 1 ")[0])
                release()
    return ends
