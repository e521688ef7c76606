"""NaN, Inf and spikes on any rank: all ranks leave the update out, say so, and stop after too many in a row."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.harness import NUM_STEPS, TRAINED, Fault, attempt_with, run_with
from tests.faults.workers.faulty_recipe import signal_in_phase, this_rank, wrap
from tests.recipes.test_resume import load_whole, on_one_process
from tests.support.same_runs import check_same, read_manifest, rows_by_place, saved_state
from toolkit.errors import EXIT_STOPPED

CHANGES = TRAINED | {"optim__weight_decay": 0.1}


def spoil_loss(value: str, at: Sequence[tuple[int, ...]]) -> None:
    """The loss of these (step, rank, micro-batch) is not finite, and so are the gradients it gives."""
    from toolkit.objectives.objective import Objective
    from toolkit.training import loop

    here: list[tuple[int, ...]] = [()]
    wrap(loop, "seed_all", lambda purpose, seed, *place: here.append(place))
    compute = Objective.loss

    def spoil(*args):
        loss_sum, num_correct = compute(*args)
        return (loss_sum * float(value) if here[-1] in at and torch.is_grad_enabled() else loss_sum), num_correct

    Objective.loss = spoil


def spoil_gradients(steps: Sequence[int], ranks: Sequence[int] = (0, 1), *, first: str = "", factor: float = 1.0) -> None:
    """After all ranks have reduced them, these ranks' gradients are so many times as large in these steps, and their first
    element is `first`."""
    from toolkit.parallel.units import local_tensor
    from toolkit.training import loop

    step = [0]
    wrap(loop, "seed_all", lambda purpose, seed, number, *_: step.append(number))

    def spoil(model: torch.nn.Module, *_: object) -> None:
        if step[-1] in steps and this_rank() in ranks:
            gradients = [local_tensor(p.grad).view(-1) for p in model.parameters() if p.grad is not None]
            for gradient in gradients:
                gradient.mul_(factor)
            if first:
                next(gradient for gradient in gradients if gradient.numel())[0] = float(first)

    wrap(loop, "clip_gradients", spoil)


# Name: fault, skipped steps, preset.
CASES = {
    "fsdp2, loss": (partial(spoil_loss, "nan", at=[(1, 0, 1), (3, 1, 0)]), [1, 3], {}),
    "fsdp2, gradient": (partial(spoil_gradients, [1, 4], [1], first="nan"), [1, 4], {}),
    "ddp, gradient of one replica": (partial(spoil_gradients, [1, 2], [1], first="inf"), [1, 2], {"preset": "ddp_cpu"}),
}


@pytest.mark.parametrize("case", CASES)
def test_update_is_left_out_on_all_ranks(bench, case):
    fault, skipped, settings = CASES[case]
    name = case.replace(" ", "-").replace(",", "")
    printed = run_with(bench, name, fault, **CHANGES | {"checkpoint__every_steps": 1}, **settings)
    assert printed.count("update skipped on all ranks") == len(skipped), "printed by one rank, once a step"

    # No weight, moment or count of a rank has changed, bit for bit; those of the first step are as before it.
    states = [saved_state(bench.checkpoint(name, step)) for step in range(1, NUM_STEPS + 1)]
    for step in range(2, NUM_STEPS + 1):
        for shard in ("__0_0.distcp", "__1_0.distcp"):
            assert (states[step - 1][shard] == states[step - 2][shard]) == (step in skipped), f"{shard} after step {step}"
    first, last = (on_one_process(load_whole, bench.checkpoint(name, step) / "state") for step in (1, NUM_STEPS))
    for weight, value in load_file(bench.models["t5"] / "model.safetensors").items():
        assert torch.equal(first.pop(f"model.{weight}"), value)
    assert first and not any(value.any() for value in first.values())
    assert {value.item() for state, value in last.items() if state.endswith(".step")} == {NUM_STEPS - len(skipped)}

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
    faults = [partial(spoil_gradients, [6], factor=1e6), partial(spoil_loss, "nan", at=[(2, 1, 0)])]
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
    bad_steps = partial(spoil_loss, "nan", at=[(2, 1, 0), (3, 0, 0), (4, 1, 1), (5, 0, 0), (6, 0, 0)])
    stopped = attempt_with(bench, "count", bad_steps, stop_in(2), **changes)
    assert stopped.returncodes == [EXIT_STOPPED] * 2
    assert read_manifest(bench.checkpoint("count", 3))["state"]["skips"]["num_in_a_row"] == 2
    result = attempt_with(bench, "count", bad_steps, **changes)
    start = "3 updates in a row were skipped, up to step 4 (optim.max_skipped_steps)"
    rows = sorted(row for line in bench.lines("count", "skip") if line["step"] == 4 for row in line["row_ids"])
    assert result.refusal().startswith(start) and rows and f"4: rows {', '.join(map(str, rows))}; " in result.refusal()
