"""The work of a whole layer, with full recomputation if flags ask for it."""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import ModelConfig
from megapipe.plan.layers.attention import attention_work
from megapipe.plan.layers.load import RankLoad
from megapipe.plan.layers.mlp import mlp_work
from megapipe.plan.layers.work import Work


def layer_work(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work and memory of a transformer layer with this configuration.

    Args:
        load: the tokens of a microbatch on one rank, and the ranks that split the layer.
    """
    work = attention_work(model, load) + mlp_work(model, load)
    # Layers keep far more than the gradients within one layer, unless backward makes a part of
    # their activations again.
    if not (model.recompute_mlp or model.recompute_moe or model.recompute_granularity == "full"):
        work = replace(work, passing=0.0)
    # By `block` the layers of a stage differ, and a plan that may move layers counts none of them.
    if model.recompute_granularity != "full" or model.recompute_method == "block":
        return work
    # One input is kept for several layers. Slices keep the keys and values of all.
    together = model.recompute_num_layers or 1
    kept = load.bytes(model.hidden, 0)
    return replace(
        work,
        b=work.b + work.f,
        held=kept / together,
        # Backward makes again what these layers would have kept.
        passing=work.passing + together * work.held - kept,
        copied=0.0,
        scores_b=work.scores_b + work.scores_f,
        kept_keys=work.keys,
    )
