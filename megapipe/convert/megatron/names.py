"""Names of Megatron-LM's parameters and their order in its modules.

Megatron-LM has two kinds of layers, its own and Transformer Engine's, with different names for
norms. megapipe's names are the names of Megatron-LM's own layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

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
"""Transformer Engine keeps a norm in the linear layer that follows it: its name -> the norm's."""

_LATENT = """
self_attention.linear_q_proj
self_attention.linear_q_down_proj
self_attention.linear_q_up_proj
self_attention.linear_kv_down_proj
self_attention.linear_kv_up_proj
"""
_NORMS = """
self_attention.q_layernorm
self_attention.kv_layernorm
self_attention.k_layernorm
"""
_AFTER_FC1 = """
mlp.linear_fc2
mlp.experts.linear_fc1
mlp.experts.linear_fc2
mlp.shared_experts
mlp.shared_experts.linear_fc1
mlp.shared_experts.linear_fc2
"""
# The order in which the modules of a layer are made, which is the order of their parameters in
# files and in the optimizer. First, Megatron-LM's own layers. Latent attention has this order in
# both kinds of layers.
_OWN_LAYERS = f"""
input_layernorm
self_attention.linear_proj
self_attention.linear_qkv
{_LATENT}
{_NORMS}
pre_mlp_layernorm
mlp.router
mlp.linear_fc1
{_AFTER_FC1}
"""
# Transformer Engine's layers, if a linear layer has the weight of its norm before its own.
_TE_LAYERS = f"""
self_attention.linear_proj
input_layernorm
self_attention.linear_qkv
{_NORMS}
pre_mlp_layernorm
mlp.router
mlp.linear_fc1
{_AFTER_FC1}
"""
# The same, if a linear layer has the weight of its norm after its own.
_TE_NORMS_LAST = f"""
self_attention.linear_proj
self_attention.linear_qkv
input_layernorm
{_NORMS}
mlp.router
mlp.linear_fc1
pre_mlp_layernorm
{_AFTER_FC1}
"""
_ORDERS = (_OWN_LAYERS, _TE_LAYERS, _TE_NORMS_LAST)
_PARTS = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "decoder.layers.",
    "decoder.final_layernorm",
    "mtp.layers.",
    "output_layer",
)
"""Parts of a model in the order of their modules."""
_BEFORE_LAYER = ("enorm", "hnorm", "eh_proj")
"""Modules of a multi-token prediction depth before its layer."""

_DEPTH_LAYER = "mtp_model_layer."
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)|mtp\.layers\.\d+\.mtp_model_layer\.(.+)")
_DEPTH = re.compile(r"(mtp\.layers\.\d+\.)transformer_layer\.")


def common_name(name: str) -> str:
    """Return megapipe's name of a parameter.

    Args:
        name: the tensor's name in Megatron-LM's own layers or in Transformer Engine's.
    """
    # "module." is a wrapper's; the second "experts." is in the keys of `torch_dist` only.
    name = name.removeprefix("module.").replace("mlp.experts.experts.", "mlp.experts.")
    name = _DEPTH.sub(rf"\1{_DEPTH_LAYER}", name)
    for fused, norm in _FUSED.items():
        name = name.replace(fused, norm)
    return name


def in_layer(name: str, model: ModelConfig) -> tuple[int, str] | None:
    """Return (layer's number, name within the layer) of a tensor.

    A module of multi-token prediction has one layer, of the same kind as the model's last layer,
    and gets that layer's number.

    Args:
        name: megapipe's name of the tensor.
        model: the configuration, which gives the number of layers.
    Returns: None for a tensor outside of layers.
    """
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return None
    if match[1]:
        return int(match[1]), match[2]
    return model.layers - 1, match[3]


def stage_layouts(model: ModelConfig, span: LayerSpan) -> dict[str, Layout]:
    """Return {name: layout} of the parameters that a pipeline stage of Megatron-LM has.

    A stage may have a copy of another stage's weight: a tied head, or the embedding that
    multi-token prediction reads. The layout's `tied_to` then names the original.

    Args:
        span: the stage's layers, and whether it has the embedding and the loss.
    """
    layouts = our_layouts(model, span)
    own = {name: layout for name, layout in layouts.items() if not layout.received}
    if span.embedding:
        return own
    # All depths read one copy of the embedding, which has the embedding's own name there.
    for layout in layouts.values():
        if layout.received and layout.tied_to == WORD_EMBEDDINGS:
            return own | {WORD_EMBEDDINGS: layout}
    return own


