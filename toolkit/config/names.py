"""Names of our fields in other trainers (transformers' Seq2SeqTrainingArguments, TRL, axolotl, LLaMA-Factory, example scripts).

Spelling alone would mislead: `--report_to` means `tracking.log_with`, but is spelled more like `export`.
"""

from __future__ import annotations

from collections.abc import Collection

_NAMES = {
    "model.name_or_path": "model_name_or_path model_name base_model model_id pretrained_model_name_or_path",
    "model.revision": "model_revision base_model_revision",
    "model.attn_implementation": "flash_attention flash_attn use_flash_attention_2 use_flash_attn attention_implementation",
    "data.source": "dataset dataset_name dataset_path datasets",
    "data.files": "train_file train_files data_files",
    "data.chat_template": "chat_template_path",
    "data.eval_files": "validation_file test_file eval_file",
    "data.csv_delimiter": "delimiter sep separator",
    "data.encoding": "file_encoding",
    "data.hub_subset": "dataset_config_name dataset_config",
    "data.hub_split": "dataset_split dataset_train_split split",
    "data.source_column": "text_column dataset_text_field article_column",
    "data.text_column": "dataset_text_field",
    "data.target_column": "summary_column target_field",
    "data.prefix": "source_prefix",
    "data.source_language": "source_lang src_lang",
    "data.target_language": "target_lang tgt_lang forced_bos_token",
    "data.max_source_length_tokens": (
        "max_source_length max_input_length max_seq_length max_seq_len max_length model_max_length cutoff_len"
    ),
    "data.max_target_length_tokens": "max_target_length val_max_target_length",
    "data.max_length_tokens": "max_seq_length max_seq_len max_length model_max_length cutoff_len sequence_len block_size",
    "data.format": "dataset_type dataset_format chat_format formatting",
    "data.loss_on": (
        "train_on_inputs completion_only_loss assistant_only_loss train_on_prompt response_template instruction_template"
    ),
    "data.packing": "sample_packing packed",
    "data.num_rows": "max_train_samples max_samples",
    "data.eval_fraction": "val_set_size val_size test_size validation_split_percentage",
    "data.num_tokenizer_workers": "preprocessing_num_workers dataset_num_proc num_proc dataset_processes",
    "data.num_loader_workers": "dataloader_num_workers num_workers",
    "data.cache_dir": "dataset_prepared_path",
    "adapter.method": "use_peft use_lora peft_type finetuning_type use_dora use_rslora lora",
    "adapter.rank": "lora_r lora_rank r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target_modules": "lora_target_modules lora_target lora_attn_modules lora_target_linear",
    "adapter.modules_to_save": "lora_modules_to_save additional_target",
    "adapter.name_or_path": "lora_model_dir adapter_name_or_path peft_model_id",
    "train.micro_batch_size_rows": "per_device_train_batch_size micro_batch_size train_batch_size batch_size",
    "train.global_batch_size_rows": "global_batch_size",
    "train.num_epochs": "num_train_epochs epochs",
    "train.seed": "data_seed",
    "optim.lr": "learning_rate",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.schedule": "lr_scheduler_type lr_scheduler",
    "optim.warmup_steps": "num_warmup_steps",
    "optim.label_smoothing": "label_smoothing_factor",
    "optim.max_grad_norm": "gradient_clip_val clip_grad_norm",
    "eval.every_steps": "eval_steps evaluation_strategy eval_strategy",
    "eval.every_epochs": "evals_per_epoch",
    "eval.at_start": "eval_on_start",
    "eval.num_rows": "max_eval_samples max_val_samples val_max_samples max_predict_samples",
    "eval.batch_size_rows": "per_device_eval_batch_size eval_batch_size test_batch_size",
    "eval.generate": "predict_with_generate",
    "eval.num_beams": "generation_num_beams",
    "eval.max_new_tokens": "generation_max_length generation_max_new_tokens",
    "eval.best_metric": "metric_for_best_model",
    "eval.higher_is_better": "greater_is_better",
    "eval.early_stopping_patience": "patience early_stopping stop_after",
    "checkpoint.every_steps": "save_steps save_strategy",
    "checkpoint.every_epochs": "saves_per_epoch",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "export.weights": "load_best_model_at_end",
    "export.merge": "merge_and_unload",
    "tracking.log_with": "report_to use_wandb metric_logger",
    "tracking.project_name": "wandb_project project",
    "run.name": "run_name wandb_name",
    "run.timeout_s": "ddp_timeout",
    "log_every_steps": "logging_steps log_every_n_steps",
}

