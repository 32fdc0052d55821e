"""Names of settings in torch, Lightning, Hugging Face, DeepSpeed, Megatron, MaxText and torchtitan, and their fields
here.

Their names and values are not accepted, since they may count something else; the error gives the field here, or says
that there is none.
"""

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from jaxdist.config.errors import shown
from jaxdist.config.registry import FAMILIES

# Field, or flag without a field -> other names of it, whose values are the same.
SAME = {
    "train.steps": "max_steps num_steps n_steps total_steps train_steps training_steps num_train_steps max_train_steps "
    "max_iters train_iters num_iterations iterations",
    "train.epochs": "epoch num_epochs n_epochs max_epochs num_train_epochs",
    "train.accumulation": "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps "
    "accumulate_grad_batches accumulation_steps accum_steps num_microbatches",
    "train.seed": "random_seed manual_seed data_seed data_shuffle_seed init_weights_seed",
    "train.validation_batches": "eval_iters limit_val_batches",
    "optimizer.name": "optim optimizer optimizer_type opt opt_type rule update_rule optimizer_name optimizer_class",
    "optimizer.learning_rate": "lr max_lr base_lr peak_lr max_learning_rate peak_learning_rate",
    "optimizer.warmup": "warmup_steps warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "optimizer.decay": "lr_scheduler lr_scheduler_type scheduler scheduler_type lr_schedule lr_decay_style decay_type",
    "optimizer.decay_steps": "lr_decay_iters lr_decay_steps learning_rate_schedule_steps",
    "optimizer.final": "min_lr_ratio min_lr_factor lr_min_ratio cosine_learning_rate_final_fraction",
    "optimizer.clip": "max_grad_norm max_norm grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping "
    "gradient_clipping_threshold",
    "optimizer.weight_decay": "wd adam_weight_decay",
    "optimizer.beta1": "adam_beta1 adam_b1 b1",
    "optimizer.beta2": "adam_beta2 adam_b2 b2",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "optimizer.momentum": "sgd_momentum",
    "optimizer.ema": "ema_decay",
    "data.path": "data dataset dataset_path data_path data_dir train_data train_file input_path",
    "data.tokenizer": "tokenizer_path tokenizer_file tokenizer_model tokenizer_name",
    "data.sequence": "seq_len seq_length seqlen sequence_length max_seq_len max_seq_length max_length block_size "
    "context_length max_target_length train_seq_len",
    "data.text_field": "dataset_text_field text_column text_key",
    "data.validation": "val_split validation_split val_fraction eval_fraction",
    "data.shuffle": "shuffle_data",
    "parallel.strategy": "sharding_strategy fsdp_sharding_strategy fsdp zero zero_stage stage distributed_strategy",
    "parallel.bucket_mb": "bucket_cap_mb ddp_bucket_cap_mb",
    "parallel.overlap": "overlap_comm overlap_grad_reduce",
    "parallel.pipeline_schedule": "pipeline_parallel_schedule pp_schedule",
    "precision.policy": "mixed_precision dtype torch_dtype amp_dtype",
    "precision.compute": "compute_dtype mixed_precision_param param_dtype",
    "precision.reduce": "reduce_dtype mixed_precision_reduce",
    "precision.loss_scale": "initial_loss_scale init_scale",
    "precision.growth_interval": "loss_scale_window",
    "memory.remat": "remat_policy activation_checkpoint_mode ac_mode recompute_granularity",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval checkpoint_period checkpointing_steps "
    "every_n_train_steps",
    "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep",
    "model.family": "model_type arch architecture",
    "model.layers": "num_layers num_hidden_layers n_layer n_layers base_num_decoder_layers",
    "model.dim": "hidden_size d_model n_embd embed_dim emb_dim base_emb_dim",
    "model.heads": "num_heads num_attention_heads n_head n_heads num_query_heads base_num_query_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_kv_heads base_num_kv_heads num_query_groups",
    "model.head_dim": "head_size kv_channels d_head",
    "model.hidden": "intermediate_size ffn_hidden_size mlp_dim base_mlp_dim d_ff ffn_dim n_inner",
    "model.vocab": "vocab_size n_vocab padded_vocab_size",
    "model.positions": "max_position_embeddings n_positions",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon normalization_layer_epsilon",
    "model.init_std": "initializer_range",
    "model.rope_theta": "rope_base rotary_base rope_max_timescale",
    "model.tied": "tie_word_embeddings tie_embeddings weight_tying logits_via_embedding",
    "model.window": "sliding_window",
    "model.qkv_bias": "attention_bias",
    "model.experts": "num_experts num_local_experts n_experts num_moe_experts",
    "model.top_k": "num_experts_per_tok experts_per_token moe_router_topk",
    "model.balance": "router_aux_loss_coef load_balance_loss_weight moe_aux_loss_coeff",
    "model.capacity": "capacity_factor moe_expert_capacity_factor",
    "config": "config_file config_path cfg",
    "output": "output_dir out_dir save_dir save_folder dump_folder run_dir default_root_dir base_output_directory",
    "init": "model_name_or_path init_from load_parameters_path pretrained",
}