def stored_names(name: str, sparse: bool, latent: bool) -> list[str]:
    """Return the keys under which a layer's parameter is written to a `torch_dist` checkpoint.

    A norm may have two keys, because Megatron-LM's own layers and Transformer Engine's look for it
    under different ones.

    Args:
        name: megapipe's name within the layer.
        sparse: whether the layer has experts.
        latent: whether the layer has multi-head latent attention.
    """
    name = name.replace("mlp.experts.", "mlp.experts.experts.")
    # Without latents these norms are of a head's queries and keys, and no linear layer has them.
    of_heads = name.startswith(("self_attention.q_layernorm.", "self_attention.kv_layernorm."))
    if of_heads and not latent:
        return [name]
    fused = _fused(name)
    # Megatron-LM's own layers read a norm under Transformer Engine's key, too, except the norms of
    # layers with latents and the norm before experts.
    both = latent or (sparse and name.startswith("pre_mlp_layernorm."))
    return [fused, name] if both and fused != name else [fused]


def fused_name(name: str, sparse: bool, latent: bool) -> str:
    """Return a parameter's name in one of Transformer Engine's layers.

    There, a norm belongs to the linear layer after it, if only one layer reads it. For example,
    input_layernorm.weight becomes self_attention.linear_qkv.layer_norm_weight.

    Args:
        name: megapipe's name within the layer.
        sparse: whether the layer has experts.
        latent: whether the layer has multi-head latent attention.
    """
    # A norm stays a module of its own if no single linear layer follows it.
    separate = {
        "input_layernorm.": latent,
        "pre_mlp_layernorm.": sparse,
        "self_attention.q_layernorm.": not latent,
        "self_attention.kv_layernorm.": not latent,
    }
    for norm, is_separate in separate.items():
        if is_separate and name.startswith(norm):
            return name
    return _fused(name)


def _fused(name: str) -> str:
    """Return a norm's name as part of the linear layer after the norm; other names stay."""
    for fused, norm in _FUSED.items():
        if name.startswith(norm):
            return name.replace(norm, fused)
    return name


def joined(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """Join the slices of all tensor-parallel ranks to the whole tensor, in its saved shape.

    Of a tensor that no rank splits, the first rank's copy is returned.

    Args:
        parts: one slice for each rank, of any shape with the right number of elements.
        layout: the parameter's layout, which gives the saved shape and the split dimension.
    """
    local = layout.local(Axis(size=len(parts)))
    shaped = [part.reshape(local) for part in parts]
    return shaped[0] if layout.dim is None else torch.cat(shaped, layout.dim)


def orders(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the orders in which Megatron-LM's modules may have a model chunk's parameters.

    Megatron-LM's own layers give the first order, Transformer Engine's the other two. Models with
    latent attention have only the first.

    Args:
        names: megapipe's names of the parameters.
    """
    names = list(names)
    latent = any("linear_kv_down_proj" in name for name in names)
    for order in _ORDERS[:1] if latent else _ORDERS:
        modules = (*_BEFORE_LAYER, *order.split(), "final_layernorm")
        numbers = {module: n for n, module in enumerate(modules)}
        yield sorted(names, key=partial(_place, numbers=numbers))


def _place(name: str, numbers: Mapping[str, int]) -> tuple[int, int, int, bool]:
    """Return a key that sorts a model chunk's parameters in the order of its modules.

    Args:
        name: megapipe's name of the parameter.
        numbers: {name of a module within a layer: its position in the layer}.
    Returns: (part of the model, layer, position of the module in the layer, whether it is a bias).
    """
    module, kind = name.rsplit(".", 1)
    part = next(n for n, start in enumerate(_PARTS) if module.startswith(start))
    layer = 0
    if ".layers." in module:
        _, _, number, module = module.replace(_DEPTH_LAYER, "").split(".", 3)
        layer = int(number)
    return part, layer, numbers.get(module, 0), kind == "bias"
