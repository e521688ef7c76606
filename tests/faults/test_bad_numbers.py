"""NaN, Inf and spikes on any rank: all ranks leave the update out, say so, and stop after too many in a row."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.faults.harness import NUM_STEPS, TRAINED, Fault, attempt_with, run_with
from tests.faults.signals import signal_in_phase
from tests.faults.workers.faulty_recipe import wrap
from tests.support.same_runs import check_same, read_manifest, rows_by_place
from toolkit.errors import EXIT_STOPPED
from toolkit.files.json_lines import load_json_lines

CHANGES = TRAINED | {"optim__weight_decay": 0.1}


def spoil_loss(value: str, at: Sequence[tuple[int, ...]]) -> None:
    """The loss of these (step, rank, micro-batch) is not finite, and so are the gradients it gives."""
    import torch

    from toolkit.objectives.objective import Objective
    from toolkit.training import loop

    here: list[tuple[int, ...]] = [()]
    wrap(loop, "seed_all", lambda purpose, seed, *place: here.append(place))
    compute = Objective.loss

    def spoil(*args):
        loss_sum, num_correct = compute(*args)
        return (loss_sum * float(value) if here[-1] in at and torch.is_grad_enabled() else loss_sum), num_correct

    Objective.loss = spoil


def spoil_gradient(value: str, steps: Sequence[int], rank: int) -> None:
    """One element of one rank's gradient is not finite in these steps, after all ranks have reduced it."""
    from toolkit.distributed import comm as distributed
    from toolkit.parallel.units import local_tensor
    from toolkit.training import loop

    step = _current_step(loop)

    def spoil(model: torch.nn.Module, *_: object) -> None:
        if step[-1] in steps and distributed.rank() == rank:
            mine = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
            next(gradient for gradient in mine if gradient.numel()).view(-1)[0] = float(value)

    wrap(loop, "clip_gradients", spoil)


def bad_loss(value: str, *at: tuple[int, int, int]) -> partial[None]:
    return partial(spoil_loss, value, at=at)


def bad_gradient(value: str, *steps: int, rank: int) -> Fault:
    return partial(spoil_gradient, value, steps, rank)


def spike(steps: Sequence[int], factor: float) -> None:
    """Gradients are so many times larger in these steps."""
    from toolkit.parallel.units import local_tensor
    from toolkit.training import loop

    step = _current_step(loop)

    def enlarge(model: torch.nn.Module, *_: object) -> None:
        if step[-1] in steps:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    local_tensor(parameter.grad).mul_(factor)

    wrap(loop, "clip_gradients", enlarge)


def watch_updates(file: str) -> None:
    """Write down for each step which parameters and moments it changed on this rank, bit for bit, and Adam's step counts."""
    from toolkit.distributed.comm import rank
    from toolkit.training import loop

    train_step = loop.train_step

    def watched(run, step, *args):
        before = _bits(run)
        figures = train_step(run, step, *args)
        after = _bits(run)
        # A moment that did not exist was 0.
        changed = [name for name, t in after.items() if not torch.equal(before.get(name, torch.zeros_like(t)), t)]
        counts = sorted({int(t.item()) for name, t in after.items() if name.endswith(".step")})
        with Path(f"{file}-{rank()}.jsonl").open("a") as out:
            print(json.dumps({"step": step.step, "changed": len(changed), "of": len(after), "counts": counts}), file=out)
        return figures

    loop.train_step = watched


def _current_step(loop) -> list[int]:
    steps = [0]
    wrap(loop, "seed_all", lambda purpose, seed, step, *_: steps.append(step))
    return steps


def _bits(run) -> dict[str, torch.Tensor]:
    from toolkit.parallel.units import local_tensor

    found = {}
    for name, parameter in run.sharded.model.named_parameters():
        found[name] = parameter
        for what, value in run.optimizer.state.get(parameter, {}).items():
            found[f"{name}.{what}"] = value
    local = {name: local_tensor(tensor).detach() for name, tensor in found.items()}
    return {name: tensor.clone() for name, tensor in local.items() if tensor.numel()}


