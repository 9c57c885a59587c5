"""Causal self-attention with heads split over tensor-parallel ranks; grouped-query, rotary and head norms as asked.

Documents and sliding windows cut the sequence instead of masking it; dropout, and queries that meet other ranks' keys,
go block by block: nothing of s x s is kept.
"""

from __future__ import annotations

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
from megapipe.distributed.layout import layout_of, set_layout
from megapipe.distributed.tokens import Cut, Documents, positions
from megapipe.models.attention.blocks import Sight, band
from megapipe.models.attention.context import context_attention, whole_sequences
from megapipe.models.attention.cpu import causal_attention
from megapipe.models.attention.rope import Rotary, rotate
from megapipe.models.parts import AttentionKernel, parts_of
from megapipe.models.recompute import recompute
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.rng import Stream, current_stream

_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}
_SMALLEST_BLOCK = 128
"""Queries: below, a block is too small for its call to a kernel."""


class Attention(nn.Module):
    """The part between the projections: heads that are here attend, however their tokens are cut.

    Attributes:
        kernel: of another library, for whole sequences without dropout.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int, kernel: AttentionKernel | None = None) -> None:
        super().__init__()
        self.config, self.tp, self.layer, self.kernel = config, tp, layer, kernel

    @property
    def _drops(self) -> bool:
        return self.training and self.config.attention_dropout > 0

    @eager
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [s/c, b, heads/t, d], k and v [s/c, b, groups/t, d] -> [s/c, b, heads/t x d]."""
        stream, (way,) = current_stream(), self.config.cp_comm_type
        cp, tp = stream.cp, self.tp
        if cp.size > 1 and way == "a2a":
            # Heads are spread over tp and, within, over cp: masks of dropout belong to heads by these numbers.
            heads = Axis(tp.rank * cp.size + cp.rank, tp.size * cp.size)
            core = partial(self._attend_whole, replace(stream, cp=ALONE), heads)
            return self._maybe_again(whole_sequences(core, cp), q, k, v)
        if cp.size == 1 and not self._drops and stream.piece is None:
            return self._maybe_again(partial(self._attend_whole, stream, tp), q, k, v)
        return self._attend_blocks(stream, tp, way, q, k, v)

    def _maybe_again(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend, again in backward with --recompute-granularity selective; what goes by blocks does so itself."""
        return recompute(attend, q, k, v) if self.config.recompute_attention else attend(q, k, v)

    def _attend_blocks(self, stream: Stream, heads: Axis, way: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self.config
        sight = Sight(
            stream.cut.whole(q.shape[0]),
            stream,
            config.window,
            _isolated(stream),
            config.attention_dropout if self.training else 0.0,
            (self.layer, "attention"),
            heads,
        )
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = context_attention(q, k, v, sight, way)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_whole(self, stream: Stream, heads: Axis, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [s, b, heads, d], k and v [s, b, groups, d], of a share of the heads -> [s, b, heads x d]."""
        if self._drops or stream.piece is not None:
            return self._attend_blocks(stream, heads, "p2p", q, k, v)
        documents = _isolated(stream)
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

    The rows of linear_qkv are ordered by query group: the group's query heads, its key, its value (Megatron's order,
    checkpoint version 2.0), so that a slice over tp is a set of whole groups.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        parts = parts_of(config)
        super().__init__(config, tp, layer, parts.attention(config, tp))
        head, queries, groups = config.head_dim, config.heads, config.query_groups
        self.groups = groups // tp.size
        self.linear_qkv = parts.column(
            config.hidden,
            (queries + 2 * groups) * head,
            tp=tp,
            bias=config.bias or config.add_qkv_bias,
            sequence_parallel=config.sequence_parallel,
            init_std=config.linear_std,
        )
        weight = self.linear_qkv.weight
        set_layout(weight, replace(layout_of(weight), fused=(queries // groups * head, head, head)))
        # A rank has its own heads only, with or without sequence parallelism.
        self.q_layernorm = parts.norm(config, head, sum_over_tp=True) if config.qk_layernorm else None
        self.k_layernorm = parts.norm(config, head, sum_over_tp=True) if config.qk_layernorm else None
        self.linear_proj = parts.row(
            queries * head,
            config.hidden,
            tp=tp,
            bias=config.bias,
            sequence_parallel=config.sequence_parallel,
            init_std=config.residual_std,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], the tokens that are here; under sequence parallelism [s/t, b, h], and all of these
        tokens in between."""
        config = self.config
        head, per_group = config.head_dim, config.heads // config.query_groups
        qkv = self.linear_qkv(x).unflatten(-1, (self.groups, per_group + 2, head))
        s, b = qkv.shape[:2]
        q, k, v = qkv.split((per_group, 1, 1), dim=3)
        q, k, v = (part.reshape(s, b, -1, head) for part in (q, k, v))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if config.position_embedding_type == "rope":
            restarting, cut = positions_here(s, x.device)
            q, k = (rotate(part, Rotary.of(config), restarting, cut) for part in (q, k))
        return self.linear_proj(self.attend(q, k, v))  # type: ignore[no-any-return]


@eager
def positions_here(rows: int, device: torch.device) -> tuple[Tensor | None, Cut]:
    """[s/c, b] where positions restart in each document, else None; and which tokens are here."""
    documents, cut = current_stream().documents, current_stream().cut
    if documents is None or not documents.restart:
        return None, cut
    return positions(cut.whole(rows), cut, documents, device).t(), cut


def _isolated(stream: Stream) -> Documents | None:
    return stream.documents if stream.documents is not None and stream.documents.isolate else None


# The three below: q [b, heads, s, d], k and v [b, groups, s, d] -> [b, heads, s, d].
def _by_document(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, documents: Documents) -> Tensor:
    """Each document by itself, so that no mask says which tokens belong together."""
    rows = []
    for row, lengths in enumerate(documents.lengths):
        parts = zip(*(torch.split(x[row : row + 1], list(lengths), dim=2) for x in (q, k, v)), strict=True)
        rows.append(torch.cat([_by_window(*part, config=config) for part in parts], dim=2))
    return torch.cat(rows)


def _by_window(q: Tensor, k: Tensor, v: Tensor, *, config: ModelConfig) -> Tensor:
    """Queries in blocks of the window's width, each with the keys that any of them sees: memory and time s x window."""
    s, window, backend = q.shape[2], config.window, config.attention_backend
    if window is None or window >= s - 1:
        return _sdpa(q, k, v, None, backend)
    outs = []
    step = max(window, _SMALLEST_BLOCK)
    for begin in range(0, s, step):
        end, first = min(begin + step, s), max(0, begin - window)
        seen = band(end - begin, end - first, begin - first, window, q.device)
        outs.append(_sdpa(q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end], seen, backend))
    return torch.cat(outs, dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, backend: str) -> Tensor:
    """Causal without a mask."""
    if seen is None and backend == "auto" and q.device.type == "cpu":
        return causal_attention(q, k, v)
    per_group = q.shape[1] // k.shape[1]
    if seen is not None and per_group > 1:  # torch's memory-efficient GPU kernel takes masks but no groups
        k, v = (part.repeat_interleave(per_group, dim=1) for part in (k, v))
        per_group = 1
    with nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=per_group > 1)
