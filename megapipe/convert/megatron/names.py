"""Names of Megatron-LM's parameters, under its own layers and under Transformer Engine's, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.convert.tensors import our_layouts
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout
from megapipe.models.gpt import WORD_EMBEDDINGS
from megapipe.partition.spans import LayerSpan

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
_PARTS = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "decoder.layers.",
    "decoder.final_layernorm",
    "mtp.layers.",
    "output_layer",
)
_ORDERS = (
    f"input_layernorm self_attention.linear_proj self_attention.linear_qkv {_LATENT} {_NORMS} pre_mlp_layernorm "
    f"mlp.router mlp.linear_fc1 {_MLP}",
    f"self_attention.linear_proj input_layernorm self_attention.linear_qkv {_NORMS} pre_mlp_layernorm mlp.router "
    f"mlp.linear_fc1 {_MLP}",
    f"self_attention.linear_proj self_attention.linear_qkv input_layernorm {_NORMS} mlp.router mlp.linear_fc1 "
    f"pre_mlp_layernorm {_MLP}",
)


_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)|mtp\.layers\.\d+\.mtp_model_layer\.(.+)")
_DEPTH = re.compile(r"(mtp\.layers\.\d+\.)transformer_layer\.")
_OF_DEPTH = "enorm", "hnorm", "eh_proj"
"""Modules of a depth of multi-token prediction before its layer."""


def common_name(name: str) -> str:
    """The name under Megatron-LM's own layers, which is ours."""
    name = name.removeprefix("module.").replace("mlp.experts.experts.", "mlp.experts.")
    name = _DEPTH.sub(r"\1mtp_model_layer.", name)
    for fused, apart in _FUSED.items():
        name = name.replace(fused, apart)
    return name


def in_layer(name: str, model: ModelConfig) -> tuple[int, str] | None:
    """The layer that a tensor is in, that of a depth being as the last, and its name there; None outside of layers."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return None
    return (int(match[1]), match[2]) if match[1] else (model.layers - 1, match[3])


def of_stage(model: ModelConfig, span: LayerSpan) -> dict[str, Layout]:
    """Layouts of the parameters that a stage of Megatron-LM has; `tied_to` names another's weight: that of a tied head,
    and the embedding where depths of multi-token prediction stand without it."""
    layouts = our_layouts(model, span)
    own = {name: layout for name, layout in layouts.items() if not layout.received}
    copies = [layout for layout in layouts.values() if layout.received and layout.tied_to == WORD_EMBEDDINGS]
    return own | {WORD_EMBEDDINGS: copies[0]} if copies and not span.embedding else own


def stored_names(name: str, sparse: bool, latent: bool) -> list[str]:
    """The other way round, of a name in a layer: the keys in `torch_dist`, for either kind of layers.

    sparse, latent: has the layer experts, latent attention? Then the two kinds keep a norm under different names.
    """
    name = name.replace("mlp.experts.", "mlp.experts.experts.")
    fused = next((name.replace(apart, its) for its, apart in _FUSED.items() if name.startswith(apart)), name)
    if name.startswith(("self_attention.q_layernorm.", "self_attention.kv_layernorm.")) and not latent:
        return [name]
    both = latent or (sparse and name.startswith("pre_mlp_layernorm."))
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
        inner = (*_OF_DEPTH, *order.split(), "final_layernorm")
        places = {module: n for n, module in enumerate(inner)}

        def place(name: str, places: dict[str, int] = places) -> tuple[int, int, int, str]:
            module, kind = name.rsplit(".", 1)
            at, layer = _PARTS.index(next(part for part in _PARTS if module.startswith(part))), 0
            if ".layers." in module:
                _, _, number, module = module.replace("mtp_model_layer.", "").split(".", 3)
                layer = int(number)
            return at, layer, places.get(module, 0), "01"[kind == "bias"]

        yield sorted(names, key=place)
