"""Tensors of a Hugging Face model that make up each of ours, and how they are laid together and taken apart.

Ours have Megatron's names and orders: fused QKV rows by query group, gate above up, vocabulary padded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.convert.huggingface import deepseek, experts
from megapipe.convert.huggingface.deepseek import HEAD
from megapipe.convert.tensors import our_shapes

# Buffers that old files carry: causal masks, rotary frequencies.
BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")


@dataclass(frozen=True)
class Tensors:
    """One tensor of ours.

    Attributes:
        ours, theirs: its global name, and theirs in order.
        join: theirs -> ours in its saved shape.
        split: ours -> theirs.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


_LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "input_layernorm": ("ln_1",),
        "self_attention.linear_qkv": ("attn.c_attn",),
        "self_attention.linear_proj": ("attn.c_proj",),
        "pre_mlp_layernorm": ("ln_2",),
        "mlp.linear_fc1": ("mlp.c_fc",),
        "mlp.linear_fc2": ("mlp.c_proj",),
    },
    "": {
        "input_layernorm": ("input_layernorm",),
        "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.q_layernorm": ("self_attn.q_norm",),
        "self_attention.k_layernorm": ("self_attn.k_norm",),
        "self_attention.linear_proj": ("self_attn.o_proj",),
        "pre_mlp_layernorm": ("post_attention_layernorm",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("mlp.down_proj",),
    },
}
_LAYERS |= dict.fromkeys(deepseek.FAMILIES, _LAYERS[""] | deepseek.NAMES)
_ENDS = {
    "gpt2": ("wte", "wpe", "ln_f", "h.{}."),
    "": ("embed_tokens", "", "norm", "layers.{}."),
}
"""Word embedding, positions, last norm, and what is before a layer's names."""
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_PARAMETER = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.+)\.(weight|bias)")
_FURTHER = re.compile(r"mtp\.layers\.(\d+)\.(mtp_model_layer\.)?")


def rules(model: ModelConfig, family: str, vocab_size: int, *, prefix: str = "transformer.") -> tuple[Tensors, ...]:
    """A rule for every tensor of ours.

    Args:
        model: with padded_vocab_size.
        prefix: of GPT-2's names; empty in its oldest files.
    """
    shapes, exactly = our_shapes(model), family
    family, prefix = ("gpt2", prefix) if family == "gpt2" else ("", "model.")
    words, positions, last, layer = _ENDS[family]
    layers = _LAYERS.get(exactly, _LAYERS[family]) | deepseek.FURTHER
    of_layers = {f"mlp.{name.partition('.mlp.')[2]}": shape for name, shape in shapes.items()}
    ends = {
        "embedding.word_embeddings": prefix + words,
        "embedding.position_embeddings": prefix + positions,
        "decoder.final_layernorm": prefix + last,
        "output_layer": HEAD.removesuffix(".weight"),
    }

    def rule(ours: str) -> Tensors:
        if further := _FURTHER.match(ours):  # depths are numbered on behind the model's layers
            at = f"decoder.layers.{model.layers + int(further[1])}."
            return replace(rule(at + ours[further.end() :]), ours=ours)
        if (sparse := _IN_LAYER.fullmatch(ours)) and (
            of_experts := experts.names_of(sparse[2], exactly, model.num_experts or 0)
        ):
            theirs = tuple(prefix + layer.format(sparse[1]) + name for name in of_experts)
            shape = of_layers[sparse[2]]
            return Tensors(ours, theirs, lambda x: experts.joined(x, shape), experts.parts)
        match = _PARAMETER.fullmatch(ours)
        assert match is not None
        n, module, kind = match.groups()
        names = [ends[module]] if n is None else [prefix + layer.format(n) + x for x in layers[module]]
        theirs = tuple(f"{name}.{kind}" for name in names)
        if module in ("embedding.word_embeddings", "output_layer"):
            rows = model.padded_vocab_size or vocab_size
            return Tensors(ours, theirs, lambda x: pad_rows(x[0], rows, vocab_size), lambda x: (x[:vocab_size],))
        if module == "self_attention.linear_qkv":
            return _qkv(ours, theirs, model)
        if len(theirs) == 2:
            return Tensors(ours, theirs, torch.stack, lambda x: x.unbind(0))  # type: ignore[arg-type]
        if family == "gpt2" and ".linear_" in module and kind == "weight":  # GPT-2 keeps [in, out]
            return Tensors(ours, theirs, lambda x: x[0].t(), lambda x: (x.t(),))
        return Tensors(ours, theirs, lambda x: x[0], lambda x: (x,))

    return tuple(map(rule, shapes))


def _qkv(ours: str, theirs: tuple[str, ...], model: ModelConfig) -> Tensors:
    groups, per_group = model.query_groups, model.heads // model.query_groups
    sizes = [per_group * model.head_dim, model.head_dim, model.head_dim]

    def join(x: Sequence[Tensor]) -> Tensor:
        q, k, v = x if len(x) == 3 else x[0].t().chunk(3)  # GPT-2: one Conv1D, [in, out]
        rest = q.shape[1:]
        return torch.cat([part.reshape(groups, -1, *rest) for part in (q, k, v)], dim=1).reshape(-1, *rest)

    def split(x: Tensor) -> Sequence[Tensor]:
        rest = x.shape[1:]
        parts = torch.split(x.reshape(groups, -1, *rest), sizes, dim=1)
        qkv = [part.reshape(-1, *rest) for part in parts]
        return qkv if len(theirs) == 3 else (torch.cat(qkv).t(),)

    return Tensors(ours, theirs, join, split)


def pad_rows(x: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Rows of padding after a vocabulary, each the mean of its rows.

    A row of zeros has logit 0, which wins wherever a model's real logits are far below 0, as GPT-2's are. The mean
    row's logit is the mean logit, so by Jensen the softmax's denominator grows by at most the share of padding.
    """
    if rows == vocab_size:
        return x
    mean = x.mean(0, keepdim=True, dtype=torch.float32).to(x.dtype)
    return torch.cat((x, mean.expand(rows - vocab_size, -1)))
