"""Fine-tune a causal language model (Llama, Qwen, Gemma, …), fully or with an adapter, sharded as the accelerate YAML says.

accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/llm.py --config recipes/configs/llm_stdlib.yaml
"""

import logging
from typing import Final

from toolkit.config.load import dotted_keys, load_config
from toolkit.config.schema import LLMConfig
from toolkit.errors import exit_on_user_error
from toolkit.launch.log import start_logging

logger = logging.getLogger("toolkit")

CAUSAL: Final = "AutoModelForCausalLM"


def main() -> None:
    config = load_config(LLMConfig, description=__doc__)

    # These imports take seconds, so a wrong flag has been reported before them.
    from toolkit.data.batch_plan import BatchPlan, Mix
    from toolkit.data.collate import CausalCollator
    from toolkit.data.tokens.prepare import prepare_rows
    from toolkit.distributed.comm import world_size
    from toolkit.evaluation.rows import EvaluationRows, choose_rows, name_sources
    from toolkit.launch.run_folder import save_run_config
    from toolkit.models.config import check_causal_positions
    from toolkit.models.load import num_token_embeddings, uses_flash_attention
    from toolkit.parallel.units import describe
    from toolkit.parallel.wrap import shard_model
    from toolkit.tracking.trackers import start_trackers
    from toolkit.training import setup
    from toolkit.training.after_step import Run
    from toolkit.training.loop import train
    from toolkit.training.model_checks import check_causal_model
    from toolkit.training.optim import build_optimizer
    from toolkit.training.setup import begin, build_skeleton, check_rows, finish, identity_of, load_model, open_metrics, resume

    context = begin(config)
    accelerator, run_folder = context.accelerator, context.run_folder

    # The model on the meta device: what is wrong with it is reported before data and weights load.
    model_config, skeleton = build_skeleton(config, accelerator, CAUSAL)

    # Rows: text → tokens on disk → the batch plan (which rows each step takes) and the evaluation split.
    rows = prepare_rows(config.data, config.model, num_token_embeddings(skeleton))
    num_tokens, num_label_tokens = (rows.train.with_format("numpy")[name][:] for name in ("num_tokens", "num_label_tokens"))
    weights = tuple(entry.weight for entry in config.data.mix)
    mix = Mix(rows.train.with_format("numpy")["source_index"][:], weights) if weights else None
    plan = BatchPlan(
        num_tokens=num_tokens,
        num_label_tokens=num_label_tokens,
        train=config.train,
        world_size=world_size(),
        bucket_by_length=not config.data.packing if config.data.bucket_by_length is None else config.data.bucket_by_length,
        pack_length_tokens=config.data.max_length_tokens if config.data.packing else None,
        mix=mix,
    )
    evaluation = EvaluationRows(
        rows=choose_rows(rows.evaluation, config.eval.num_rows),
        tokenizer=rows.tokenizer,
        collator=CausalCollator(rows.tokenizer.pad_token_id, one_row=uses_flash_attention(skeleton)),
        stop_token_ids=rows.stop_token_ids,
        source_names=name_sources(config.data),
        metrics=context.metrics,
    )
    longest = {
        name: setup.longest(rows, evaluation, column) for name, column in (("row", "num_tokens"), ("prompt", "prompt_length"))
    }
    check_causal_positions(model_config, config.model.name_or_path, longest, config.eval)
    num_steps = check_rows(config, rows, plan, evaluation)

    # Model → frozen or adapted → shards → optimizer. Under FSDP2, `sources` says where each rank reads its shards.
    model, sources = load_model(config, context, CAUSAL, model_config, skeleton)
    identity = identity_of(context, model_config, rows, model, sources)
    sharded = shard_model(accelerator, model, sources)
    optimizer = build_optimizer(config.optim, sharded.model)
    logger.info(describe(sharded.units))
    check_causal_model(sharded, evaluation.collator, packing=config.data.packing)

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
