"""The arguments that Megatron-LM saves with a checkpoint, as our configuration, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from megapipe.config import KINDS, Config, ModelConfig
from megapipe.config.model.mla import MLAConfig
from megapipe.config.typed import unfit
from megapipe.convert.megatron import experts
from megapipe.convert.megatron.pickles import Named
from megapipe.convert.sound import number_problems
from megapipe.errors import CheckpointError

Args = Mapping[str, Any]
_LATENTS, _MLA = "multi_latent_attention", tuple(MLAConfig.__dataclass_fields__)


# Fields that Megatron-LM calls the same and means the same by: all that decides numbers, but what it says in other
# words (`args_of`) or has not, and some that decide none.
_MODEL = """
mtp_num_layers mtp_loss_scaling_factor num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels
group_query_attention num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent
rotary_interleaved use_rope_scaling rope_scaling_factor normalization swiglu quick_geglu squared_relu add_qkv_bias
qk_layernorm untie_embeddings_and_output_weights init_method_std init_method_xavier_uniform embedding_init_method_std
attention_dropout hidden_dropout padded_vocab_size make_vocab_size_divisible_by
"""
_RUN = """
micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule seq_length train_iters train_samples seed
calculate_per_token_loss bf16 fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
grad_reduce_in_bf16 optimizer lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_decay_iters lr_decay_samples
lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters
lr_wsd_decay_samples weight_decay weight_decay_incr_style start_weight_decay end_weight_decay clip_grad adam_beta1
adam_beta2 adam_eps sgd_momentum muon_momentum muon_nesterov muon_num_ns_steps muon_coefficient_type muon_scale_mode
muon_extra_scale_factor
tokenizer_type tokenizer_model vocab_file merge_file vocab_size null_tokenizer_eod_id tiktoken_pattern
tokenizer_hf_no_include_special_tokens tiktoken_num_special_tokens data_path data_args_path train_data_path
valid_data_path test_data_path per_split_data_args_path split mock_data dataloader_type eod_mask_loss
reset_position_ids reset_attention_mask eval_iters eval_interval
"""

# What would be another model here, if it has a value but these.
_OTHER = (
    "mtp_use_repeated_layer mtp_detach_heads mtp_hsm fp8 fp4 is_hybrid_model hybrid_layer_pattern "
    "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json experimental_attention_variant "
    "linear_attention_freq softmax_type attention_output_gate qk_l2_norm window_attn_skip_freq no_rope_freq "
    "rotary_seq_len_interpolation_factor apply_residual_connection_post_layernorm activation_func_clamp_value "
    "glu_linear_offset use_mup enable_mhc_connections moe_latent_size moe_apply_probs_on_input "
    "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size moe_router_topk_limited_devices "
    "softmax_scale rotary_base_per_layer head_wise_attn_gate"
)
_USUAL: dict[str, Any] = {"softmax_type": "vanilla", "rotary_seq_len_interpolation_factor": 1}


def config_of(args: Args, name: str) -> Config:
    """Architecture, training and data flags of a run of Megatron-LM.

    Args:
        name: of the checkpoint.
    Raises: CheckpointError naming every argument that is missing or means a model that is not here.
    """
    other = [key for key in _OTHER.split() if args.get(key) and args[key] != _USUAL.get(key)]
    problems = [f"--{key.replace('_', '-')} {_shown(args[key])} is not supported" for key in other]
    needed = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size")
    problems += [f"its arguments have no {key}" for key in needed if not isinstance(args.get(key), int)]
    model = _taken(args, _MODEL.split()) | experts.taken(args) | _latents(args)
    if args.get("use_rotary_position_embeddings"):
        model["position_embedding_type"] = "rope"
    kinds = ("learned_absolute", "rope", "none")
    if (kind := model.get("position_embedding_type", kinds[0])) not in kinds:
        problems.append(f"--position-embedding-type {_shown(kind)} is not supported")
    if problems:
        raise CheckpointError([f"{name}: {problem}" for problem in problems])
    if not model.get("group_query_attention"):
        model.pop("num_query_groups", None)
    model |= {
        "max_position_embeddings": model.get("max_position_embeddings") or args.get("seq_length"),
        "norm_epsilon": args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5)),
        "apply_layernorm_1p": bool(args.get("layernorm_zero_centered_gamma") or args.get("apply_layernorm_1p")),
        "disable_bias_linear": not args.get("add_bias_linear", True),
        "no_bias_gelu_fusion": not args.get("bias_gelu_fusion", True),
    }
    if (window := args.get("window_size")) is not None:
        model["window_size"] = ",".join(map(str, window))
    left = set(left_out(args))
    if args.get("weight_decay_incr_style") in (None, "constant"):  # Megatron-LM fills in both ends
        left |= {"start_weight_decay", "end_weight_decay"}
    if args.get("step_batch_size_schedule"):
        left.add("global_batch_size")
    run = _taken(args, [key for key in _RUN.split() if key not in left]) | {
        "muon_no_split_qkv": not args.get("muon_split_qkv", True),
        "no_data_sharding": not args.get("data_sharding", True),
    }
    if wrong := [f"{name}: its argument {text}" for text in unfit(KINDS, model | run)]:
        raise CheckpointError(wrong)
    if outside := number_problems(ModelConfig(**model)):
        raise CheckpointError([f"{name}: its arguments, as flags: {problem}" for problem in outside])
    return Config().with_fields(**model, **run)


def left_out(args: Args) -> list[str]:
    """Arguments of training and data with a choice that is not here; the weights are what they are without them."""
    choices = {name: choice for name in _RUN.split() if (choice := _choices(KINDS[name]))}
    return [name for name, choice in choices.items() if args.get(name) not in (None, *choice)]


def args_of(config: Config) -> dict[str, Any]:
    """Settings that Megatron-LM compares with its flags, and takes with --use-checkpoint-args."""
    model = config.model
    named = {key: getattr(model, key) for key in _MODEL.split()}
    window = None if model.window_size is None else tuple(map(int, model.window_size.strip("()").split(",")))
    return named | {
        **{key: config.value(key) for key in _RUN.split()},
        "muon_split_qkv": not config.optimizer.muon_no_split_qkv,
        "data_sharding": not config.data.no_data_sharding,
        "ffn_hidden_size": model.ffn,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "layernorm_epsilon": model.norm_epsilon,
        "norm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "add_bias_linear": model.bias,
        "bias_gelu_fusion": not model.no_bias_gelu_fusion,
        "window_size": window,
        **experts.given(model),
        **{name: getattr(model, name) for name in _MLA if model.multi_latent_attention or name == _LATENTS},
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "no_save_rng": True,
    }


def _latents(args: Args) -> dict[str, Any]:
    """Fields of latent attention, of a model that has it."""
    return {name: args[name] for name in _MLA if args.get(name) is not None} if args.get(_LATENTS) else {}


def _taken(args: Args, names: Iterable[str]) -> dict[str, Any]:
    """Settings that were given; a default of ours stands for what is None there."""
    values = {key: args[key] for key in names if args.get(key) is not None}
    taken = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    if "rampup_batch_size" in taken:  # three words there
        taken["rampup_batch_size"] = tuple(int(x) if str(x).isdecimal() else x for x in taken["rampup_batch_size"])
    return taken


def _choices(hint: Any) -> tuple[Any, ...]:
    """Values of a Literal, or of one that may be None."""
    return next((get_args(kind) for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal), ())


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, Named) else str(value)
