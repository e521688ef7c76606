"""What a run sets in its process, and leaves as it was: Python's garbage collection, cuDNN's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.small_run import NUM_STEPS, run_recipes, write_inputs


def test_ranks_collect_garbage_at_the_same_steps_and_generation_takes_no_cudnn(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    how: dict[str, Any] = {"preset": "fsdp2_cpu", "overrides": {}, "function": train_and_watch}
    flags = ["--model.name_or_path", str(tmp_path / "model"), "--model.from_scratch", "true"]
    words = {False: "false", True: "true"}
    runs = {f"cudnn-{word}": how | {"flags": [*flags, "--model.cudnn_attention", word]} for word in words.values()}
    finished: Any = run_recipes(tmp_path, runs)
    for cudnn, word in words.items():
        for report in finished[f"cudnn-{word}"][1]:
            assert report["collected_in_step"] == [], "Python collects nothing by itself while a step runs"
            assert report["collected_after"] == [2, 4]
            assert report["cudnn"] == {"training": {cudnn}, "generation": {False}}
            assert report["before"] == report["after"] == (True, 0, True)


def train_and_watch(recipe: str, argv: list[str], max_logits: int) -> dict[str, Any]:
    """On every rank: the run, with garbage in every step, enough for a collection."""
    import gc
    from unittest.mock import patch

    import torch
    from transformers import T5ForConditionalGeneration

    from tests.support.small_run import run_in_this_process
    from toolkit.training import loop

    train_step, generate = loop.train_step, T5ForConditionalGeneration.generate
    found: dict[str, Any] = {"collected_in_step": [], "collected_after": [], "cudnn": {"training": set(), "generation": set()}}
    step = [0]
    is_in_step = [False]

    def see_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and (is_in_step[0] or info["generation"] == 2) and 0 < step[0] < NUM_STEPS:
            found["collected_in_step" if is_in_step[0] else "collected_after"].append(step[0])

    def see_step(run: Any, *args: Any) -> Any:
        step[0], is_in_step[0] = run.state.step + 1, True
        for _ in range(2000):
            cycle: list[Any] = []
            cycle.append(cycle)
        found["cudnn"]["training"].add(torch.backends.cuda.cudnn_sdp_enabled())
        figures = train_step(run, *args)
        is_in_step[0] = False
        return figures

    def see_generate(*args: Any, **options: Any) -> Any:
        found["cudnn"]["generation"].add(torch.backends.cuda.cudnn_sdp_enabled())
        return generate(*args, **options)

    def settings() -> tuple[bool, int, bool]:
        return gc.isenabled(), gc.get_freeze_count(), torch.backends.cuda.cudnn_sdp_enabled()

    gc.unfreeze()  # the server that forks the ranks may have frozen its objects
    found["before"] = settings()
    gc.callbacks.append(see_collection)
    with (
        patch.object(loop, "train_step", see_step),
        patch.object(loop, "COLLECT_EVERY_STEPS", 2),
        patch.object(T5ForConditionalGeneration, "generate", see_generate),
    ):
        run_in_this_process(recipe, argv)
    gc.callbacks.remove(see_collection)
    return {**found, "after": settings()}
