"""Our side of `startup.py`: `ours.py FLAGS` under `accelerate launch` is `recipes/llm.py`, which ends after the first step.

The phases are those that a run reports to its watchdog. Rank 0 prints, for each, its seconds and its seconds of processor time.
"""

import json
import os
import sys
import time
from typing import Any
from unittest import mock

from toolkit.config.load import load_config
from toolkit.config.schema import LLMConfig


def main() -> None:
    import psutil

    config = load_config(LLMConfig)
    launcher = psutil.Process(os.getppid()).cpu_times()

    import torch

    from toolkit.distributed.watchdog import Watchdog
    from toolkit.training.finetune import finetune

    seen = [("before the run", float(os.environ["STARTED_AT_S"]), -launcher.user - launcher.system)]

    def note(self: Watchdog, phase: str, *args: Any, **more: Any) -> None:
        seen.append((phase, time.time(), time.process_time()))
        enter(self, phase, *args, **more)

    def end(_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            seen.append(("", time.time(), time.process_time()))
        phases: dict[str, list[float]] = {}
        for (phase, *begin), (_, *finish) in zip(seen[:-1], seen[1:], strict=True):  # the last one is the call of this
            both = phases.setdefault(phase, [0.0, 0.0])
            both[:] = (sum_ + b - a for sum_, a, b in zip(both, begin, finish, strict=True))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(phases))
        sys.stdout.flush()
        os._exit(0)  # no save, no export

    enter = Watchdog.enter_phase
    with mock.patch.object(Watchdog, "enter_phase", note):
        finetune(config, after_step=end)


if __name__ == "__main__":
    main()
