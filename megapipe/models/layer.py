"""One pre-norm transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.config.layers import layer_config
from megapipe.distributed.axis import Axis
from megapipe.models.attention.latent import LatentAttention
from megapipe.models.attention.layer import SelfAttention
from megapipe.models.mlp import MLP
from megapipe.models.moe.layer import MoE
from megapipe.models.norm import Norm
from megapipe.models.parts import parts_of
from megapipe.models.recompute import recompute, without_result
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.rng import dropout
from megapipe.tensor_parallel.saving import named


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `layer` is its number in the whole model, from 0.

    Overrides of the configuration that name this layer apply; they may leave out either half, or both.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        config = layer_config(config, layer)
        self.layer = layer
        self.hidden_dropout = config.hidden_dropout
        self.recompute_norms = config.recompute_norms
        self.recompute_mlp = config.recompute_moe if config.has_experts else config.recompute_mlp
        sharded, norm = config.sequence_parallel, parts_of(config).norm
        self.shares_sequence = tp if sharded else None
        self.input_layernorm = None if config.no_attention else norm(config, config.hidden, sum_over_tp=sharded)
        attention = LatentAttention if config.multi_latent_attention else SelfAttention
        self.self_attention = None if config.no_attention else attention(config, tp, layer)
        self.pre_mlp_layernorm = None if config.no_mlp else norm(config, config.hidden, sum_over_tp=sharded)
        self.mlp: nn.Module | None = None
        if not config.no_mlp:
            self.mlp = MoE(config, tp, layer) if config.has_experts else MLP(config, tp)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        delta = None
        if self.input_layernorm is not None and self.self_attention is not None:
            x, delta = self._half(x, delta, self.input_layernorm, self.self_attention, "attention_out")
        if self.pre_mlp_layernorm is not None and self.mlp is not None:
            mlp = partial(recompute, self.mlp) if self.recompute_mlp else self.mlp
            x, delta = self._half(x, delta, self.pre_mlp_layernorm, mlp, "mlp_out")
        return x if delta is None else x + delta

    def _half(
        self, x: Tensor, delta: Tensor | None, norm: Norm, half: Callable[[Tensor], Tensor], site: str
    ) -> tuple[Tensor, Tensor]:
        """The sum of what came in, and what this half of the layer adds to it."""
        if self.recompute_norms:
            x = x if delta is None else x + delta
            return x, self._drop(without_result(norm, x, half), site)
        x, y = norm.behind(x, delta)
        return x, self._drop(half(y), site)

    @eager  # it reads the layer's number, by which each layer would be compiled anew
    def _drop(self, x: Tensor, site: str) -> Tensor:
        if not self.training:
            return x
        return dropout(x, self.hidden_dropout, self.layer, site, tp=self.shares_sequence, dim=0)


def name_modules(stage: nn.Module) -> int:
    """Have every TransformerLayer of a stage say which of Megatron-LM's modules runs, for hooks on what it saves;
    returns how many there are."""
    layers = [module for module in stage.modules() if isinstance(module, TransformerLayer)]
    both = "behind", "forward"
    for layer in layers:
        attention, mlp = layer.self_attention, layer.mlp
        parts: list[tuple[str, nn.Module | None, tuple[str, ...]]] = [
            ("attn_norm", layer.input_layernorm, both),
            ("qkv_linear", attention, ("forward",)),
            ("core_attn", attention, ("attend",)),
            ("attn_proj", attention and attention.linear_proj, ("forward",)),
            ("mlp_norm", layer.pre_mlp_layernorm, both),
            ("expert_fc1", mlp.experts if isinstance(mlp, MoE) else None, ("forward",)),
        ]
        for name, part, methods in parts:
            for method in methods if part is not None else ():
                setattr(part, method, named(name, getattr(part, method)))
    return len(layers)


def compile_layers(stage: nn.Module, backend: str = "inductor") -> int:
    """Compile what lies between the matrix products of every TransformerLayer in a stage; returns how many there are.

    Linear layers, attention, dropout and recomputation stay as they are: they do more than their result says. Layers of
    one kind share their code.
    """
    from torch._dynamo import trace_rules  # imports the compiler, which only this run needs

    trace_rules.add("megapipe.tensor_parallel.eager")  # its wrappers, one code for many functions, would be compiled
    layers = [module for module in stage.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        layer.compile(backend=backend, dynamic=False)
    return len(layers)