# Name: fault, skipped steps, preset.
CASES = {
    "fsdp2, loss": (bad_loss("nan", (1, 0, 1), (3, 1, 0)), [1, 3], {}),
    "fsdp2, gradient": (bad_gradient("nan", 1, 4, rank=1), [1, 4], {}),
    "ddp, gradient of one replica": (bad_gradient("inf", 1, 2, rank=1), [1, 2], {"preset": "ddp_cpu"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_update_is_left_out_on_all_ranks(bench, case):
    fault, skipped, settings = CASES[case]
    name = case.replace(" ", "-").replace(",", "")
    watch = partial(watch_updates, str(bench.runs / f"{name}-updates"))
    printed = run_with(bench, name, fault, watch, **CHANGES, **settings)
    assert printed.count("update skipped on all ranks") == len(skipped), "printed by one rank, once a step"

    for rank in range(2):
        updates = load_json_lines(bench.runs / f"{name}-updates-{rank}.jsonl")
        assert [update["step"] for update in updates] == list(range(1, NUM_STEPS + 1))
        for update in updates:
            taken = update["step"] - sum(step <= update["step"] for step in skipped)
            assert update["counts"] == [taken], f"Adam's step count on rank {rank} after step {update['step']}"
            if update["step"] in skipped:
                assert update["changed"] == 0, f"step {update['step']} changed weights or moments of rank {rank}"
            else:
                assert update["changed"] > 0.9 * update["of"] > 0, "not watched"

    lines = bench.lines(name, "skip")
    assert [line["step"] for line in lines] == skipped
    rows = rows_by_place(bench.runs / name)
    for line in lines:
        of_step = {key: ids for key, ids in rows.items() if key[1] == line["step"]}
        if "loss" in case:
            assert line["loss"] is None and line["loss_is"] in ("nan", "inf", "-inf")
            at = [bad for bad in fault.keywords["at"] if bad[0] == line["step"]]
            bad_rows = [row for step, rank, micro_batch in at for row in of_step[f"rows-{rank:05d}", step, micro_batch]]
        else:
            assert line["loss"] is not None
            bad_rows = [row for ids in of_step.values() for row in ids]
        assert line["row_ids"] == sorted(bad_rows) != []
    assert read_manifest(bench.checkpoint(name, NUM_STEPS))["state"]["skips"]["num_skipped"] == len(skipped)
    rates = [line["learning_rate"] for line in bench.lines(name, "train")]
    assert rates == pytest.approx([1e-3 * (NUM_STEPS - done) / NUM_STEPS for done in range(NUM_STEPS)])


def stop_in(step: int) -> Fault:
    """The run then ends after the step behind it."""
    return partial(signal_in_phase, "loading rows", step, [1], ["SIGTERM"])


def test_resume_behind_a_skip_is_exact(bench):
    """Weights, moments, curves, lines of skips, and what the guard remembers: a NaN before the stop, a spike after it."""
    faults = [partial(spike, [6], 1e6), bad_loss("nan", (2, 1, 0))]
    guarded = {"optim__skip_beyond_sigmas": 50, "optim__skip_window_steps": 2, "log_every_steps": 2}
    changes = CHANGES | guarded | {"train__max_steps": 8, "checkpoint__every_steps": 20}
    run_with(bench, "whole", *faults, **changes)
    assert [line["step"] for line in bench.lines("whole", "skip")] == [2, 6]
    assert attempt_with(bench, "stopped", *faults, stop_in(3), **changes).returncodes == [EXIT_STOPPED] * 2
    assert bench.checkpoints("stopped") == ["step-00000004"]
    assert "after step 4\n" in run_with(bench, "stopped", *faults, **changes)
    check_same(bench, "stopped", "whole", 8)
    state = read_manifest(bench.checkpoint("stopped", 8))["state"]["skips"]
    assert (state["num_skipped"], state["num_grad_norms"]) == (2, 7)
    assert all(isinstance(norm, float) for norm in state["grad_norms"]), "NaN has entered the window"


def test_too_many_in_a_row_are_counted_across_a_resume(bench):
    changes = CHANGES | {"optim__max_skipped_steps": 3}
    bad_steps = bad_loss("nan", (2, 1, 0), (3, 0, 0), (4, 1, 1), (5, 0, 0), (6, 0, 0))
    stopped = attempt_with(bench, "count", bad_steps, stop_in(2), **changes)
    assert stopped.returncodes == [EXIT_STOPPED] * 2
    assert read_manifest(bench.checkpoint("count", 3))["state"]["skips"]["num_in_a_row"] == 2
    result = attempt_with(bench, "count", bad_steps, **changes)
    start = "3 updates in a row were skipped, up to step 4 (optim.max_skipped_steps)"
    rows = sorted(row for line in bench.lines("count", "skip") if line["step"] == 4 for row in line["row_ids"])
    assert result.refusal().startswith(start) and rows and f"4: rows {', '.join(map(str, rows))}; " in result.refusal()
