"""torch's attention kernels of a GPU, on emulated devices: what they keep, and what they allocate.

Flash attention serves 16 bits without a mask, the memory-efficient kernel other types of up to 32
bits and masks. Neither keeps a matrix of scores: they keep operands, output and the logarithm of
each query's denominator. Sizes are those of torch's sources (ATen/native/transformers/cuda).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.proofs.gpu import fake_cuda

_by_torch = F.scaled_dot_product_attention
ROWS = 128
"""Queries of a block of flash attention's backward."""
MOST = 256
"""Channels of a head at most."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention, with the choice of kernels that torch makes on a GPU."""
    settings: Any = torch.backends.cuda
    grouped = q.shape[1] != k.shape[1]
    if q.is_cuda and not dropout_p and q.shape[-1] <= MOST:
        half = q.dtype in (torch.float16, torch.bfloat16)
        even = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        if half and even and attn_mask is None and settings.flash_sdp_enabled():
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q, k, v, 0.0, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
        if q.dtype != torch.float64 and not grouped and settings.mem_efficient_sdp_enabled():
            bias = None
            if attn_mask is not None:
                bias = torch.zeros_like(attn_mask, dtype=q.dtype)
                bias = bias.masked_fill_(~attn_mask, -math.inf).expand(*q.shape[:3], k.shape[2])
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            keeps = torch.is_grad_enabled() and q.requires_grad
            return efficient(q, k, v, bias, keeps, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    return _by_torch(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """The scores in float32, [b, heads, queries, keys]; k has each query's head."""
    found = q.float() @ k.float().transpose(-1, -2)
    found = found * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        found = found + bias
    if causal:
        places = torch.arange(max(found.shape[-2:]), device=q.device)
        later = places[: found.shape[-1]] > places[: found.shape[-2], None]
        found = found.masked_fill(later, -math.inf)
    return found


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:
    b, heads, s, width = x.shape
    return x.reshape(b, groups, heads // groups, s, width).sum(2)


@fake_cuda.one_kernel
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> None:
    """Write the output and, for each query, the logarithm of its denominator."""
    scores = _scores(q, _repeated(k, q.shape[1]), bias, causal, scale)
    found = scores.logsumexp(-1)
    logs[..., : found.shape[-1]].copy_(found)
    out.copy_((scores - found[..., None]).exp() @ _repeated(v, q.shape[1]).float())


@fake_cuda.one_kernel
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> None:
    """Write the gradients of queries, keys and values."""
    heads, groups = q.shape[1], k.shape[1]
    keys, values, dy = _repeated(k, heads), _repeated(v, heads).float(), grad.float()
    scores = _scores(q, keys, bias, causal, scale)
    p = (scores - logs[..., : q.shape[2], None]).exp()
    slope = p * (dy @ values.transpose(-1, -2) - (dy * out.float()).sum(-1, keepdim=True))
    slope = slope * (scale or 1 / math.sqrt(q.shape[-1]))
    dk, dv = slope.transpose(-1, -2) @ q.float(), p.transpose(-1, -2) @ dy
    into[0].copy_(slope @ keys.float())
    into[1].copy_(_summed(dk, groups))
    into[2].copy_(_summed(dv, groups))


def _like(x: Tensor) -> Tensor:
    """New memory for [b, heads, s, d], whose kernel has [b, s, heads, d] in x's order."""
    return torch.empty_like(x.transpose(1, 2)).transpose(1, 2)


def _number(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, logs = _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _forward(q, k, v, out, logs, None, is_causal, scale)
    none = q.new_empty(0)
    return out, logs, none, none, q.shape[2], k.shape[2], _number(q), _number(q), none


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    begins_q: Tensor,
    begins_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    b, heads, s, width = q.shape
    made = _like(q), _like(k), _like(v)
    # Sums in float32, and the keys' gradients of all heads of a group: memory of this call alone.
    rows, wide = -(-s // ROWS) * ROWS, -(-width // 32) * 32
    space = [q.new_empty((b, heads, rows, 1 + wide), dtype=torch.float32)]
    if heads != k.shape[1]:
        space += [q.new_empty((b, k.shape[2], heads, width)) for _ in range(2)]
    _backward(grad, q, k, v, out, logs, made, None, is_causal, scale)
    return made


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    b, heads, s, _ = q.shape
    out = q.new_empty((b, s, heads, v.shape[-1])).transpose(1, 2)
    logs = q.new_empty((b, heads, -(-s // 32) * 32), dtype=torch.float32)
    _forward(q, k, v, out, logs, bias, is_causal, scale)
    return out, logs, _number(q), _number(q)


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logs: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    made = tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    _backward(grad, q, k, v, out, logs, made, bias, is_causal, scale)
    return *made, None


@cache
def register() -> Any:
    """Let torch have the kernels. Returns what has to be kept as long as they are."""
    kernels = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    given: dict[str, Callable[..., Any]] = {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }
    for name, function in given.items():
        kernels.impl(name, function, "CUDA")  # type: ignore[no-untyped-call]
    return kernels