_VALUES = {
    "evaluation_strategy eval_strategy": "eval.every_epochs 1 for epoch",
    "save_strategy": "checkpoint.every_epochs 1 for epoch",
    "load_best_model_at_end": "best, with checkpoint.keep_best 1",
    "metric_for_best_model": "without eval_, as in rougeL",
    "report_to": "a list; not set for none",
    "lr_scheduler_type lr_scheduler": "cosine_with_min_lr is cosine with optim.min_lr_ratio",
    "warmup_steps": "a part of the run is optim.warmup_ratio",
    "cache_dir": "of tokenized rows; HF_HOME has the models",
    "completion_only_loss assistant_only_loss train_on_inputs response_template": "completions, or all for every token",
    "use_peft": "lora",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "lora_target_linear": "all-linear",
    "flash_attention flash_attn use_flash_attention_2 use_flash_attn": "flash_attention_2",
    "resume_from_checkpoint auto_resume_from_checkpoints": "only for a certain checkpoint; the same command resumes",
}
"""What to write for a field of another name, where the value is another one too."""

_PRECISION = "the precision is mixed_precision of the accelerate YAML"
_SHARDING = "sharding is in the accelerate YAML, see accelerate_configs/README.md"
_ELSEWHERE = {
    "bf16 fp16 fp8 torch_dtype dtype mixed_precision bf16_full_eval fp16_full_eval use_fp16": _PRECISION,
    (
        "fsdp fsdp_config fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params sharding_strategy accelerator_config "
        "tensor_parallel_size parallelism_config transformer_auto_wrap_policy auto_wrap_policy limit_all_gathers fsdp_cpu_offload"
    ): _SHARDING,
    "tf32": "products in fp32 stay so; bf16 is mixed_precision of the accelerate YAML",
    "deepspeed": f"DeepSpeed is not used, models are sharded by FSDP: {_SHARDING}",
    (
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs "
        "enable_activation_checkpointing fsdp_activation_checkpointing"
    ): "it is fsdp_activation_checkpointing, in fsdp_config of the accelerate YAML",
    "gradient_accumulation_steps": (
        "it follows from train.global_batch_size_rows, train.micro_batch_size_rows and the number of processes"
    ),
    "num_processes num_gpus nproc_per_node local_rank use_cpu no_cuda device": "processes and devices are in the accelerate YAML",
    "torch_compile torch_compile_backend torch_compile_mode compile": (
        "it is dynamo_config of the accelerate YAML, with dynamo_use_regional_compilation: true"
    ),
    "load_in_4bit load_in_8bit quantization_bit quantization_config bnb_4bit_quant_type bnb_4bit_compute_dtype": (
        "the base is not quantized; model.frozen_dtype says what it is stored in"
    ),
    "tokenizer_name tokenizer_name_or_path tokenizer processing_class use_fast use_fast_tokenizer config_name": (
        "tokenizer and config are those of the folder model.name_or_path"
    ),
    "token use_auth_token": "log in by `hf auth login`, or set HF_TOKEN",
    "resize_position_embeddings": "positions are not resized; a model with too few for the rows is refused",
    "lang": "data.source_language and data.target_language are for translation models",
    "overwrite_cache": "the cache is built again whenever rows, tokenizer or settings have changed",
    "pad_to_max_length padding": "a micro-batch is padded to its longest row",
    "truncation truncation_mode": "longer rows are cut at their end, and what is lost is printed",
    "ignore_pad_token_for_loss label_pad_token_id": "padding never counts in the loss",
    "train_dataset": "data.files or data.source; finetune(train=...) takes a datasets.Dataset",
    "eval_dataset": "data.eval_files or data.eval_fraction; finetune(evaluation=...) takes a datasets.Dataset",
    "dataset_test_split": "data.eval_fraction holds rows out; data.eval_files names files of others",
    "dataset_streaming streaming": "rows are tokenized once, into a cache on disk",
    "data_collator formatting_func preprocess_function": (
        "batches are made here; rows of your own making come from data.source my_rows.py:load_rows"
    ),
    "compute_metrics": "ROUGE is computed; eval.metrics names others, finetune(metrics=...) takes functions",
    "callbacks": "finetune(after_step=..., after_evaluation=...) takes functions, see docs/python_api.md",
    "early_stopping_threshold": "every gain counts; eval.early_stopping_patience is the one setting",
    "peft_config bias task_type lora_task_type init_lora_weights lora_bias": (
        "the section adapter has all settings; biases and the base stay frozen"
    ),
    "length_penalty repetition_penalty do_sample temperature top_k top_p": (
        "texts are generated greedily or by beams; penalties are those of the model's generation_config.json"
    ),
    "save_safetensors": "weights are always safetensors",
    "logging_dir": "TensorBoard and wandb write into the run folder",
    "do_train do_eval do_predict": "a run trains and evaluates; with train.max_steps 0 it only evaluates",
    "overwrite_output_dir": "nothing is overwritten; take another run.name",
    "push_to_hub hub_model_id hub_token hub_private_repo hub_strategy hub_always_push hub_revision": (
        "nothing is uploaded; the run's export/ is a folder that the hub takes"
    ),
    "optim optim_args optim_target_modules optimizer optimizers": "the optimizer is AdamW; the section optim has its settings",
    "lr_scheduler_kwargs lr_scheduler_args": "all settings of a schedule are in the section optim",
    "average_tokens_across_devices num_items_in_batch": "the loss is always divided by the label tokens of the global batch",
    "include_num_input_tokens_seen include_tokens_per_second": "metrics.jsonl has the tokens of every step, and its time",
    "use_liger_kernel liger_kernel_config use_liger": "the loss is computed in chunks already",
    "use_cache": "training has no key-value cache, generation has one",
    "neftune_noise_alpha": "no noise is added to embeddings; model.dropout sets the model's own rates",
    "torch_empty_cache_steps": "the allocator's segments grow on CUDA, so that its cache needs no emptying",
    "auto_find_batch_size": "`python -m toolkit plan` predicts the largest micro-batch before the run",
    "logging_strategy logging_first_step log_peak_memory_stats track_memory": (
        "metrics.jsonl has every step, with its peak memory; log_every_steps says how often it is written"
    ),
    "log_on_each_node log_level log_level_replica debug": "rank 0 prints, at the level of the environment's TOOLKIT_LOG_LEVEL",
    "logging_nan_inf_filter": "an update with a loss that is not finite is skipped, see optim.max_skipped_steps",
    "disable_tqdm": "there is a bar on a terminal only, and lines elsewhere",
    "trackio_space_id trackio_bucket_id trackio_static_space_id": "set it as the tracker's own environment variable",
    "eval_delay": "the first evaluation is after eval.every_steps; eval.at_start adds one before the first step",
    "prediction_loss_only run_validation": "an evaluation computes the loss, and texts if eval.generate is true",
    (
        "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "preprocess_logits_for_metrics"
    ): ("an evaluation keeps sums and texts, never logits"),
    "loss loss_fn loss_type compute_loss_func": "the loss is cross-entropy; finetune(loss=...) takes one of your own",
    "max_steps_per_epoch": "an epoch has every row once; data.num_rows limits the rows, train.max_steps the run",
    "save_adapter_weights_only": "checkpoints and export of an adapter never have the base",
    "save_only_model save_model model_save_name": "checkpoints can be resumed; the model alone is in export/",
    "save_on_each_node": "checkpoints need a folder that all machines share",
    "enable_jit_checkpoint": "a signal saves after the step that is under way",
    "ignore_data_skip restore_callback_states_from_checkpoint": "a resume goes on with the next rows of the batch plan",
    "full_determinism": "a run is the same again on a CPU; kernels of a GPU may add in another order",
    "dataloader_drop_last": "no row is dropped: an epoch has every row once",
    (
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order"
    ): "batches come in order, pinned on a GPU; data.num_loader_workers is the one setting",
    "remove_unused_columns remove_columns label_names dataset_kwargs": (
        "columns are chosen by the section data; others are not read"
    ),
    "group_by_length length_column_name sortish_sampler train_sampling_strategy shuffle_dataset shuffle": (
        "rows of similar length share a step of an encoder-decoder; data.bucket_by_length decides it for a causal model"
    ),
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend": (
        "DDP has nothing to set; its backend is nccl on GPUs and gloo on CPUs"
    ),
    "skip_memory_metrics": "memory.json in the run folder has the memory of the steps",
    "generation_config": "eval.max_new_tokens, eval.num_beams and eval.no_repeat_ngram_size are the settings of generation",
    "packing_strategy eval_packing padding_free pad_to_multiple_of pad_to_sequence_len": (
        "data.packing packs rows of a step without padding; evaluations are not packed"
    ),
    "pad_token eos_token special_tokens": "the tokenizer's own tokens are used; change its tokenizer_config.json",
    "model_init_kwargs model_init": "the section model has the settings of loading",
    "activation_offloading": "activations stay on the device; fsdp_activation_checkpointing recomputes them",
}


def find_by_meaning(name: str, fields: Collection[str]) -> list[str]:
    """The `fields` (dotted keys) that another trainer calls `name`."""
    plain = name.lower().replace("-", "_")
    return [field for field, names in _NAMES.items() if field in fields and plain in names.split()]


def say_value(name: str) -> str:
    """What to write for the field that another trainer calls `name`, in brackets; empty if its value is the same there."""
    return next((f" ({value})" for names, value in _VALUES.items() if name.lower().replace("-", "_") in names.split()), "")


def say_elsewhere(name: str) -> str | None:
    """A sentence that says where to set something that is not a field; None if `name` is unknown."""
    plain = name.lower().replace("-", "_")
    return next((where for names, where in _ELSEWHERE.items() if plain in names.split()), None)
