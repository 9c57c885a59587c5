"""The gated delta net, which stands in place of attention in some layers (Qwen3-Next, Qwen3.5).

Heads are split over tensor-parallel ranks. Context-parallel ranks exchange tokens for heads.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, layout_of, parameter, set_layout
from megapipe.models.attention.context import exchange
from megapipe.models.delta.rule import convolved, gated_delta_rule, numbers_of, unit
from megapipe.models.norm import Norm
from megapipe.models.parts import parts_of
from megapipe.models.recompute import from_inputs
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.rng import current_microbatch

_LARGEST_RATE = 16.0
"""Largest initial rate of a state's decay; the smallest is 1, as in Megatron-LM."""


class Convolution(nn.Module):
    """The taps of a causal convolution of each channel, [heads, channels, taps]."""

    def __init__(self, config: ModelConfig, tp: Axis) -> None:
        super().__init__()
        heads = config.linear_num_key_heads
        taps = config.linear_conv_kernel_dim
        full = (heads, config.delta_mixed // heads, taps)
        # The deviation of torch's own convolutions, which are uniform within 1 / sqrt(taps).
        layout = Layout(full, 0, std=(3 * taps) ** -0.5)
        self.weight = parameter(layout, heads // tp.size, *full[1:])


class GatedDeltaNet(nn.Module):
    """Projection, convolution, gated delta rule, gated norm, output projection.

    Each key head has r value heads. The rows of in_proj are ordered by key head: its query, its
    key, its r value heads, their r gates of the output, the r gates beta, and the r inputs of
    decays. A tensor-parallel slice is then a set of whole heads.

    Between the projections only the output of in_proj is kept for backward, which computes the
    rest again.
    """

    def __init__(self, config: ModelConfig, tp: Axis) -> None:
        super().__init__()
        self.config = config
        parts = parts_of(config, tp)
        heads = config.linear_num_key_heads
        values = config.linear_num_value_heads
        self.heads = heads // tp.size
        self.in_proj = parts.column(config.hidden, config.delta_rows, bias=False)
        keys = config.linear_key_head_dim
        each = values // heads
        rows = each * config.linear_value_head_dim
        # Muon orthogonalises each of these matrices by itself.
        weight = self.in_proj.weight
        fused = (keys, keys, rows, rows, each, each)
        set_layout(weight, replace(layout_of(weight), fused=fused))
        self.conv1d = Convolution(config, tp)
        # A number for each value head of this rank.
        layout = Layout((values,), 0, log_of=(1.0, _LARGEST_RATE))
        self.A_log = parameter(layout, values // tp.size)
        self.dt_bias = parameter(Layout((values,), 0, mean=1.0), values // tp.size)
        # Its weight is never stored minus 1, and each rank norms its own heads.
        plain = replace(config, apply_layernorm_1p=False, normalization="RMSNorm")
        self.out_norm = Norm(plain, config.linear_value_head_dim, sum_over_tp=True)
        self.out_proj = parts.row(config.delta_values, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated delta net to this rank's tokens.

        Args:
            x: [s/c, b, h]; under sequence parallelism [s/(c t), b, h].
        Returns: the same shape.
        """
        return self.out_proj(self.attend(self.in_proj(x)))  # type: ignore[no-any-return]

    @eager
    def attend(self, x: Tensor) -> Tensor:
        """Return the input of out_proj for the output x of in_proj.

        Args:
            x: [s/c, b, rows of in_proj / t].
        Returns: [s/c, b, channels of all value heads / t].
        """
        stream = current_microbatch()
        documents = stream.documents
        numbers = None
        if documents is not None and documents.isolate:
            numbers = numbers_of(documents, x.device)
        x = torch.unflatten(x, -1, (self.heads, -1))
        weights: list[Tensor] = [self.conv1d.weight, self.A_log, self.dt_bias]
        cp = stream.cp
        if cp.size > 1:
            x = exchange(x, cp, True)
            # The weights of the heads that this rank has now.
            weights = [weight.chunk(cp.size)[cp.rank] for weight in weights]
        core = partial(_core, self.config, numbers)
        out = from_inputs(core, x, *weights, self.out_norm.weight)
        if cp.size > 1:
            out = exchange(out, cp, False)
        return out.flatten(2)


def _core(
    config: ModelConfig,
    numbers: Tensor | None,
    x: Tensor,
    taps: Tensor,
    rates: Tensor,
    offsets: Tensor,
    norm: Tensor,
) -> Tensor:
    """Return the normed and gated outputs of whole sequences, [s, b, heads, r x dv].

    Everything is computed in float32, or in float64 for a float64 model. `heads` counts key heads,
    and each has r value heads.

    Args:
        numbers: [b, s], the index of each token's document in its sequence; None for a single one.
        x: the output of in_proj, [s, b, heads, channels]. The channels of a key head are its query,
            key and values, and for its value heads gates, betas and inputs of decays.
        taps: weights of the convolution, [heads, channels, taps].
        rates: A_log, the logarithms of the rates of decay, [heads x r].
        offsets: dt_bias, which is added to the inputs of decays, [heads x r].
        norm: the weight of the norm of value heads, [dv].
    """
    dtype = x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    x, taps, rates, offsets, norm = (part.to(wide) for part in (x, taps, rates, offsets, norm))
    keys = config.linear_key_head_dim
    width = config.linear_value_head_dim
    each = config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [taps.shape[1], each * width, each, each]
    mixed, z, beta, change = torch.split(x, sizes, -1)

    mixed = F.silu(convolved(mixed, taps, numbers))
    q, k, v = torch.split(mixed, [keys, keys, each * width], -1)
    speed = F.softplus(change + offsets.view(-1, each))
    decay = -rates.view(-1, each).exp() * speed
    # To [b, heads, r, s, channels].
    v = torch.unflatten(v, -1, (each, width)).permute(1, 2, 3, 0, 4)
    q = unit(q).permute(1, 2, 0, 3)
    k = unit(k).permute(1, 2, 0, 3)
    decay = decay.permute(1, 2, 3, 0)
    beta = beta.sigmoid().permute(1, 2, 3, 0)

    rule = _fused_rule if x.is_cuda and dtype != wide and _has_kernel() else gated_delta_rule
    out = rule(q, k, v, decay, beta, numbers).permute(3, 0, 1, 2, 4)
    out = F.rms_norm(out, (width,), norm, config.norm_epsilon)
    return (out * F.silu(torch.unflatten(z, -1, (each, width)))).flatten(-2).to(dtype)


@cache
def _has_kernel() -> bool:
    """Return whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


def _fused_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, numbers: Tensor | None
) -> Tensor:
    """Return the result of `gated_delta_rule`, whose arguments these are.

    flash-linear-attention's kernel computes it in bfloat16.

    No GPU has run this yet.
    """
    kernel: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    b, heads, each, s, width = v.shape

    def row(part: Tensor) -> Tensor:
        """Return [1, b x s, value heads, ..] of [b, heads, r, s, ..]."""
        return part.movedim(3, 1).flatten(2, 3).flatten(0, 1)[None].contiguous()

    # The kernel has no groups of heads: each value head gets its own query and key.
    q = row(q[:, :, None].expand(-1, -1, each, -1, -1)).to(torch.bfloat16)
    k = row(k[:, :, None].expand(-1, -1, each, -1, -1)).to(torch.bfloat16)
    v = row(v).to(torch.bfloat16)
    # All sequences are one row, and a state starts at 0 at each of these places.
    begins = torch.zeros(b, s, dtype=torch.bool, device=v.device)
    begins[:, 0] = True
    if numbers is not None:
        begins[:, 1:] |= numbers[:, 1:] != numbers[:, :-1]
    places = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=b * s)
    out, _ = kernel(q, k, v, g=row(decay), beta=row(beta), cu_seqlens=places)
    return out.view(b, s, heads, each, width).permute(0, 2, 3, 1, 4).float()  # type: ignore[no-any-return]