# Field -> (other names, whose values count something else; what it counts here).
OTHERWISE = {
    "train.batch": (
        "batch_size global_batch_size train_batch_size total_batch_size bs per_device_train_batch_size "
        "per_device_batch_size micro_batch_size local_batch_size device_batch_size train_micro_batch_size_per_gpu",
        "in sequences, over all devices and microbatches",
    ),
    "optimizer.warmup": ("warmup_ratio warmup_steps_fraction lr_warmup_fraction", "in steps"),
    "optimizer.final": ("min_lr eta_min lr_min", "as a share of the peak"),
    "optimizer.beta1": ("betas adam_betas", "the first of the two; the second is optimizer.beta2"),
}

LEFT = "where fsdp is the devices that are left; if none are, leave it out and add --strategy ddp"

# (Field or flag, what its value is here, with the value there in place of {}; what to know of it) -> names elsewhere.
TEMPLATES = {
    ("parallel.mesh", "tensor={}"): "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size ici_tensor_parallelism",
    ("parallel.mesh", "pipeline={}"): "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size ici_pipeline_parallelism",
    ("parallel.mesh", "context={}"): "cp cp_size context_parallel context_parallel_size context_parallel_degree "
    "ici_context_parallelism",
    ("parallel.mesh", "expert={}"): "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size ici_expert_parallelism",
    ("parallel.mesh", "fsdp={}"): "fsdp_size dp_shard data_parallel_shard_degree ici_fsdp_parallelism",
    ("parallel.mesh", "data={},fsdp=-1", LEFT): "dp_replicate data_parallel_replicate_degree ici_data_parallelism",
    ("parallel.mesh", "{}x1"): "dp dp_size data_parallel data_parallel_size gpus num_gpus devices num_devices "
    "nproc_per_node world_size",
    ("parallel.sequence", "true"): "sequence_parallel enable_sequence_parallel",
    ("precision.policy", "bf16"): "bf16 bfloat16",
    ("precision.policy", "fp16"): "fp16 half amp",
    ("precision.policy", "fp32"): "fp32",
    ("precision.policy", "fp64"): "fp64",
    ("memory.remat", "full"): "gradient_checkpointing activation_checkpointing activation_checkpoint recompute "
    "recompute_activations",
    ("memory.offload", "optimizer"): "offload_optimizer optimizer_offload optimizer_memory_host_offload",
    ("memory.offload", "optimizer,parameters"): "cpu_offload fsdp_offload_params enable_cpu_offload",
    ("train.compile", "true"): "torch_compile use_compile",
    ("metrics.tensorboard", "true"): "use_tensorboard enable_tensorboard",
    ("data.last", "drop"): "drop_last dataloader_drop_last",
    ("data.documents", "packed"): "packing pack",
    ("resume", ""): "resume_from_checkpoint ckpt_path resume_from load_checkpoint auto_resume",
}

# Field of TEMPLATES -> its value where another's flag or key is set to one of NO.
OFF = {
    "parallel.sequence": "false", "precision.policy": "fp32", "memory.remat": "none", "train.compile": "false",
    "metrics.tensorboard": "false", "data.last": "continue", "data.documents": "padded",
}  # fmt: skip
NO = ("false", "no", "none", "off", "0")

