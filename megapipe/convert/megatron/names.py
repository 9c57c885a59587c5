"""Names of Megatron-LM's parameters, under its own layers and under Transformer Engine's, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout

_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""Transformer Engine keeps a norm in the linear layer that follows it."""

# The order in which a layer's modules were made: Megatron-LM's own, Transformer Engine's, and with its norms last. Of
# latents both keep the first.
_LATENT = " ".join(f"self_attention.linear_{name}_proj" for name in ("q", "q_down", "q_up", "kv_down", "kv_up"))
_NORMS = "self_attention.q_layernorm self_attention.kv_layernorm self_attention.k_layernorm"
_EXPERTS = "mlp.experts.linear_fc1 mlp.experts.linear_fc2 mlp.shared_experts"
_MLP = f"mlp.linear_fc2 {_EXPERTS} mlp.shared_experts.linear_fc1 mlp.shared_experts.linear_fc2"
_ORDERS = (
    f"input_layernorm self_attention.linear_proj self_attention.linear_qkv {_LATENT} {_NORMS} pre_mlp_layernorm "
    f"mlp.router mlp.linear_fc1 {_MLP}",
    f"self_attention.linear_proj input_layernorm self_attention.linear_qkv {_NORMS} pre_mlp_layernorm mlp.router "
    f"mlp.linear_fc1 {_MLP}",
    f"self_attention.linear_proj self_attention.linear_qkv input_layernorm {_NORMS} mlp.router mlp.linear_fc1 "
    f"pre_mlp_layernorm {_MLP}",
)


def common_name(name: str) -> str:
    """The name under Megatron-LM's own layers, which is ours."""
    name = name.removeprefix("module.").replace("mlp.experts.experts.", "mlp.experts.")
    for fused, apart in _FUSED.items():
        name = name.replace(fused, apart)
    return name


def stored_names(name: str, sparse: bool, latent: bool) -> list[str]:
    """The other way round, of a name in a layer: the keys in `torch_dist`, for either kind of layers.

    sparse, latent: has the layer experts, latent attention? Then the two kinds keep a norm under different names.
    """
    name = name.replace("mlp.experts.", "mlp.experts.experts.")
    fused = next((name.replace(apart, its) for its, apart in _FUSED.items() if name.startswith(apart)), name)
    if name.startswith(("self_attention.q_layernorm.", "self_attention.kv_layernorm.")) and not latent:
        return [name]
    both = sparse if name.startswith("pre_mlp_layernorm.") else latent
    return [fused, name] if both and fused != name else [fused]


def fused_name(name: str, sparse: bool, latent: bool) -> str:
    """The name under Transformer Engine's layers, of a name in a layer; see `stored_names`."""
    apart = {"input_layernorm.": latent, "pre_mlp_layernorm.": sparse}
    apart |= {f"self_attention.{norm}_layernorm.": not latent for norm in ("q", "kv")}
    its = {ours: fused for fused, ours in _FUSED.items() if not apart[ours]}
    return next((name.replace(ours, fused) for ours, fused in its.items() if name.startswith(ours)), name)


def joined(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """A tensor in the shape in which we save it, of what all tensor-parallel ranks have of it."""
    shaped = [part.reshape(layout.local(Axis(size=len(parts)))) for part in parts]
    return shaped[0] if layout.dim is None else torch.cat(shaped, layout.dim)


def orders(names: Iterable[str]) -> Iterator[list[str]]:
    """The ways in which these parameters of one model chunk may follow each other in its modules."""
    names = list(names)
    latent = any("linear_kv_down_proj" in name for name in names)
    for order in _ORDERS[:1] if latent else _ORDERS:
        places = {module: n for n, module in enumerate(order.split())}

        def place(name: str, places: dict[str, int] = places) -> tuple[int, int, int, str]:
            module, kind = name.rsplit(".", 1)
            if name.startswith("decoder.layers."):
                _, _, layer, module = module.split(".", 3)
                return 1, int(layer), places[module], "01"[kind == "bias"]
            ends = ("embedding.word_embeddings", "embedding.position_embeddings", "decoder.final_layernorm")
            at = ends.index(module) if module in ends else len(ends)
            return (0 if at < 2 else 2), at, 0, "01"[kind == "bias"]

        yield sorted(names, key=place)
