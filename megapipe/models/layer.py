"""The transformer layer: attention and an MLP, each with its norms and a residual sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.config.layers import layer_config
from megapipe.distributed.axis import Axis
from megapipe.models.attention.latent import LatentAttention
from megapipe.models.attention.layer import SelfAttention
from megapipe.models.delta.layer import GatedDeltaNet
from megapipe.models.mlp import MLP
from megapipe.models.moe.layer import MoE
from megapipe.models.norm import Norm
from megapipe.models.parts import parts_of
from megapipe.models.recompute import recompute, without_result
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.rng import dropout
from megapipe.tensor_parallel.saving import named
from megapipe.tensor_parallel.scaling import scaled


class TransformerLayer(nn.Module):
    """Attention and MLP in sequence: x += attention(norm(x)), then x += mlp(norm(x)).

    --norm-placement can put a norm after attention and after the MLP, in addition or instead. The
    configuration may override options for this layer, or remove its attention, its MLP or both.

    Args:
        layer: the layer's number in the whole model, from 0.
    """

    layer_scalar: Tensor | None

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        config = layer_config(config, layer)
        self.layer = layer
        self.hidden_dropout = config.hidden_dropout
        self.residual_multiplier = config.residual_multiplier
        self.recompute_norms = config.recompute_norms
        self.recompute_mlp = config.recompute_mlp
        if config.has_experts:
            self.recompute_mlp = config.recompute_moe
        norm = parts_of(config, tp).norm
        self.shares_sequence = tp if config.sequence_parallel else None

        def made(present: bool) -> Norm | None:
            return norm(config.hidden) if present else None

        has_attention = not config.no_attention
        has_mlp = not config.no_mlp
        self.input_layernorm = made(has_attention and config.has_pre_norm)
        self.self_attention: LatentAttention | SelfAttention | GatedDeltaNet | None = None
        if has_attention and config.has_delta:
            self.self_attention = GatedDeltaNet(config, tp)
        elif has_attention:
            attention = LatentAttention if config.multi_latent_attention else SelfAttention
            self.self_attention = attention(config, tp, layer)
        self.post_self_attn_layernorm = made(has_attention and config.has_post_norm)
        self.is_parallel = bool(config.parallel_attention_mlp) and has_attention and has_mlp
        shares_norm = self.is_parallel and config.parallel_attention_mlp == "one_norm"
        self.pre_mlp_layernorm = made(has_mlp and config.has_pre_norm and not shares_norm)
        self.mlp: nn.Module | None = None
        if has_mlp:
            self.mlp = MoE(config, tp, layer) if config.has_experts else MLP(config, tp)
        self.post_mlp_layernorm = made(has_mlp and config.has_post_norm)
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        x = self._in_parallel(x) if self.is_parallel else self._in_sequence(x)
        # A saved buffer is float32 in a model of any type.
        return x if self.layer_scalar is None else x * self.layer_scalar.to(x.dtype)

    def _in_sequence(self, x: Tensor) -> Tensor:
        """Return x + attention(norm(x)), and to that its mlp(norm(..)) added."""
        # The sum of one half waits for the next norm, so that a GPU does both in one kernel.
        delta = None
        if self.self_attention is not None:
            norms = self.input_layernorm, self.post_self_attn_layernorm
            x, delta = self._half(x, delta, norms, self.self_attention, "attention_out")
        if self.mlp is not None:
            norms = self.pre_mlp_layernorm, self.post_mlp_layernorm
            mlp = partial(recompute, self.mlp) if self.recompute_mlp else self.mlp
            x, delta = self._half(x, delta, norms, mlp, "mlp_out")
        if delta is None:
            return x
        return x + delta

    def _in_parallel(self, x: Tensor) -> Tensor:
        """Return x + attention(norm(x)) + mlp(norm(x)), where both norms may be the same one."""
        assert self.input_layernorm is not None
        assert self.self_attention is not None
        assert self.mlp is not None
        attention: Callable[[Tensor], Tensor] = self.self_attention
        mlp = partial(recompute, self.mlp) if self.recompute_mlp else self.mlp

        def attended(y: Tensor) -> Tensor:
            return self._drop(attention(y), "attention_out")

        def computed(y: Tensor) -> Tensor:
            return self._drop(mlp(y), "mlp_out")

        def normed(norm: Norm, half: Callable[[Tensor], Tensor]) -> Tensor:
            return without_result(norm, x, half) if self.recompute_norms else half(norm(x))

        if self.pre_mlp_layernorm is None:
            return x + normed(self.input_layernorm, lambda y: attended(y) + computed(y))
        both = normed(self.input_layernorm, attended) + normed(self.pre_mlp_layernorm, computed)
        return x + both

    def _half(
        self,
        x: Tensor,
        delta: Tensor | None,
        norms: tuple[Norm | None, Norm | None],
        half: Callable[[Tensor], Tensor],
        site: str,
    ) -> tuple[Tensor, Tensor]:
        """Return (x + delta, dropout(after(half(before(x + delta))))); the caller adds the two.

        The sum is left to the next norm, so that a GPU computes both in one kernel. The second
        result is multiplied by `residual_multiplier`, if the model has one.

        Args:
            delta: output of the half (attention or MLP) before, not yet added to x; None at the
                start of a layer.
            norms: the norms before and after this half; None for the identity.
            half: attention or MLP.
            site: the place in the layer, which seeds the dropout mask.
        """
        # The sum is kept in any case, as the residual stream, so recomputing the norm needs nothing
        # more.
        before, after = norms
        if before is None or self.recompute_norms:
            if delta is not None:
                x = x + delta
            out = half(x) if before is None else without_result(before, x, half)
        else:
            x, y = before.add_and_norm(x, delta)
            out = half(y)
        # Nobody keeps the result of this norm, so that there is nothing to recompute.
        if after is not None:
            out = after(out)
        return x, self._drop(out, site)

    # Not compiled: the layer's number would be a constant of the code, compiled for every layer.
    @eager
    def _drop(self, x: Tensor, site: str) -> Tensor:
        if self.training:
            x = dropout(x, self.hidden_dropout, self.layer, site, tp=self.shares_sequence, dim=0)
        return scaled(x, self.residual_multiplier)


def name_modules(stage: nn.Module) -> int:
    """Label the parts of every TransformerLayer with Megatron-LM's module names.

    Hooks on saved tensors read the label of the part that runs.

    Returns: the number of TransformerLayers in the stage.
    """
    layers = [module for module in stage.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        attention = layer.self_attention
        if isinstance(attention, GatedDeltaNet):
            projection: nn.Module | None = attention.out_proj
        else:
            projection = attention and attention.linear_proj
        experts = layer.mlp.experts if isinstance(layer.mlp, MoE) else None
        # (label, part, the methods that run it)
        parts: list[tuple[str, nn.Module | None, tuple[str, ...]]] = [
            # A norm runs by one method or the other, see Norm.add_and_norm.
            ("attn_norm", layer.input_layernorm, ("add_and_norm", "forward")),
            ("qkv_linear", attention, ("forward",)),
            ("core_attn", attention, ("attend",)),
            ("attn_proj", projection, ("forward",)),
            ("mlp_norm", layer.pre_mlp_layernorm, ("add_and_norm", "forward")),
            ("expert_fc1", experts, ("forward",)),
        ]
        for name, part, methods in parts:
            if part is None:
                continue
            for method in methods:
                setattr(part, method, named(name, getattr(part, method)))
    return len(layers)


def compile_layers(stage: nn.Module, backend: str = "inductor") -> int:
    """Compile every TransformerLayer of a stage with torch.compile.

    Linear layers, attention, dropout and recomputation stay uncompiled: they have side effects that
    a compiler would lose. Layers of one kind share their code.

    Args:
        stage: the stage, changed in place.
        backend: the backend of torch.compile.
    Returns: the number of TransformerLayers in the stage.
    """
    from torch._dynamo import trace_rules  # imports the compiler, which only this run needs

    # Every `eager` function has the same wrapper code; compiled, it would be compiled for each.
    trace_rules.add("megapipe.tensor_parallel.eager")
    layers = [module for module in stage.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        # In place: names of parameters stay, which a wrapped module would prefix.
        layer.compile(backend=backend, dynamic=False)
    return len(layers)