# Why there is nothing of this kind here, and what to do about it -> names elsewhere.
NOT_HERE = {
    "jaxdist trains without dropout; leave it out": "dropout dropout_rate attn_dropout attention_dropout "
    "hidden_dropout embd_dropout attn_pdrop resid_pdrop embd_pdrop lora_dropout",
    "every step is logged in metrics.jsonl; leave it out": "logging_steps log_every_n_steps log_interval log_freq "
    "log_every log_period logging_strategy logging_dir",
    "steps are logged in metrics.jsonl, and by --metrics.tensorboard true for TensorBoard; leave it out": "report_to "
    "log_with logger wandb use_wandb wandb_project wandb_log wandb_run_name enable_wandb mlflow",
    "data are read by no worker processes; leave it out": "num_workers workers dataloader_num_workers num_proc "
    "preprocessing_num_workers dataloader_pin_memory pin_memory",
    "kernels cannot be chosen; leave it out": "attn_implementation attention_implementation attention_impl "
    "attention_backend flash_attn use_flash_attn use_flash_attention use_flash_attention_2",
    "validation runs after the last step; python -m jaxdist.evaluate evaluates any checkpoint; leave it out": ""
    "do_eval eval_steps eval_interval eval_every eval_strategy evaluation_strategy val_check_interval "
    "check_val_every_n_epoch",
    "this command always trains; leave it out": "do_train",
    "--strategy, --precision and --memory.offload set what its file does": "deepspeed deepspeed_config "
    "accelerate_config fsdp_version",
    "the launcher sets it; leave it out": "num_nodes nnodes node_rank local_rank rank master_addr master_port "
    "rdzv_endpoint ddp_backend",
    "Adam is without AMSGrad, which keeps the greatest second moment; leave it out": "amsgrad use_amsgrad",
    "momentum is without dampening; leave it out": "dampening",
    "an update's implementation cannot be chosen; leave it out": "foreach capturable differentiable fused",
    "code in a folder is never executed; leave it out": "trust_remote_code",
    "--device auto, cpu or gpu chooses the devices": "accelerator device_type use_cpu no_cuda",
    "a run is named by its folder, --output; leave it out": "run_name exp_name experiment_name project project_name "
    "wandb_name",
    "nothing is downloaded: --data.path takes a file or folder that is there": "dataset_name dataset_config_name "
    "hf_dataset",
    "--init starts from the weights of a checkpoint, --resume continues its run": "checkpoint ckpt load load_from",
    "a run folder is never overwritten: give another --output, or --resume it": "overwrite_output_dir overwrite",
    "the loss is the cross-entropy of the next token; leave it out": "label_smoothing label_smoothing_factor z_loss "
    "z_loss_weight",
    "all parameters are trained, none quantized; leave it out": "load_in_8bit load_in_4bit use_peft use_lora lora_r "
    "lora_rank lora_alpha",
    "all sequences have data.sequence tokens; leave it out": "group_by_length length_column_name",
    "products of float32 are never computed in TF32; leave it out": "tf32 allow_tf32 matmul_precision "
    "float32_matmul_precision",
    "--config takes a model by its name or its folder, --init its weights too": "model model_name model_config",
}

# Mesh axis -> its names elsewhere.
AXES = {
    "data": "dp replica replicate dp_replicate batch",
    "fsdp": "dp_shard shard zero data_shard",
    "tensor": "tp mp model mdl tensor_parallel",
    "pipeline": "pp pipe stage stages",
    "context": "cp seq sequence",
    "expert": "ep experts",
}

DTYPES = {"float32": "fp32 float 32", "bfloat16": "bf16", "float16": "fp16 half 16"}

