"""A model by its kinds of parts, each counted as a layer that has nothing else.

`--parts` prints it below the plan: what attention, an MLP, experts, the shared expert and both ends cost of a step.
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

_HEADER = ("part", "layers", "parameters", "of a token", "forward GFLOP", "of the work", "held MiB", "sent MiB")


@dataclass(frozen=True)
class Part:
    """A kind of part. Attributes:
    layers: how many have it; both ends are no layers.
    work: of all of them, for a microbatch on a rank that had them all.
    sent: bytes of a microbatch, from a rank to the others that share experts.
    """

    name: str
    layers: int
    work: Work
    sent: float = 0.0


class Layer(NamedTuple):
    """A part of a layer by itself. Attributes:
    model: its only layer has the part.
    without: that has all of it but the part, where it has more.
    """

    name: str
    model: ModelConfig
    without: ModelConfig | None = None


def alone(model: ModelConfig) -> Iterator[Layer]:
    """The parts of a layer."""
    bare = replace(model, per_layer_overrides=None, num_layers=1, moe_layer_freq="1", mtp_num_layers=None)
    if not model.no_attention:
        yield Layer("latent attention" if model.multi_latent_attention else "attention", replace(bare, no_mlp=True))
    if model.no_mlp:
        return
    mlp = replace(bare, no_attention=True)
    if not model.has_experts:
        yield Layer("MLP", mlp)
        return
    routed = replace(mlp, moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False)
    yield Layer("router and experts", routed)
    if model.moe_shared_expert_intermediate_size:
        yield Layer("shared expert", mlp, routed)


def parts(config: Config) -> list[Part]:
    """Return the parts of a model in the order of their first layers."""
    model, par = config.model, config.parallel
    tokens = config.batch.sequence * config.batch.micro_batch
    forward, backward, _ = expert_bytes(model, par, tokens, element_bytes=config.precision.element_bytes)
    sent = forward + backward

    @cache
    def work(part: Layer) -> Work:
        whole = pieces_of(config, part.model).layers[0]
        if part.without is None:
            return whole
        return Work(*map(sub, vars(whole).values(), vars(pieces_of(config, part.without).layers[0]).values()))

    found: dict[str, list[Work]] = {}
    for layer in range(model.layers):
        for part in alone(layer_config(model, layer)):
            found.setdefault(part.name, []).append(work(part))
    middle = [
        Part(name, len(works), sum(works, Work()), sent * len(works) * (name == "router and experts"))
        for name, works in found.items()
    ]
    whole = pieces_of(config, model)
    depths = [
        Part(f"predicts {depth + 1} further", 0, work, sent * layer_config(model, model.layers).has_experts)
        for depth, work in enumerate(whole.depths)
    ]
    return [Part("embedding", 0, whole.embedding), *middle, Part("head and loss", 0, whole.head), *depths]


def parts_table(found: list[Part]) -> str:
    """Return a line for each part, and for all of them."""
    whole = Part("all", 0, sum((part.work for part in found), Work()), sum(part.sent for part in found))
    rows = [
        (
            part.name,
            str(part.layers or "-"),
            f"{part.work.parameters:,}",
            f"{part.work.parameters - part.work.unused:,}",
            f"{part.work.f * 1e-9:,.4g}",
            f"{part.work.time / (whole.work.time or 1):.1%}",
            f"{part.work.held / MIB:,.4g}",
            f"{part.sent / MIB:,.4g}",
        )
        for part in [*found, whole]
    ]
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (_HEADER, *rows)
    )
