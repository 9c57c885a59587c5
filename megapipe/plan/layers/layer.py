"""The work of a whole layer, with full recomputation if flags ask for it."""

from __future__ import annotations

from collections.abc import Sequence
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
    # Layers that are made again together keep one input, but how many are together depends on their
    # stage: see `ModelWork.together`. Slices keep the keys and values of all.
    kept = load.bytes(model.hidden, 0)
    return replace(
        work,
        b=work.b + work.f,
        held=kept,
        passing=work.passing - kept,
        again=work.held,
        copied=0.0,
        scores_b=work.scores_b + work.scores_f,
        kept_keys=work.keys,
    )


def passing(layers: Sequence[Work], together: int) -> float:
    """Return the bytes that F and B of a stage's layers need only while they run.

    Args:
        layers: the work of each layer of the stage.
        together: number of layers that B makes again at once. A stage with fewer makes all of them.
    """
    if together == 1:
        return max((layer.passing + layer.again for layer in layers), default=0.0)
    most = 0.0
    for first in range(0, len(layers), together):
        group = layers[first : first + together]
        made = sum(layer.again for layer in group)
        most = max(most, made + max(layer.passing for layer in group))
    return most
