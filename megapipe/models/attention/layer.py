"""Causal self-attention, with heads split over tensor-parallel ranks.

Grouped queries, rotary positions and norms of queries and keys are options. Documents and sliding
windows cut the sequence instead of masking it. Dropout, slices and context parallelism go block by
block. No tensor of s x s scores is kept in any of these cases, unless --attention-backend asks for
torch's unfused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapipe.config import ModelConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.layout import Layout, layout_of, parameter, set_layout
from megapipe.distributed.tokens import Cut, Documents, positions
from megapipe.models.attention.blocks import MaskSpec, band
from megapipe.models.attention.context import context_attention, whole_sequences
from megapipe.models.attention.cpu import causal_attention
from megapipe.models.attention.heads import HeadsNorm, norm_heads
from megapipe.models.attention.rope import Rotary, rotate, temperature
from megapipe.models.norm import Norm
from megapipe.models.parts import AttentionKernel, parts_of
from megapipe.models.recompute import recompute
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.rng import MicrobatchContext, current_microbatch

_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}
"""Value of --attention-backend -> the kernels that torch may use."""
_SMALLEST_BLOCK = 128
"""Queries of a block of windowed attention: a smaller one costs more to call than to compute."""


class Attention(nn.Module):
    """Attention between the projections, for the heads and tokens on this rank.

    SelfAttention and LatentAttention add the projections, and call `attend`.

    Args:
        layer: the layer's number in the whole model, from 0.
        kernel: (q, k, v) -> the attention of another library, for uncut sequences without dropout;
            None to use torch's.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: Axis,
        layer: int,
        kernel: AttentionKernel | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.layer = layer
        self.kernel = kernel
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            # An attention sink of each head (OpenAI 2025, gpt-oss).
            layout = Layout((config.heads,), 0, std=config.init_method_std)
            self.softmax_offset = parameter(layout, config.heads // tp.size)

    @property
    def _by_blocks(self) -> bool:
        """Return whether attention is computed block by block in plain torch.

        That is so with dropout, or with a feature that the kernels of torch and Transformer Engine
        lack.
        """
        drops = self.training and self.config.attention_dropout > 0
        return drops or self.config.needs_blocks

    @eager
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of the queries to all keys that the configuration allows.

        Args:
            q: [s/c, b, heads/t, d].
            k, v: [s/c, b, groups/t, d].
        Returns: [s/c, b, heads/t x d].
        """
        stream = current_microbatch()
        (way,) = self.config.cp_comm_type
        cp = stream.cp
        tp = self.tp
        if cp.size > 1 and way == "a2a":
            # Heads are split over tp, then over cp. Dropout masks belong to heads by number, and
            # this axis counts them so.
            heads = Axis(tp.rank * cp.size + cp.rank, tp.size * cp.size)
            core = partial(self._attend_whole, replace(stream, cp=ALONE), heads)
            return self._maybe_recomputed(whole_sequences(core, cp), q, k, v)
        # The only case that the kernels of torch and Transformer Engine can compute.
        if cp.size == 1 and not self._by_blocks and stream.piece is None:
            core = partial(self._attend_whole, stream, tp)
            return self._maybe_recomputed(core, q, k, v)
        # Attention by blocks saves no scores, so it needs no recomputation.
        return self._attend_blocks(stream, tp, way, q, k, v)

    def _maybe_recomputed(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Return attend(q, k, v); under selective recomputation, backward computes it again."""
        if self.config.recompute_attention:
            return recompute(attend, q, k, v)
        return attend(q, k, v)

    def _attend_blocks(
        self, stream: MicrobatchContext, heads: Axis, way: str, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        config = self.config
        p = config.attention_dropout if self.training else 0.0
        mask = MaskSpec(
            stream.cut.whole(q.shape[0]),
            stream,
            config.window,
            self._documents(stream, stream.cut.whole(q.shape[0]), q.shape[1]),
            p,
            (self.layer, "attention"),
            heads,
            config.attn_logit_softcapping,
        )
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = context_attention(q, k, v, mask, way, self._sinks(heads, q))
        return out.permute(2, 0, 1, 3).flatten(2)

    def _documents(
        self, stream: MicrobatchContext, length: int, sequences: int
    ) -> Documents | None:
        """Return the documents or chunks that attention must stay in; None for whole sequences.

        Args:
            length: tokens of a whole sequence. sequences: their number, b.
        """
        found = stream.documents
        if found is not None and not found.isolate:
            found = None
        chunk = self.config.attention_chunk_size
        if chunk is None or chunk >= length:
            return found
        whole = found or Documents(((length,),) * sequences, isolate=True, restart=False)
        return whole.chunks(chunk)

    def _sinks(self, heads: Axis, q: Tensor) -> Tensor | None:
        """Return, for each head of q, the logarithm of an extra term of its softmax denominator.

        The result is None for the plain softmax.

        Args:
            heads: the ranks that split the heads.
            q: [b, heads, s, d].
        """
        if self.config.softmax_type == "vanilla":
            return None
        if self.softmax_offset is None:
            return q.new_zeros(q.shape[1])
        # After an exchange of heads for tokens a rank has a part of its heads.
        parts = heads.size // self.tp.size
        return self.softmax_offset.chunk(parts)[heads.rank % parts]

    def _attend_whole(
        self, stream: MicrobatchContext, heads: Axis, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Return the attention of uncut sequences, for some of the heads.

        Args:
            stream: the running microbatch, whose documents and random numbers are used.
            heads: the ranks that split the heads.
            q: [s, b, heads, d]. k, v: [s, b, groups, d].
        Returns: [s, b, heads x d].
        """
        if self._by_blocks or stream.piece is not None:
            return self._attend_blocks(stream, heads, "p2p", q, k, v)
        documents = self._documents(stream, *q.shape[:2])
        # The kernel was made for this rank's heads. After an exchange of heads there are fewer.
        if self.kernel is not None and documents is None and heads is self.tp:
            return self.kernel(q, k, v)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        if documents is not None:
            out = _by_document(q, k, v, self.config, documents)
        else:
            out = _by_window(q, k, v, config=self.config)
        return out.permute(2, 0, 1, 3).flatten(2)


class SelfAttention(Attention):
    """QKV projection, attention, output projection.

    The rows of linear_qkv are ordered by query group: the group's query heads, its key, its value
    (Megatron-LM's order, checkpoint version 2.0). A tensor-parallel slice is then a set of whole
    groups. With --attention-output-gate the gates of the group's heads follow its query heads.

    Args:
        layer: the layer's number in the whole model, from 0.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        parts = parts_of(config, tp)
        super().__init__(config, tp, layer, parts.attention(config, tp))
        head = config.head_dim
        queries = config.heads
        groups = config.query_groups
        self.groups = groups // tp.size
        self.linear_qkv = parts.column(
            config.hidden,
            (queries * (1 + config.attention_output_gate) + config.projected * groups) * head,
            bias=config.has_bias("qkv"),
        )
        weight = self.linear_qkv.weight
        rows = queries // groups * head
        fused = (*[rows] * (1 + config.attention_output_gate), *[head] * config.projected)
        # Muon orthogonalises queries, keys and values as three matrices, and finds their rows by
        # this.
        set_layout(weight, replace(layout_of(weight), fused=fused))
        self.q_layernorm: Norm | HeadsNorm | None = None
        self.k_layernorm: Norm | HeadsNorm | None = None
        if config.qk_layernorm_all_heads:
            self.q_layernorm = HeadsNorm(config, queries, tp)
            self.k_layernorm = HeadsNorm(config, groups, tp)
        elif config.qk_layernorm:
            # Each rank norms its own heads only, with or without sequence parallelism.
            self.q_layernorm = parts.norm(head, sum_over_tp=True)
            self.k_layernorm = parts.norm(head, sum_over_tp=True)
        bias = config.has_bias("proj")
        self.linear_proj = parts.row(queries * head, config.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply self-attention to this rank's tokens.

        Args:
            x: [s, b, h]; under sequence parallelism [s/t, b, h]. The projections gather and
                scatter the tokens of the t ranks.
        Returns: the same shape.
        """
        config = self.config
        head = config.head_dim
        per_group = config.heads // config.query_groups
        gated = config.attention_output_gate
        sizes = [per_group] * (1 + gated) + [1] * config.projected
        qkv = self.linear_qkv(x).unflatten(-1, (self.groups, sum(sizes), head))
        s, b = qkv.shape[:2]
        parts = [part.reshape(s, b, -1, head) for part in qkv.split(sizes, dim=3)]
        if config.keys_as_values:
            parts.append(parts[-1])
        q, *gates, k, v = parts
        q, k = self._normed(q, k)
        if config.v_l2_norm:
            v = F.rms_norm(v, v.shape[-1:], None, config.norm_epsilon)
        restarting, cut = positions_here(s, x.device)
        if config.rotates:
            q, k = (rotate(part, Rotary.of(config), restarting, cut) for part in (q, k))
        if config.temperature is not None:
            q = q * temperature(q, *config.temperature, restarting, cut)
        # The kernels divide scores by sqrt(head), so that the queries carry any other scale.
        if config.softmax_scale is not None:
            q = q * (config.softmax_scale * math.sqrt(head))
        out = self.attend(q, k, v)
        for gate in gates:
            out = out * torch.sigmoid(gate.flatten(2))
        return self.linear_proj(out)  # type: ignore[no-any-return]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [s, b, heads/t, d] and keys [s, b, groups/t, d] after their norms."""
        q_norm = self.q_layernorm
        k_norm = self.k_layernorm
        if isinstance(q_norm, HeadsNorm) and isinstance(k_norm, HeadsNorm):
            return norm_heads(q, k, q_norm, k_norm)
        if q_norm is not None and k_norm is not None:
            return q_norm(q), k_norm(k)
        if self.config.qk_l2_norm:
            size = q.shape[-1:]
            epsilon = self.config.norm_epsilon
            return F.rms_norm(q, size, None, epsilon), F.rms_norm(k, size, None, epsilon)
        return q, k


@eager
def positions_here(rows: int, device: torch.device) -> tuple[Tensor | None, Cut]:
    """Return the positions of this rank's tokens in the running pass, and how sequences are cut.

    Args:
        rows: number of tokens of each sequence on this rank, s/c.
    Returns: (positions [s/c, b], cut). The positions are None unless they restart in each document.
        The cut says which tokens of the whole sequence are on this rank.
    """
    stream = current_microbatch()
    if stream.documents is None or not stream.documents.restart:
        return None, stream.cut
    # Of the whole sequence, then cut: a document may have begun on another rank.
    found = positions(stream.cut.whole(rows), stream.cut, stream.documents, device)
    return found.t(), stream.cut


# The three functions below take q [b, heads, s, d], k and v [b, groups, s, d], and return
# [b, heads, s, d].
def _by_document(
    q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, documents: Documents
) -> Tensor:
    """Return the attention of each document computed alone, so that no mask is needed.

    Args:
        q: [b, heads, s, d]. k, v: [b, groups, s, d].
        config: the model's configuration.
        documents: the lengths of the documents in each sequence.
    Returns: [b, heads, s, d].
    """
    rows = []
    for row, lengths in enumerate(documents.lengths):
        split = (torch.split(x[row : row + 1], list(lengths), dim=2) for x in (q, k, v))
        outs = [_by_window(*part, config=config) for part in zip(*split, strict=True)]
        rows.append(torch.cat(outs, dim=2))
    return torch.cat(rows)


def _by_window(q: Tensor, k: Tensor, v: Tensor, *, config: ModelConfig) -> Tensor:
    """Return the attention within the model's sliding window, or to all earlier tokens without one.

    Queries are computed in blocks as wide as the window, each with the keys that any of its
    queries attends to. Memory and time grow with s x window.

    Args:
        q: [b, heads, s, d]. k, v: [b, groups, s, d].
    Returns: [b, heads, s, d].
    """
    s = q.shape[2]
    window = config.window
    backend = config.attention_backend
    # A window over the whole sequence masks nothing, so the faster causal kernels serve.
    if window is None or window >= s - 1:
        return _sdpa(q, k, v, None, backend)
    outs = []
    step = max(window, _SMALLEST_BLOCK)
    for begin in range(0, s, step):
        end = min(begin + step, s)
        # Of the block's first query: its window reaches furthest back.
        first = max(0, begin - window)
        seen = band(end - begin, end - first, begin - first, window, q.device)
        queries = q[:, :, begin:end]
        outs.append(_sdpa(queries, k[:, :, first:end], v[:, :, first:end], seen, backend))
    return torch.cat(outs, dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, backend: str) -> Tensor:
    """Return the attention [b, heads, queries, d] by torch's scaled_dot_product_attention.

    On a CPU without a mask, `causal_attention` computes it, unless a backend is named.

    Args:
        q: [b, heads, queries, d]. k, v: [b, groups, keys, d].
        seen: mask [queries, keys], True where a query attends to a key; None for a causal mask.
        backend: the value of --attention-backend, which chooses torch's kernel.
    """
    if seen is None and backend == "auto" and q.device.type == "cpu":
        return causal_attention(q, k, v)
    per_group = q.shape[1] // k.shape[1]
    if seen is not None and per_group > 1:
        # torch's memory-efficient GPU kernel takes masks but no groups.
        k = k.repeat_interleave(per_group, dim=1)
        v = v.repeat_interleave(per_group, dim=1)
        per_group = 1
    with nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend]):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=per_group > 1
        )
