"""Checks of products in FP8: widths that a GPU cannot multiply, and layers without FP8."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.numbers import division, near
from megapipe.config import Config, ModelConfig


def fp8_problems(config: Config) -> Iterator[str]:
    """Yield the problems of FP8 with the widths of the model, or of one of its layers.

    GPUs multiply 16 numbers at a time, and with mxfp8 32. The numbers of layers at the start and at
    the end in bf16 may not be more than there are.
    """
    model = config.model
    if model.fp8_format is None:
        return
    start = model.num_layers_at_start_in_bf16
    end = model.num_layers_at_end_in_bf16
    if model.first_last_layers_bf16 and model.num_layers and start + end > model.num_layers:
        yield (
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} are "
            f"{start + end} layers, of --num-layers {model.num_layers}. "
            "Use fewer, or leave --fp8-format out."
        )
    at_once = 16
    how = f"--fp8-format {model.fp8_format}"
    if model.fp8_recipe == "mxfp8":
        # A block of mxfp8 has 32 numbers with one scale.
        at_once = 32
        how += " --fp8-recipe mxfp8"
    for name, width, ranks in _widths(config, at_once):
        unit = at_once * ranks
        if width and width % unit:
            over = f" over {ranks} tensor-parallel ranks" if ranks > 1 else ""
            yield (
                f"{how} multiplies {at_once} numbers at a time, and {name} {width}{over} is no "
                f"multiple of them: {division(width, unit)}. "
                f"Use {name} {near(width, unit)}, or leave --fp8-format out."
            )


def _widths(config: Config, at_once: int) -> Iterator[tuple[str, int | None, int]]:
    """Yield (flag, width, tensor-parallel ranks that split the width) of each product's dimensions.

    For example ("--ffn-hidden-size", 4096, 2). The width is None if the flag was not given.

    Args:
        at_once: FP8 products need widths that are multiples of this number. --kv-channels is
            yielded only if a projection's width is not.
    """
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    # The projection of a depth of multi-token prediction is split by its rows.
    yield "--hidden-size", model.hidden_size, tp if model.depths else 1
    if model.hidden_size and not model.has_experts:
        yield "--ffn-hidden-size", model.ffn, tp
    if model.hidden_size and model.has_experts:
        yield "--moe-ffn-hidden-size", model.expert_ffn, config.parallel.etp
        shared = model.moe_shared_expert_intermediate_size
        yield "--moe-shared-expert-intermediate-size", shared, tp
    if model.has_delta:
        yield "--linear-key-head-dim", model.linear_key_head_dim, 1
        yield "--linear-value-head-dim", model.linear_value_head_dim, 1
        yield "2 x --linear-num-value-heads", 2 * model.linear_num_value_heads, tp
    yield from _heads(model, tp, at_once)


def _heads(model: ModelConfig, tp: int, at_once: int) -> Iterator[tuple[str, int | None, int]]:
    """Yield (flag, width, ranks that split the width) of the dimensions of attention's products.

    Args:
        tp: the number of tensor-parallel ranks.
        at_once: FP8 products need widths that are multiples of this number. --kv-channels is
            yielded only if a projection's width is not.
    """
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        yield "--q-lora-rank", model.q_lora_rank, 1
        yield "--kv-lora-rank", model.kv_lora_rank, 1
        yield "--qk-pos-emb-head-dim", model.qk_pos_emb_head_dim, 1
        yield "--qk-head-dim", model.qk_head_dim, 1
        yield "--v-head-dim", model.v_head_dim, 1
    # Without a head's size another check has a line, and there are no widths to ask about.
    elif heads and (model.kv_channels or (model.hidden_size and model.hidden_size % heads == 0)):
        groups = model.num_query_groups if model.group_query_attention else heads
        projection = heads * model.head_dim
        # Queries, keys and values are rows of one product.
        qkv = (heads + 2 * groups) * model.head_dim
        if projection % (at_once * tp) or qkv % (at_once * tp):
            yield "--kv-channels", model.head_dim, 1
