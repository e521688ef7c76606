"""Fine-tune an encoder-decoder (T5, BART, Pegasus, …) to summarize, sharded as the accelerate YAML says.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/t5.py --config recipes/configs/t5_docstrings.yaml
"""

import logging
from typing import Final

from toolkit.config.load import dotted_keys, load_config
from toolkit.config.schema import SummarizationConfig
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging

logger = logging.getLogger("toolkit")

SEQ2SEQ: Final = "AutoModelForSeq2SeqLM"


def main() -> None:
    config = load_config(SummarizationConfig, description=__doc__)

    # These imports take seconds, so a wrong flag has been reported before them.
    from toolkit.data.batch_plan import BatchPlan
    from toolkit.data.collate import SummarizationCollator, own_label_shift
    from toolkit.data.tokens.languages import start_generation
    from toolkit.data.tokens.prepare import prepare_rows
    from toolkit.distributed.comm import world_size
    from toolkit.evaluation.rows import EvaluationRows, choose_rows
    from toolkit.launch.run_folder import save_run_config
    from toolkit.models.config import check_positions, special_tokens
    from toolkit.models.load import num_token_embeddings
    from toolkit.parallel.units import describe
    from toolkit.parallel.wrap import shard_model
    from toolkit.tracking.trackers import start_trackers
    from toolkit.training import setup
    from toolkit.training.after_step import Run
    from toolkit.training.loop import train
    from toolkit.training.model_checks import check_seq2seq_model
    from toolkit.training.optim import build_optimizer
    from toolkit.training.setup import begin, build_skeleton, check_rows, finish, identity_of, load_model, open_metrics, resume

    context = begin(config)
    accelerator, run_folder = context.accelerator, context.run_folder

    # The model on the meta device: what is wrong with it is reported before data and weights load.
    model_config, skeleton = build_skeleton(config, accelerator, SEQ2SEQ)
    collator = SummarizationCollator(*special_tokens(model_config, config.model.name_or_path), own_label_shift(skeleton))

    # Rows: text → tokens on disk → the batch plan (which rows each step takes) and the evaluation split.
    rows = prepare_rows(config.data, config.model, num_token_embeddings(skeleton))
    num_tokens, num_label_tokens = (rows.train.with_format("numpy")[name][:] for name in ("num_tokens", "num_label_tokens"))
    plan = BatchPlan(
        num_tokens=num_tokens,
        num_label_tokens=num_label_tokens,
        train=config.train,
        world_size=world_size(),
    )
    evaluation = EvaluationRows(
        rows=choose_rows(rows.evaluation, config.eval.num_rows),
        tokenizer=rows.tokenizer,
        collator=collator,
        metrics=context.metrics,
    )
    longest = {
        "source": setup.longest(rows, evaluation, "num_tokens", minus="num_label_tokens"),
        "target": setup.longest(rows, evaluation, "num_label_tokens"),
    }
    check_positions(model_config, config.model.name_or_path, longest, config.eval)
    num_steps = check_rows(config, rows, plan, evaluation)

    # Model → frozen or adapted → shards → optimizer. Under FSDP2, `sources` says where each rank reads its shards.
    model, sources = load_model(config, context, SEQ2SEQ, model_config, skeleton)
    start_generation(model, rows.tokenizer, collator)
    identity = identity_of(context, model_config, rows, model, sources)
    sharded = shard_model(accelerator, model, sources)
    optimizer = build_optimizer(config.optim, sharded.model)
    logger.info(describe(sharded.units))
    check_seq2seq_model(sharded, collator, config.eval)

    # Resume from this run's last checkpoint, if there is one.
    metrics = open_metrics(run_folder)
    run = Run(run_folder, sharded, optimizer, plan, rows.train, evaluation, identity, metrics, num_steps)
    state = resume(config, context, run)
    save_run_config(config, run_folder)

    # Train: step, evaluate, save. Then export, reload, compare, and print the results.
    start_trackers(accelerator, config.tracking, config.run.name, dotted_keys(config))
    train(config, run, state)
    finish(config, run)


if __name__ == "__main__":
    with exit_on_user_error():
        start_logging()
        main()
