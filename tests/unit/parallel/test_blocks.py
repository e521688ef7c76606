"""Graphs of compiled blocks: equal blocks share them, and an epoch of lengths soon needs no further one."""

import gc
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.utils import DynamoBackend
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.support import seq2seq_families
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES
from tests.support.tiny_models import build_causal, build_rows, one_process
from toolkit.data.collate import CausalCollator
from toolkit.errors import UserError
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.models.patches.experts import routes_noted
from toolkit.parallel import wrap
from toolkit.parallel.blocks import checkpoint_activations, choose_checkpointing, compile_blocks
from toolkit.parallel.units import repeated_blocks

NUM_STEPS = 10
NUM_LAYERS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    gc.collect()
    gc.disable()  # a `__del__` of an earlier test's objects, called inside a block, would count as a frame
    yield
    gc.enable()
    torch._dynamo.reset()


def compiling(backend: str, device: str = "cpu", *, fullgraph: bool = False):
    """An `Accelerator` of one process whose YAML asks for this backend."""
    accelerator = one_process()
    plugin = SimpleNamespace(backend=DynamoBackend[backend], mode="default", fullgraph=fullgraph, dynamic=False)
    accelerator.device, accelerator.state = torch.device(device), SimpleNamespace(dynamo_plugin=plugin)
    return accelerator