# Field -> its value here -> what others call it. A family's names elsewhere are `aliases` of its row.
VALUES = {
    "parallel.strategy": {
        "fsdp": "full_shard full_shard_auto_wrap full_shard_offload fully_shard fsdp1 fsdp2 hybrid_shard "
        "hybrid_shard_auto_wrap hsdp zero3 zero_3 stage3 stage_3 3 deepspeed_stage_3 deepspeed_stage_3_offload",
        "zero2": "shard_grad_op shard_grad_op_auto_wrap _hybrid_shard_zero2 zero_2 stage2 stage_2 2 deepspeed_stage_2 "
        "deepspeed_stage_2_offload",
        "zero1": "zero_1 stage1 stage_1 1 deepspeed_stage_1 zero zero_redundancy_optimizer distributed_optimizer",
        "ddp": "no_shard zero0 zero_0 stage0 stage_0 0 dp data_parallel replicate distributed_data_parallel "
        "ddp_find_unused_parameters_true ddp_find_unused_parameters_false none",
    },
    "precision.policy": {
        "bf16": "bfloat16 amp_bf16 mixed_bf16 bf16_mixed_precision mixed_bfloat16",
        "fp16": "float16 half amp amp_fp16 16 mixed_float16",
        "fp32": "float32 float single full no 32",
        "fp64": "float64 double 64",
        "bf16-true": "bf16_true pure_bf16",
    },
    "precision.parameters": DTYPES,
    "precision.compute": DTYPES,
    "precision.reduce": DTYPES,
    "optimizer.name": {
        "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adam_w adam_pax fused_adamw",
        "adam": "adam_torch fused_adam",
        "sgd": "momentum sgd_momentum",
        "lion": "lion_32bit",
    },
    "optimizer.decay": {
        "cosine": "cosine_with_min_lr cosine_annealing cosineannealinglr cosine_decay warmup_cosine",
        "linear": "linear_decay warmup_linear linear_with_warmup linearlr",
        "constant": "constant_with_warmup none constantlr",
    },
    "memory.remat": {
        "full": "true on always 1",
        "selective": "minimal checkpoint_dots dots_saveable save_dot_except_mlp op",
        "none": "false off no never 0",
    },
    "parallel.context": {"ring": "ring_attention p2p", "ulysses": "a2a all_to_all alltoall deepspeed_ulysses"},
    "parallel.batch_norm": {"global": "sync syncbn sync_batch_norm", "replica": "local"},
    "data.documents": {"packed": "pack packing concat concatenated true", "padded": "pad padding false"},
    "data.bin_dtype": {
        "uint16": "u2 <u2 u16 np.uint16 numpy.uint16 uint16_t",
        "uint32": "u4 <u4 u32 np.uint32 numpy.uint32 uint32_t",
        "int32": "i4 <i4 i32 np.int32 numpy.int32 int32_t int",
        "int64": "i8 <i8 i64 np.int64 numpy.int64 int64_t long",
    },
    "data.last": {"drop": "drop_last true"},
    "model.gelu": {"tanh": "gelu_new gelu_pytorch_tanh gelu_tanh gelu_fast", "exact": "gelu none erf"},
    "checkpoint.failure": {"go on": "go_on continue ignore", "stop": "raise abort"},
}

# Field -> what else belongs to a value -> what others call that value.
ALONG = {
    "parallel.strategy": {
        "with --mesh data=R,fsdp=N for R replicas of N shards": "hybrid_shard hybrid_shard_auto_wrap hsdp "
        "_hybrid_shard_zero2",
    },
}

SECTIONS = {
    "train": "training trainer training_args",
    "optimizer": "optim optimization lr_scheduler",
    "parallel": "parallelism distributed fsdp fsdp_config",
    "precision": "mixed_precision amp",
    "data": "dataset dataloader",
    "memory": "activation_checkpoint",
    "checkpoint": "checkpointing",
    "model": "model_args architecture",
}

FLAG = re.compile(r"--[a-z]+(?:\.[a-z_]+)?")


class Meaning(NamedTuple):
    """Our meaning of a name: a field or flag, its value ({}: the given one), and what it counts."""

    field: str
    value: str = "{}"
    counts: str = ""


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    return {word: ours for ours, words in table.items() for word in words.split()}


NAMES: dict[str, Meaning] = {
    **{word: Meaning(field) for word, field in _by_word(SAME).items()},
    **{word: Meaning(field, counts=here) for field, (words, here) in OTHERWISE.items() for word in words.split()},
    **{word: Meaning(*meaning) for meaning, words in TEMPLATES.items() for word in words.split()},
}
NOT_HERE_NAMES = _by_word(NOT_HERE)
AXIS_NAMES = _by_word(AXES)
SECTION_NAMES = _by_word(SECTIONS)
VALUE_NAMES = {field: _by_word(table) for field, table in VALUES.items()}
ALONG_NAMES = {field: _by_word(table) for field, table in ALONG.items()}
FAMILY = "model.family"


