"""Which tensors of a Hugging Face model make up each of ours, and how they are laid together and taken apart.

Ours have Megatron's names and orders: fused QKV rows by query group, gate above up, vocabulary padded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.models.gpt import WORD_EMBEDDINGS

# Buffers that old files carry: causal masks, rotary frequencies.
BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Rule:
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


def rules(model: ModelConfig, family: str, vocab_size: int, *, prefix: str = "transformer.") -> tuple[Rule, ...]:
    """A rule for every tensor of ours, from the embedding to the head.

    Args:
        model: with padded_vocab_size.
        prefix: of GPT-2's names; empty in its oldest files.
    """
    names = _gpt2_names(prefix) if family == "gpt2" else _LLAMA_NAMES
    return tuple(_rules(model, family == "gpt2", vocab_size, names))


@dataclass(frozen=True)
class _Names:
    """Their names; {} is the layer's number and then weight or bias."""

    embedding: str
    positions: str
    layer: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    proj: str
    fc1: tuple[str, ...]
    fc2: str
    final: str


def _gpt2_names(prefix: str) -> _Names:
    return _Names(
        f"{prefix}wte.weight",
        f"{prefix}wpe.weight",
        f"{prefix}h.{{}}.",
        ("ln_1", "ln_2"),
        ("attn.c_attn",),
        "attn.c_proj",
        ("mlp.c_fc",),
        "mlp.c_proj",
        f"{prefix}ln_f",
    )


_LLAMA_NAMES = _Names(
    "model.embed_tokens.weight",
    "",
    "model.layers.{}.",
    ("input_layernorm", "post_attention_layernorm"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    "model.norm",
)


def _rules(model: ModelConfig, conv1d: bool, vocab_size: int, names: _Names) -> Iterator[Rule]:
    kinds = ("weight", "bias")
    with_bias = kinds if model.bias else kinds[:1]
    norm_kinds = kinds if model.normalization == "LayerNorm" else kinds[:1]

    def same(ours: str, theirs: str) -> Rule:
        return Rule(ours, (theirs,), lambda x: x[0], lambda x: (x,))

    def linear(ours: str, theirs: str) -> Iterator[Rule]:
        for kind in with_bias:
            if conv1d and kind == "weight":  # GPT-2 keeps [in, out]
                yield Rule(f"{ours}.weight", (f"{theirs}.weight",), lambda x: x[0].t(), lambda x: (x.t(),))
            else:
                yield same(f"{ours}.{kind}", f"{theirs}.{kind}")

    def vocabulary(ours: str, theirs: str) -> Rule:
        rows = model.padded_vocab_size or vocab_size
        return Rule(ours, (theirs,), lambda x: pad_rows(x[0], rows, vocab_size), lambda x: (x[:vocab_size],))

    yield vocabulary(WORD_EMBEDDINGS, names.embedding)
    if model.position_embedding_type == "learned_absolute":
        yield same("embedding.position_embeddings.weight", names.positions)
    for n in range(model.layers):
        ours, theirs = f"decoder.layers.{n}.", names.layer.format(n)
        for norm, their_norm in zip(("input_layernorm", "pre_mlp_layernorm"), names.norms, strict=True):
            for kind in norm_kinds:
                yield same(f"{ours}{norm}.{kind}", f"{theirs}{their_norm}.{kind}")
        for kind in kinds if model.bias or model.add_qkv_bias else kinds[:1]:
            qkv = tuple(f"{theirs}{name}.{kind}" for name in names.qkv)
            yield _qkv(f"{ours}self_attention.linear_qkv.{kind}", qkv, model)
        if model.qk_layernorm:
            yield same(f"{ours}self_attention.q_layernorm.weight", f"{theirs}self_attn.q_norm.weight")
            yield same(f"{ours}self_attention.k_layernorm.weight", f"{theirs}self_attn.k_norm.weight")
        yield from linear(f"{ours}self_attention.linear_proj", theirs + names.proj)
        if model.gated:
            for kind in with_bias:
                gate_up = tuple(f"{theirs}{name}.{kind}" for name in names.fc1)
                yield Rule(f"{ours}mlp.linear_fc1.{kind}", gate_up, torch.stack, lambda x: x.unbind(0))  # type: ignore[arg-type]
        else:
            yield from linear(f"{ours}mlp.linear_fc1", theirs + names.fc1[0])
        yield from linear(f"{ours}mlp.linear_fc2", theirs + names.fc2)
    for kind in norm_kinds:
        yield same(f"decoder.final_layernorm.{kind}", f"{names.final}.{kind}")
    if not model.tied:
        yield vocabulary("output_layer.weight", HEAD)


def _qkv(ours: str, theirs: tuple[str, ...], model: ModelConfig) -> Rule:
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

    return Rule(ours, theirs, join, split)


def pad_rows(x: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Rows of padding after a vocabulary, each the mean of its rows.

    A row of zeros has logit 0, which wins wherever a model's real logits are far below 0, as GPT-2's are. The mean
    row's logit is the mean logit, so by Jensen the softmax's denominator grows by at most the share of padding.
    """
    if len(x) != vocab_size:
        raise RuntimeError(f"{len(x)} rows, but vocab_size is {vocab_size}")
    if rows == vocab_size:
        return x
    mean = x.mean(0, keepdim=True, dtype=torch.float32).to(x.dtype)
    return torch.cat((x, mean.expand(rows - vocab_size, -1)))
