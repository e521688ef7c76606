"""Fine-tune an encoder-decoder (T5, BART, Pegasus, …) to summarize, sharded as the accelerate YAML says.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/t5.py --config recipes/configs/t5_docstrings.yaml
"""

from toolkit.config import SummarizationConfig, dotted_keys, load_config
from toolkit.config_checks import check_evaluation_rows, check_num_steps
from toolkit.errors import exit_on_user_error


def main() -> None:
    config = load_config(SummarizationConfig, description=__doc__)

    # These take seconds to import; a wrong flag was told before.
    from toolkit import checkpoint, distributed, initial_weights, loop, models, optim, sharding, tracking
    from toolkit.accelerator import build_accelerator
    from toolkit.data.plan import BatchPlan, check_global_batch_size
    from toolkit.data.tokens import prepare_rows
    from toolkit.evaluation import EvaluationRows, check_metric
    from toolkit.export import export_model
    from toolkit.manifest import hash_model_config
    from toolkit.results import show_results
    from toolkit.run_folder import open_run_folder, save_run_config
    from toolkit.shard_units import describe

    tracking.check_trackers(config.tracking)
    check_metric(config.eval)
    accelerator = build_accelerator(config.tracking.log_with, config.run.output_dir)
    check_global_batch_size(config.train.global_batch_size_rows, distributed.world_size())
    run_folder = open_run_folder(config)
    settings = {**dotted_keys(config), "mixed_precision": accelerator.mixed_precision}
    resume_from = checkpoint.choose_checkpoint(run_folder, config.checkpoint.resume, settings)
    # Our own checkpoint has all weights but frozen ones.
    needs_start = resume_from is None or bool(config.model.freeze)
    init_from = initial_weights.find_weights(config.model.init_from) if config.model.init_from and needs_start else None

    # The model without weights: whatever is wrong with its config, wrap classes or freezing is told before data and weights load.
    model_config = distributed.agreed(lambda: models.load_model_config(config.model))
    skeleton = distributed.agreed(lambda: models.build_skeleton(config.model, model_config))
    distributed.agreed(lambda: models.freeze(skeleton, config.model.freeze))
    distributed.agreed(lambda: sharding.check_wrap(accelerator, skeleton))
    pad_token_id, decoder_start_token_id = models.special_tokens(model_config, config.model.name_or_path)
    model_config_hash = hash_model_config(model_config.to_diff_dict())

    # Rows: text → tokens on disk → the plan of which rows each step takes.
    rows = prepare_rows(config.data, config.model, models.num_token_embeddings(skeleton))
    plan = BatchPlan(
        source_lengths=rows.train.with_format("numpy")["source_length"][:],
        target_lengths=rows.train.with_format("numpy")["target_length"][:],
        global_batch_size_rows=config.train.global_batch_size_rows,
        micro_batch_size_rows=config.train.micro_batch_size_rows,
        seed=config.train.seed,
        world_size=distributed.world_size(),
    )
    num_steps = loop.num_steps(config, plan)
    check_num_steps(config, num_steps)
    num_eval_rows = min(config.eval.num_rows or len(rows.evaluation), len(rows.evaluation))
    check_evaluation_rows(config, num_eval_rows)
    evaluation = EvaluationRows(
        rows=rows.evaluation.select(range(num_eval_rows)),
        tokenizer=rows.tokenizer,
        pad_token_id=pad_token_id,
        decoder_start_token_id=decoder_start_token_id,
    )
    longest = {side: max(max(part[side][:], default=0) for part in (rows.train, evaluation.rows)) for side in models.LENGTHS}
    models.check_positions(model_config, config.model.name_or_path, longest, config.eval)
    distributed.print_rank0(
        *rows.remarks,
        f"{len(rows.train):,} training rows, {num_eval_rows:,} held-out rows; {plan.steps_per_epoch:,} steps an epoch, "
        f"{num_steps:,} in all; {plan.micro_batches_per_full_step} micro-batches a step on each of "
        f"{distributed.world_size()} processes",
    )

    # Model → shards → optimizer.
    model = distributed.agreed(lambda: models.load_model(config.model, model_config, config.train.seed))
    if init_from is not None:
        initial_weights.load_into(model, init_from)
    models.freeze_as(model, skeleton)
    frozen_hash = models.hash_frozen(model)
    sharded = sharding.shard_model(accelerator, model)
    optimizer = optim.build_optimizer(config.optim, sharded.model)
    distributed.print_rank0(describe(sharded.units))

    # This run's own last checkpoint.
    identity = checkpoint.Identity(settings, model_config_hash, rows.fingerprint, frozen_hash)
    metrics = tracking.MetricsLog(run_folder / "metrics.jsonl", is_writer=distributed.rank() == 0)
    state = checkpoint.TrainState()
    if resume_from is not None:
        state = checkpoint.load_checkpoint(resume_from, sharded, optimizer, identity)
        distributed.print_rank0(f"resuming from {resume_from}, after step {state.step}")
    # What a run has logged after its last checkpoint is done again: without one, all of it.
    metrics.truncate_after(state.step if resume_from is not None else -1)
    save_run_config(config, run_folder)

    # Train: step, evaluate, save.
    tracking.start_trackers(accelerator, config.tracking, config.run.name, dotted_keys(config))
    run = loop.Run(
        folder=run_folder,
        sharded=sharded,
        optimizer=optimizer,
        plan=plan,
        train_rows=rows.train,
        evaluation=evaluation,
        identity=identity,
        metrics=metrics,
        num_steps=num_steps,
    )
    loop.train(config, run, state)

    # Export, reload, compare; then show what came out.
    if config.export.weights == "best":
        metric = config.eval.best_metric
        best = checkpoint.best_of_run(run_folder, metric, higher_is_better=metric in loop.HIGHER_IS_BETTER)
        checkpoint.load_weights(best, sharded)
    export_model(sharded, evaluation, run_folder / "export", config.export.max_shard_size)
    show_results(run_folder, rows.train, evaluation.rows)
    distributed.print_rank0(f"exported to {run_folder / 'export'}")
    accelerator.end_training()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