@pytest.mark.parametrize(("family", "num_layers", "num_graphs"), [("llama", 4, 3), ("bart", 3, 6), ("t5", 3, 12)])
def test_equal_blocks_share_graphs_and_an_epoch_of_lengths_soon_has_them_all(family, num_layers, num_graphs, monkeypatch):
    """One kind of block, two, and four; each has the first shapes, changing lengths, and a changing number of rows. The backend
    only runs the graphs."""
    tried, graphs = [], []

    def note(self, frame, *args, **more):
        tried.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")
        return convert(self, frame, *args, **more)

    convert = torch._dynamo.convert_frame.ConvertFrameAssert.__call__
    monkeypatch.setattr(torch._dynamo.convert_frame.ConvertFrameAssert, "__call__", note)
    is_causal, counters = family in CAUSAL_FAMILIES, torch._dynamo.utils.counters
    class_name, settings = (CAUSAL_FAMILIES | FAMILIES)[family]
    layers = {key: num_layers for key in NUM_LAYERS if key in settings}
    auto_class = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForSeq2SeqLM
    config = getattr(transformers, class_name)(vocab_size=256, **settings | layers)
    torch._dynamo.reset()
    counters.clear()
    model = wrap.shard_model(compiling("EAGER"), auto_class.from_config(config, dtype=torch.float32)).model.train()
    collator = CausalCollator(0) if is_causal else seq2seq_families.build_collator(model)
    generator = torch.Generator().manual_seed(0)
    for step in range(NUM_STEPS):
        lengths = torch.randint(5, 60, (3 if step < 3 else 2 + step % 2,), generator=generator).tolist()
        rows = build_rows(tuple(lengths), seed=step)
        if not is_causal:
            rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][: 2 + len(row["input_ids"]) // 3]} for row in rows]
        summed_loss(model, collator.collate([[row] for row in rows]))[0].backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[4:] == [num_graphs] * (NUM_STEPS - 4)
    assert len(tried) == counters["frames"]["total"]
    # Not finalizers of earlier tests' objects, which come at any moment.
    frames = [frame for frame in tried if re.search(r"/(transformers|torch/nn|torch/utils/checkpoint|toolkit)\b", frame)]
    assert len(frames) == num_graphs, f"none was left uncompiled: {tried}"


def test_compilation_on_a_cpu_is_warned_about(capsys):
    for device, backend, warns in (("cpu", "INDUCTOR", True), ("cpu", "EAGER", False), ("cuda", "INDUCTOR", False)):
        compile_blocks(compiling(backend, device), seq2seq_families.build_model("t5"))
        printed = "".join(capsys.readouterr())
        assert ("blocks are compiled (dynamo_backend INDUCTOR), which on a CPU" in printed) == warns


def test_compiled_dropout_has_eager_masks():
    """torch 2.13's own masks for compiled code may repeat on a GPU, and differ in a recomputation."""

    model = torch.nn.Module()
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Dropout(0.1)
    model.blocks = torch.nn.ModuleList([torch.nn.Sequential(*layers)])
    inputs, taken = torch.rand(4, 64, requires_grad=True), []
    torch._dynamo.utils.counters.clear()
    for backend in ("NO", "INDUCTOR"):
        compile_blocks(compiling(backend), model)
        torch.manual_seed(0)
        outputs = model.blocks[0](inputs)
        taken.append((outputs, *torch.autograd.grad(outputs.sum(), inputs)))
    torch.testing.assert_close(taken[1], taken[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "compiled, not left to eager"


def test_kernels_that_another_processor_has_left_on_disk_are_not_taken(monkeypatch, tmp_path):
    """Vectors of 8 numbers in a loop of 16, or the reverse, corrupt memory; a later test then aborted."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    hits = []
    for processor in ("avx2", "avx2", "default"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", processor)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())])
        compile_blocks(compiling("INDUCTOR"), model)
        model.blocks[0](torch.rand(4, 8)).sum().backward()
        hits.append(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]


@pytest.mark.parametrize(
    ("family", "backend", "checkpoints"),
    [("mixtral", "NO", True), ("mixtral", "AOT_EAGER", True), ("deepseek_v3", "EAGER", False)],
)
def test_routes_are_noted_once_and_carry_gradients_however_blocks_run(family, backend, checkpoints):
    """Without a graph of a recomputation that a block would keep."""
    expected = gradients_of_routes(family, "NO", checkpoints=False)
    for name, gradient in gradients_of_routes(family, backend, checkpoints=checkpoints).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def gradients_of_routes(family: str, backend: str, *, checkpoints: bool) -> dict[str, torch.Tensor]:
    """Of the squares of all scores, after a step of other lengths."""
    torch._dynamo.reset()
    accelerator = compiling(backend, fullgraph=True)
    model = build_causal(family, num_hidden_layers=3).train()
    with routes_noted(model, repeated_blocks(model)) as noted:
        compile_blocks(accelerator, model)
        checkpoint_activations(accelerator, model, "full" if checkpoints else "none")
    for length in (9, 12):
        model.zero_grad()
        logits_BTV = model(input_ids=torch.arange(2 * length).view(2, length), use_cache=False).logits
        routes = [route for of_block in noted.values() for route in of_block]
        assert [len(scores_TE) for scores_TE, _ in routes] == [2 * length] * (2 if family == "deepseek_v3" else 3)
        noted.clear()
        (logits_BTV.logsumexp(dim=-1).mean() + sum(scores_TE.square().sum() for scores_TE, _ in routes)).backward()
        assert not noted, "a recomputation was noted"
    assert [module.route for module in model.modules() if hasattr(module, "route")] == [None] * len(routes)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_router_that_an_adapter_trains_in_full_has_one_route():
    """peft keeps the original beside it, and never calls that."""
    model = build_causal("mixtral")
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp.gate"]), model)
    with routes_noted(model, repeated_blocks(model)) as noted:
        pass
    for _ in range(2):
        model(input_ids=torch.arange(9)[None], use_cache=False)
        routes = [route for of_block in noted.values() for route in of_block]
        assert len(routes) == 2 and all(scores_TE.requires_grad for scores_TE, _ in routes)


@torch.library.custom_op("toolkit_tests::_scaled_dot_product_drawing", mutates_args=())
def attention_with_a_mask(query: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As CUDA's kernels, which draw their dropout themselves; on a CPU sdpa takes none of them then."""
    mask = (torch.rand_like(query) >= dropout_p).to(query.dtype)
    return query * mask, mask


attention_with_a_mask.register_autograd(
    lambda ctx, gradient, _: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class DrawingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.written = nn.Linear(16, 16, bias=False)

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        hidden_BD = self.written(hidden_BD).add_(1).tanh()
        attended = attention_with_a_mask(self.linear(hidden_BD), 0.5)[0]
        return hidden_BD + nn.functional.dropout(attended.sin(), 0.5)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_masks_stay_where_a_kernel_draws_some_itself_and_results_that_are_written_to_are_computed_again(mode):
    def gradients(mode) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList(DrawingBlock() for _ in range(2))).train()
        checkpoint_activations(one_process(), model, mode)
        torch.manual_seed(1)
        hidden_BD = torch.ones(4, 16)
        for block in model[0]:
            hidden_BD = block(hidden_BD)
        hidden_BD.sum().backward()
        return [p.grad for p in model.parameters()]

    for kept, recomputed in zip(gradients("none"), gradients(mode), strict=True):
        assert torch.equal(kept, recomputed) and kept.any()


@pytest.mark.parametrize(
    ("setting", "in_yaml", "is_compiled", "sentence"),
    [
        ("full", True, False, "full, and fsdp_activation_checkpointing is true in the accelerate YAML: set that one to false"),
        ("selective", False, True, "selective, but blocks are compiled (dynamo_config), and torch's compiler chooses itself"),
    ],
)
def test_what_recomputes_is_asked_for_once(setting, in_yaml, is_compiled, sentence):
    with pytest.raises(UserError, match=re.escape(f"train.activation_checkpointing is {sentence}")):
        choose_checkpointing(setting, in_accelerate_yaml=in_yaml, is_compiled=is_compiled)
    assert choose_checkpointing("none", in_accelerate_yaml=in_yaml, is_compiled=is_compiled) == ("full" if in_yaml else "none")
