"""A whole run in text order: from the two YAML files to the exported model. `recipes/t5.py` and `recipes/llm.py` call it.

Each phase has a file beside this one: `setup.py` → `model.py` → `data.py` → `model.py` → `run.py` → `loop.py` → `run.py`.
"""

from __future__ import annotations

from toolkit.config.load import RecipeConfig, dotted_keys
from toolkit.launch.run_folder import save_run_config
from toolkit.tracking.trackers import start_trackers
from toolkit.training.data import num_steps, prepare_data
from toolkit.training.loop import train
from toolkit.training.model import build_model, build_skeleton
from toolkit.training.run import Run, finish, open_metrics, resume
from toolkit.training.setup import begin


def finetune(config: RecipeConfig) -> None:
    """Fine-tune the model of `config`, sharded as the accelerate YAML says: train, evaluate, save, export. Collective.

    The same command resumes a run that was stopped. This closes the process groups at its end.

    Args:
        config: of an encoder-decoder (`SummarizationConfig`) or a causal model (`LLMConfig`).

    Raises:
        UserError: anything wrong with the YAML files, the data, the model or the run folder; on every rank.
        Stopped: after a signal; the last completed step has a checkpoint.
    """
    # Checks of the config, the processes, the run folder, the checkpoint to resume from.
    context = begin(config)

    # The model on the meta device: what is wrong with it is reported before data and weights load.
    model_config, skeleton = build_skeleton(config, context.accelerator)

    # Rows: text → tokens on disk → the batch plan (which rows each step takes) and the evaluation split.
    rows, plan, evaluation = prepare_data(config, context, model_config, skeleton)

    # Model → frozen or adapted → shards → optimizer → checks of the model.
    sharded, optimizer, identity = build_model(config, context, model_config, skeleton, rows, evaluation)

    # Resume from this run's last checkpoint, if there is one.
    metrics = open_metrics(context.run_folder)
    steps = num_steps(config, plan)
    run = Run(context.run_folder, sharded, optimizer, plan, rows.train, evaluation, identity, metrics, steps)
    state = resume(config, context, run)
    save_run_config(config, run.folder)

    # Train: step, evaluate, save. Then export, reload, compare, and print the results.
    start_trackers(context.accelerator, config.tracking, config.run.name, dotted_keys(config))
    train(config, run, state)
    finish(config, run)
