"""Translate the arguments that a Megatron-LM checkpoint holds to megapipe's configuration and back.

Megatron-LM saves its parsed command line in every checkpoint. The model, the optimizer and the data
of the run can be read there, so that an import needs no flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from megapipe.config import KINDS, Config, ModelConfig
from megapipe.config.model.mla import MLAConfig
from megapipe.config.typed import unfit
from megapipe.convert.megatron import experts
from megapipe.convert.megatron.pickles import Named
from megapipe.convert.sound import number_problems
from megapipe.errors import CheckpointError

Args = Mapping[str, Any]
_LATENT_ATTENTION = "multi_latent_attention"
_LATENT_FIELDS = tuple(MLAConfig.__dataclass_fields__)

# Fields that have one name and one meaning in both programs. All fields that decide numbers are
# here, except fields that Megatron-LM has in other words (see `args_of`) or does not have.
_MODEL = """
mtp_num_layers mtp_loss_scaling_factor
num_layers hidden_size ffn_hidden_size
num_attention_heads kv_channels
group_query_attention num_query_groups
max_position_embeddings position_embedding_type
rotary_base rotary_percent rotary_interleaved
use_rope_scaling rope_scaling_factor
normalization swiglu quick_geglu squared_relu
activation_func_clamp_value glu_linear_offset
add_qkv_bias qk_layernorm qk_l2_norm
softmax_type attention_output_gate
rotary_seq_len_interpolation_factor
untie_embeddings_and_output_weights
init_method_std init_method_xavier_uniform
embedding_init_method_std
attention_dropout hidden_dropout
padded_vocab_size make_vocab_size_divisible_by
"""
_RUN = """
micro_batch_size global_batch_size
rampup_batch_size step_batch_size_schedule
seq_length train_iters train_samples seed
calculate_per_token_loss bf16 fp16
loss_scale initial_loss_scale min_loss_scale
loss_scale_window hysteresis
grad_reduce_in_bf16 optimizer
lr min_lr decoupled_lr decoupled_min_lr
lr_decay_style lr_decay_iters lr_decay_samples
lr_warmup_fraction lr_warmup_iters
lr_warmup_samples lr_warmup_init
lr_wsd_decay_style lr_wsd_decay_iters
lr_wsd_decay_samples
weight_decay weight_decay_incr_style
start_weight_decay end_weight_decay clip_grad
adam_beta1 adam_beta2 adam_eps sgd_momentum
muon_momentum muon_nesterov muon_num_ns_steps
muon_coefficient_type muon_scale_mode
muon_extra_scale_factor
tokenizer_type tokenizer_model
vocab_file merge_file vocab_size
null_tokenizer_eod_id tiktoken_pattern
tokenizer_hf_no_include_special_tokens
tiktoken_num_special_tokens
data_path data_args_path train_data_path
valid_data_path test_data_path
per_split_data_args_path split mock_data
dataloader_type eod_mask_loss
reset_position_ids reset_attention_mask
eval_iters eval_interval
"""

# Arguments that change the model in ways that megapipe does not implement. An import refuses each
# of them that is set, because the weights would compute something else.
_OTHER = """
mtp_use_repeated_layer mtp_detach_heads mtp_hsm
fp8 fp4 is_hybrid_model hybrid_layer_pattern
heterogeneous_layers_config_path
heterogeneous_layers_config_encoded_json
experimental_attention_variant
linear_attention_freq
window_attn_skip_freq no_rope_freq
apply_residual_connection_post_layernorm
use_mup enable_mhc_connections moe_latent_size
moe_mlp_glu_interleave_size
moe_shared_expert_glu_interleave_size
moe_router_topk_limited_devices
softmax_scale rotary_base_per_layer
head_wise_attn_gate
"""
_POSITIONS = ("learned_absolute", "rope", "none")


def config_of(args: Args, name: str) -> Config:
    """Return the model, training and data flags of a Megatron-LM run.

    Args:
        args: {name: value} of the arguments in the run's checkpoint.
        name: name of the checkpoint, for errors.
    Raises: CheckpointError with every argument that is missing or has an unsupported value.
    """
    # A model that megapipe lacks is refused first: its other values need no check.
    model = _taken(args, _MODEL.split()) | experts.fields_of(args) | _latents(args)
    # An older flag of Megatron-LM for the same choice.
    if args.get("use_rotary_position_embeddings"):
        model["position_embedding_type"] = "rope"
    kind = model.get("position_embedding_type", _POSITIONS[0])
    if problems := list(_unsupported(args, kind)):
        raise CheckpointError([f"{name}: {problem}" for problem in problems])

    # Megatron-LM saves 1 query group for a model without groups, too.
    if not model.get("group_query_attention"):
        model.pop("num_query_groups", None)
    if not model.get("max_position_embeddings"):
        model["max_position_embeddings"] = args.get("seq_length")
    model |= _translated(args)
    run = _run(args)

    if wrong := [f"{name}: its argument {text}" for text in unfit(KINDS, model | run)]:
        raise CheckpointError(wrong)
    if outside := number_problems(ModelConfig(**model)):
        head = f"{name}: its arguments, as flags"
        raise CheckpointError([f"{head}: {problem}" for problem in outside])
    return Config().with_fields(**model, **run)


def _unsupported(args: Args, position_kind: object) -> Iterator[str]:
    """Yield a sentence for each argument that is missing or means a model that megapipe lacks.

    Args:
        args: Megatron-LM's arguments by name.
        position_kind: the kind of position embedding, such as rope, that these arguments mean.
    """
    for key in _OTHER.split():
        value = args.get(key)
        if value:
            yield f"--{key.replace('_', '-')} {_shown(value)} is not supported"
    if args.get("softmax_type") == "learnable":
        yield "--softmax-type learnable is not supported"
    for key in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"):
        if not isinstance(args.get(key), int):
            yield f"its arguments have no {key}"
    if position_kind not in _POSITIONS:
        yield f"--position-embedding-type {_shown(position_kind)} is not supported"


def _translated(args: Args) -> dict[str, Any]:
    """Return {field: value} for fields of ModelConfig with another name in Megatron-LM."""
    epsilon = args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5))
    from_zero = args.get("layernorm_zero_centered_gamma") or args.get("apply_layernorm_1p")
    found = {
        "norm_epsilon": epsilon,
        "apply_layernorm_1p": bool(from_zero),
        "disable_bias_linear": not args.get("add_bias_linear", True),
        "no_bias_gelu_fusion": not args.get("bias_gelu_fusion", True),
    }
    window = args.get("window_size")
    if window is not None:
        found["window_size"] = ",".join(map(str, window))
    return found


def _run(args: Args) -> dict[str, Any]:
    """Return the fields of training and data from Megatron-LM's arguments.

    An argument is left out if its value is a choice that megapipe does not have. So is one that
    another argument replaces, such as a global batch size next to a schedule of batch sizes.
    """
    left = set(left_out(args))
    # Megatron-LM fills in both ends of a constant decay; here they demand one that grows.
    if args.get("weight_decay_incr_style") in (None, "constant"):
        left |= {"start_weight_decay", "end_weight_decay"}
    # The schedule gives all sizes; a size in addition to it could only contradict it.
    if args.get("step_batch_size_schedule"):
        left.add("global_batch_size")
    names = [key for key in _RUN.split() if key not in left]
    return _taken(args, names) | {
        "muon_no_split_qkv": not args.get("muon_split_qkv", True),
        "no_data_sharding": not args.get("data_sharding", True),
    }


def left_out(args: Args) -> list[str]:
    """Return the names of training and data arguments whose value megapipe does not have.

    An example is a type of tokenizer. An import drops these arguments: no weight depends on them.
    """
    # Only fields with a list of choices can have a choice that is unknown here.
    found = []
    for name in _RUN.split():
        choices = _choices(KINDS[name])
        if choices and args.get(name) not in (None, *choices):
            found.append(name)
    return found


def args_of(config: Config) -> dict[str, Any]:
    """Return {argument: value} as Megatron-LM would have saved them for this run.

    Megatron-LM compares the arguments with its flags, or with --use-checkpoint-args takes them.
    """
    model = config.model
    window = None
    if model.window_size is not None:
        window = tuple(map(int, model.window_size.strip("()").split(",")))
    # Versions of Megatron-LM name some choices differently; both names are written.
    translated = {
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
    }
    # Sizes of 1 suit `torch_dist`, whose loader reshards; `torch` replaces them by its own.
    saved_by = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "no_save_rng": True,
    }
    latent = _LATENT_FIELDS if model.multi_latent_attention else (_LATENT_ATTENTION,)
    return {
        **{key: getattr(model, key) for key in _MODEL.split()},
        **{key: config.value(key) for key in _RUN.split()},
        **translated,
        **experts.args_of(model),
        **{name: getattr(model, name) for name in latent},
        **saved_by,
    }


def _latents(args: Args) -> dict[str, Any]:
    """Return the fields of multi-head latent attention; {} for a model without it."""
    if not args.get(_LATENT_ATTENTION):
        return {}
    return {name: args[name] for name in _LATENT_FIELDS if args.get(name) is not None}


def _taken(args: Args, names: Iterable[str]) -> dict[str, Any]:
    """Return the named arguments that are not None, with tuples for lists.

    For arguments that are None, megapipe's default holds.

    Args:
        args: Megatron-LM's arguments by name.
        names: the names to take.
    """
    taken = {}
    for key in names:
        value = args.get(key)
        if value is not None:
            taken[key] = tuple(value) if isinstance(value, list) else value
    # Megatron-LM keeps the three words of this flag as text.
    if "rampup_batch_size" in taken:
        words = taken["rampup_batch_size"]
        taken["rampup_batch_size"] = tuple(int(x) if str(x).isdecimal() else x for x in words)
    return taken


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the values of a field's type if it is a Literal or an optional Literal, else ().

    Args:
        kind: the type.
    """
    for each in (kind, *get_args(kind)):
        if get_origin(each) is Literal:
            return get_args(each)
    return ()


def _shown(value: object) -> str:
    """Return a value as text; of an object that is no plain data, only the name of its type."""
    return type(value).__name__ if isinstance(value, Named) else str(value)