def plain(name: Any) -> str:
    """A name or value as the tables have it."""
    return str(name).lower().replace("-", "_").replace(" ", "_")


def value_here(field: str, value: Any) -> str | None:
    """Our value in `field` for another trainer's `value`, or for ours in another spelling; None if unknown."""
    word, known = plain(value), value_names(field)
    return known.get(word) or next((ours for ours in known.values() if plain(ours) == word), None)


def value_names(field: str) -> Mapping[str, str]:
    """Names of the values of `field` in other programs -> our value."""
    if field != FAMILY:
        return VALUE_NAMES.get(field, {})
    return {word: name for name, row in FAMILIES.items() for words in row.aliases for word in words.split()}


def related_fields(field: str) -> Mapping[str, str]:
    """Names of the values of `field` in other programs -> what else to set for these."""
    if field != FAMILY:
        return ALONG_NAMES.get(field, {})
    rows = FAMILIES.values()
    return {word: more for row in rows for words, more in row.aliases.items() if more for word in words.split()}


def _along(field: str, value: Any, *counts: str) -> str:
    """Further text on another trainer's `value` of `field`: what the field counts, and related fields."""
    return "".join(f", {more}" for more in (*counts, related_fields(field).get(plain(value))) if more)


def value_hint(field: str, value: Any, choices: Iterable[str] = ()) -> str | None:
    """A sentence with the value here of another's `value`, or of one of the field's `choices` in another spelling."""
    here = value_here(field, value) or next((choice for choice in choices if plain(choice) == plain(value)), None)
    return f"{shown(value)} is {here!r} here{_along(field, value)}" if here else None


def flag_here(flag: str, value: str | None, known: Container[str], shortcuts: Mapping[str, str]) -> str | None:
    """A sentence that gives the flag here for an unknown `flag`, as --lr; None where there is none.

    `value`: its argument. `known`: flags of the command; `shortcuts`: their short names -> fields.
    """
    name = plain(flag.lstrip("-"))
    last = name.rpartition(".")[2]
    meaning = NAMES.get(name) or NAMES.get(last)
    if meaning is None:
        why = NOT_HERE_NAMES.get(name) or NOT_HERE_NAMES.get(last)
        return why if why and all(flag in known for flag in FLAG.findall(why)) else None
    short = [f"--{short}" for short, field in shortcuts.items() if field == meaning.field]
    candidates = (*short, f"--{meaning.field}", f"--{meaning.field.rpartition('.')[2]}")
    if (ours := next((candidate for candidate in candidates if candidate in known), None)) is None:
        return None
    if (ours_value := _value(meaning, value)) is None:
        return "leave it out"
    theirs = f"{flag} {value or 'N'}" if ours_value not in ("", meaning.value) else flag
    return f"{theirs} is {f'{ours} {ours_value}'.rstrip()} here{_along(meaning.field, value, meaning.counts)}"


def field_here(name: str, value: Any) -> str | None:
    """The field here for a key in a config, as a line of TOML where the value differs; see `flag_here`."""
    meaning = NAMES.get(plain(name))
    if meaning is None:
        return NOT_HERE_NAMES.get(plain(name))
    if "." not in meaning.field:
        return None
    if (ours_value := _value(meaning, value)) is None:
        return "leave it out"
    ours = f"{meaning.field} = {_toml(ours_value)}" if ours_value else meaning.field
    return f"{name} is {ours} here{_along(meaning.field, value, meaning.counts)}"


def _value(meaning: Meaning, value: Any) -> str | None:
    """The `value` (None: not given) of another program in the field of `meaning`; "" where it is the same, None where
    it turns off something that nothing here turns on."""
    if meaning.value == "{}":
        return value_here(meaning.field, value) or ""
    if "{}" not in meaning.value and value is not None and plain(value) in NO:
        off = OFF.get(meaning.field)
        return None if off == meaning.value else off
    return meaning.value.format(value or "N")


def _toml(value: str) -> str:
    return value if value in ("true", "false") else f'"{value}"'
