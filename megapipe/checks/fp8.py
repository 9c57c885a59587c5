"""Layers that cannot multiply in eight bits, and more of them at the ends than there are."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.numbers import division, near
from megapipe.config import Config, ModelConfig


def fp8_problems(config: Config) -> Iterator[str]:
    """Problems of one layer's products, or of all: GPUs multiply 16 numbers at a time, those of mx 32."""
    model = config.model
    if model.fp8_format is None:
        return
    start, end = model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16
    if model.first_last_layers_bf16 and model.num_layers and start + end > model.num_layers:
        yield (
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} are {start + end} layers, of "
            f"--num-layers {model.num_layers}. Use fewer, or leave --fp8-format out."
        )
    at_once = 32 if model.fp8_recipe == "mxfp8" else 16
    how = f"--fp8-format {model.fp8_format}" + f" --fp8-recipe {model.fp8_recipe}" * (at_once == 32)
    for name, width, ranks in _widths(config, at_once):
        if width and width % (at_once * ranks):
            over = f" over {ranks} tensor-parallel ranks" * (ranks > 1)
            yield (
                f"{how} multiplies {at_once} numbers at a time, and {name} {width}{over} is no multiple of them: "
                f"{division(width, at_once * ranks)}. Use {name} {near(width, at_once * ranks)}, or leave --fp8-format "
                "out."
            )


def _widths(config: Config, at_once: int) -> Iterator[tuple[str, int | None, int]]:
    """Flag, its width and over how many ranks that is split, of each side of a product."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    yield "--hidden-size", model.hidden_size, tp if model.depths else 1  # a depth's projection is split by its rows
    if model.hidden_size and not model.has_experts:
        yield "--ffn-hidden-size", model.ffn, tp
    if model.hidden_size and model.has_experts:
        yield "--moe-ffn-hidden-size", model.expert_ffn, config.parallel.etp
        yield "--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size, tp
    yield from _heads(model, tp, at_once)


def _heads(model: ModelConfig, tp: int, at_once: int) -> Iterator[tuple[str, int | None, int]]:
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        yield "--q-lora-rank", model.q_lora_rank, 1
        yield "--kv-lora-rank", model.kv_lora_rank, 1
        yield "--qk-pos-emb-head-dim", model.qk_pos_emb_head_dim, 1
        yield "--qk-head-dim", model.qk_head_dim, 1
        yield "--v-head-dim", model.v_head_dim, 1
    elif heads and (model.kv_channels or (model.hidden_size and model.hidden_size % heads == 0)):
        groups = model.num_query_groups if model.group_query_attention else heads
        sides = heads * model.head_dim, (heads + 2 * groups) * model.head_dim  # of the output projection, and of qkv
        yield "--kv-channels", model.head_dim if any(side % (at_once * tp) for side in sides) else None, 1
