"""Count the parameters, work and memory of each kind of part of a model.

Each part is counted as a layer that has nothing else. `--parts` prints the table below the plan:
attention, MLP, experts, shared expert, embedding and head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from operator import sub
from typing import NamedTuple

from megapipe.config import Config, ModelConfig
from megapipe.config.layers import layer_config
from megapipe.plan import Work, pieces_of
from megapipe.plan.context import MIB, expert_bytes

# "Of a token" leaves out experts that a token does not reach.
_HEADER = (
    "part",
    "layers",
    "parameters",
    "of a token",
    "forward GFLOP",
    "of the work",
    "held MiB",
    "sent MiB",
)


@dataclass(frozen=True)
class ModelPart:
    """A line of the table of --parts: one part of the model, such as attention, summed over layers.

    Attributes:
        name: the part, such as "attention" or "head and loss".
        layers: the number of layers that have the part; 0 for a part that is in no layer, such as
            the embedding.
        work: the FLOPs, bytes and parameters of the part in all layers, for one microbatch.
        sent: bytes of a microbatch that a rank sends to the ranks with the experts.
    """

    name: str
    layers: int
    work: Work
    sent: float = 0.0


class Layer(NamedTuple):
    """A part of a layer as a one-layer model, so that the work of the part can be counted.

    Attributes:
        name: the part, such as "attention".
        model: a model of one layer that has the part.
        without: a model whose work is subtracted; None to subtract nothing. For a shared expert, it
            is the layer without the expert.
    """

    name: str
    model: ModelConfig
    without: ModelConfig | None = None


def alone(model: ModelConfig) -> Iterator[Layer]:
    """Yield the parts of a layer: attention, and then the MLP or the experts.

    Args:
        model: the configuration of the layer.
    """
    # One layer like this one, without what only belongs to the rest of the model.
    bare = replace(
        model, per_layer_overrides=None, num_layers=1, moe_layer_freq="1", mtp_num_layers=None
    )
    if model.has_delta:
        bare = replace(bare, linear_attention_freq="[1]")
    if not model.no_attention:
        name = "attention"
        if model.has_delta:
            name = "gated delta net"
        elif model.multi_latent_attention:
            name = "latent attention"
        yield Layer(name, replace(bare, no_mlp=True))
    if model.no_mlp:
        return
    mlp = replace(bare, no_attention=True)
    if not model.has_experts:
        yield Layer("MLP", mlp)
        return
    # The shared expert cannot stand alone. It is the difference to a layer without it.
    routed = replace(mlp, moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False)
    yield Layer("router and experts", routed)
    if model.moe_shared_expert_intermediate_size:
        yield Layer("shared expert", mlp, routed)


def parts(config: Config) -> list[ModelPart]:
    """Return the lines of the table: embedding, parts of layers, head, multi-token prediction."""
    model = config.model
    tokens = config.batch.sequence * config.batch.micro_batch
    element = config.precision.element_bytes
    forward, backward, _ = expert_bytes(model, config.parallel, tokens, element_bytes=element)
    # Each layer of experts sends tokens to other ranks, in both directions.
    sent = forward + backward

    # Most layers are equal, and each count builds a model.
    @cache
    def work(part: Layer) -> Work:
        whole = pieces_of(config, part.model).layers[0]
        if part.without is None:
            return whole
        rest = pieces_of(config, part.without).layers[0]
        return Work(*map(sub, vars(whole).values(), vars(rest).values()))

    found: dict[str, list[Work]] = {}
    for layer in range(model.layers):
        for part in alone(layer_config(model, layer)):
            found.setdefault(part.name, []).append(work(part))
    middle = []
    for name, works in found.items():
        bytes_of_layer = sent if name == "router and experts" else 0.0
        middle.append(ModelPart(name, len(works), sum(works, Work()), bytes_of_layer * len(works)))
    whole = pieces_of(config, model)
    # A depth of multi-token prediction is a layer like the last ones.
    sent_of_depth = 0.0
    if layer_config(model, model.layers).has_experts:
        sent_of_depth = sent
    depths = [
        ModelPart(f"predicts {depth + 1} further", 0, work, sent_of_depth)
        for depth, work in enumerate(whole.depths)
    ]
    head = ModelPart("head and loss", 0, whole.head)
    if model.tied:
        # Its weight is the embedding's, and counts there.
        own = whole.head.parameters - (model.padded_vocab_size or 0) * model.hidden
        head = ModelPart("head (tied) and loss", 0, replace(whole.head, parameters=own))
    return [ModelPart("embedding", 0, whole.embedding), *middle, head, *depths]


def parts_table(found: list[ModelPart]) -> str:
    """Return the table as text: a line for each part, and one for their sum."""
    work = sum((part.work for part in found), Work())
    # "All" counts no layers: a layer has several parts.
    whole = ModelPart("all", 0, work, sum(part.sent for part in found))
    rows = [_HEADER, *(_cells(part, whole) for part in [*found, whole])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    # Names are aligned at the left, numbers at the right.
    for row in rows:
        name, *rest = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([name.strip().ljust(widths[0]), *rest]))
    return "\n".join(lines)


def _cells(part: ModelPart, whole: ModelPart) -> tuple[str, ...]:
    """Return the cells of a part's line.

    Args:
        whole: the sum of all parts, by which fractions of the work are computed.
    """
    work = part.work
    return (
        part.name,
        str(part.layers or "-"),
        f"{work.parameters:,}",
        f"{work.parameters - work.unused:,}",
        f"{work.f * 1e-9:,.4g}",
        f"{work.time / (whole.work.time or 1):.1%}",
        f"{work.held / MIB:,.4g}",
        f"{part.sent / MIB:,.4g}",
    )
