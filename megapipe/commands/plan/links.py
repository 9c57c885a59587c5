"""Predict the seconds of communication from the speeds of a device and its links.

Collectives are taken as rings: over n ranks each rank sends (n-1)/n of the bytes, and twice as much
for an all-reduce. Communication of context parallelism and experts is never hidden by computation.
Communication of tensor parallelism is hidden with --tp-comm-overlap alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from math import inf
from operator import add
from pathlib import Path

from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError
from megapipe.plan import Plan
from megapipe.plan.context import context_bytes, expert_bytes, tensor_bytes
from megapipe.schedule import Costs
from megapipe.schedule.costs import PerStage
from megapipe.tensor_parallel.pieces import PIECES


@dataclass(frozen=True)
class Device:
    """The speeds of a device; all devices of a run are equal.

    Attributes:
        flops: FLOP/s that matrix products of this model reach, not the number of a data sheet.
        node: the number of devices that the fast links join.
        inside: bytes per second that a device sends within a node.
        outside: bytes per second that a device sends to another node.
        latency: seconds of each message and of each collective.
        overhead: seconds that each pass takes in addition to its work.
    """

    flops: float = 4e14
    node: int = 8
    inside: float = 3e11
    outside: float = 4e10
    latency: float = 1e-5
    overhead: float = 4e-4

    @property
    def links(self) -> str:
        """Return the speeds of the links in words."""
        near = f"{self.inside / 1e9:g} GB/s among {self.node}"
        far = f"{self.outside / 1e9:g} GB/s beyond"
        return f"{near}, {far}, {self.latency * 1e6:g} us a message"

    def seconds(self, sent: float, extent: int, calls: int = 1) -> float:
        """Return the seconds of collectives.

        Args:
            sent: bytes that each rank sends.
            extent: devices from the first to the last rank, which may be far from each other.
            calls: the number of collectives.
        """
        if not sent:
            return 0.0
        return sent / self.speed(extent) + calls * self.latency

    def speed(self, extent: int) -> float:
        """Return the bytes per second that a device sends to another, `extent` devices away."""
        return self.inside if extent <= self.node else self.outside


NOTHING = Device(inside=inf, outside=inf, latency=0.0)
"""A device whose links take no time."""


def load_device(path: str) -> Device:
    """Read a JSON object with some fields of Device; the others keep their defaults.

    Raises: ConfigError that names the file and the field.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--device {path} cannot be read: {error}") from None
    names = [field.name for field in fields(Device)]
    if not isinstance(given, dict) or given.keys() - set(names):
        raise ConfigError(
            f"--device {path} must be a JSON object with only {', '.join(names)}, "
            'such as {"flops": 4e14, "node": 8}.'
        )
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        may_be_zero = name in ("latency", "overhead")
        if not is_number or not (1e-30 <= value <= 1e30 or (value == 0 and may_be_zero)):
            raise ConfigError(
                f"--device {path}: {name} must be a number above 0, from 1e-30 to 1e30, "
                f"got {json.dumps(value)[:100]}."
            )
    return Device(**given)


def with_messages(costs: Costs, plan: Plan, config: Config, device: Device) -> Costs:
    """Return the costs in seconds with communication added.

    Passes get their collectives of tensor, context and expert parallelism. Messages between stages
    and, with sharded weights, gathers and reduce-scatters get times of their own.

    Args:
        costs: seconds of stages that only compute.
    """
    forward, backward = _of_layer(costs, plan, config, device)
    layers = [*plan.counts, *(1 for _ in plan.pieces.depths)]
    computed_f = costs.f
    computed_b = costs.b
    assert isinstance(computed_f, tuple)
    assert isinstance(computed_b, tuple)
    f = tuple(x + n * forward for x, n in zip(computed_f, layers, strict=True))
    b = tuple(x + n * backward for x, n in zip(computed_b, layers, strict=True))
    if "sharding" in plan.own:
        costs = _with_shards(costs, plan, config, device)
    return replace(
        costs,
        f=f,
        b=b,
        attention_f=_rescaled(costs.attention_f, computed_f, f),
        attention_b=_rescaled(costs.attention_b, computed_b, b),
        comm=_message(plan, config, device) if len(plan.schedule.ranks) > 1 else 0.0,
    )


def _of_layer(costs: Costs, plan: Plan, config: Config, device: Device) -> tuple[float, float]:
    """Return the seconds that a layer's forward and backward wait for collectives."""
    model = config.model
    t = config.parallel.tensor_model_parallel_size
    c = config.parallel.context_parallel_size
    tokens = config.batch.sequence * config.batch.micro_batch
    element = config.precision.element_bytes
    forward = 0.0
    backward = 0.0
    if t > 1:
        f, b = tensor_bytes(model, tokens // c, ranks=t, element_bytes=element)
        # Without sequence parallelism both directions have two all-reduces.
        if not model.sequence_parallel:
            b = f
        again = f * (model.recompute_granularity == "full")
        forward = device.seconds(f, t, 4)
        backward = device.seconds(b + again, t, 6)
        if config.overlaps_tp:
            forward = _not_hidden(forward, _mean_of_layer(costs.f, plan), model, t)
            backward = _not_hidden(backward, _mean_of_layer(costs.b, plan), model, t)
    if c > 1:
        f, b = context_bytes(model, tokens, ranks=c, tp=t, element_bytes=element)
        forward += device.seconds(f, t * c)
        backward += device.seconds(b, t * c, 2)
    if model.has_experts:
        f, b, _ = expert_bytes(model, config.parallel, tokens, element_bytes=element)
        # The costs do not say which layers have experts, so each layer gets the mean.
        sparse = sum(map(model.has_experts_in, range(model.layers))) / model.layers
        expert_ranks = config.parallel.expert_model_parallel_size * config.parallel.etp
        extent = min(_stage_extent(config), expert_ranks)
        forward += sparse * device.seconds(f, extent, 4)
        backward += sparse * device.seconds(b, extent, 4)
    return forward, backward


def _stage_extent(config: Config) -> int:
    """Return the devices from one rank of a stage to the same rank of the next stage."""
    par = config.parallel
    extent = par.context_parallel_size * par.tensor_model_parallel_size
    # In Megatron's order of ranks, data parallel comes before pipeline parallel.
    return extent if par.use_tp_pp_dp_mapping else extent * config.data_parallel_size


def _message(plan: Plan, config: Config, device: Device) -> float:
    """Return the seconds of a message between two stages."""
    model = config.model
    tokens = config.batch.sequence * config.batch.micro_batch
    split = config.parallel.tensor_model_parallel_size if model.sequence_parallel else 1
    size = tokens / config.parallel.context_parallel_size / split
    size = size * model.hidden * config.precision.element_bytes
    # Slices may differ in length; a message has the mean.
    size /= len(plan.schedule.cuts) or 1
    return device.seconds(size, 2 * _stage_extent(config))


def _with_shards(costs: Costs, plan: Plan, config: Config, device: Device) -> Costs:
    """Return the costs with the seconds to gather weights and to reduce-scatter gradients."""
    n = config.weight_replicas
    extent = replicas(plan, config)

    def seconds(size: float) -> float:
        return device.seconds((n - 1) / n * size, extent)

    # A stage that uses the first stage's embedding gathers it too.
    weights = map(add, _per_stage(costs.mem_a), _per_stage(costs.mem_lent))
    gradients = _per_stage(costs.mem_g)
    return replace(costs, a=tuple(map(seconds, weights)), g=tuple(map(seconds, gradients)))


def _per_stage(sizes: PerStage) -> tuple[float, ...]:
    return sizes if isinstance(sizes, tuple) else (sizes,)


def _mean_of_layer(times: PerStage, plan: Plan) -> float:
    """Return the mean seconds of a layer's pass, with its part of embedding and head."""
    stages = plan.schedule.placement.chain
    whole = sum(times[:stages]) if isinstance(times, tuple) else times * stages
    return whole / sum(plan.counts)


def _not_hidden(sent: float, computed: float, model: ModelConfig, ranks: int) -> float:
    """Return the part of a layer's collectives that its products do not hide.

    With --tp-comm-overlap a product is computed in pieces, while the collective of another piece
    runs. The first or last piece has nothing to hide with.
    """
    pieces = ranks if model.sequence_parallel else PIECES
    last = 0.0 if model.sequence_parallel else sent / PIECES
    return last + max(0.0, sent - last - (1 - 1 / pieces) * computed)


def replicas(plan: Plan, config: Config) -> int:
    """Return the devices from the first to the last rank that has the same weights."""
    ranks = plan.schedule.placement.num_ranks
    return config.world_size if config.parallel.use_tp_pp_dp_mapping else config.world_size // ranks


def _rescaled(share: PerStage, old: tuple[float, ...], new: tuple[float, ...]) -> PerStage:
    """Return a share of the old times as a share of the new, longer times."""
    if not isinstance(share, tuple):
        return share
    times = zip(share, old, new, strict=True)
    return tuple(part * x / y if y else 0.0 for part, x, y in times)


def sums(plan: Plan, config: Config, device: Device) -> float:
    """Return the seconds at the end of a step in which the slowest rank communicates.

    The rank sums gradients over data parallel, adds the second copy's of DualPipe, and gathers
    the updated weights. With sharded weights, passes of the table sum and gather instead.
    """
    n = config.weight_replicas
    place = plan.schedule.placement
    # A ring sends every gradient in float32, and then the weight, or the reduced gradient again.
    gradient = 4
    element = config.precision.element_bytes if config.parallel.splits_optimizer else 4
    if "sharding" in plan.own:
        gradient = 0
        if config.parallel.shards_weights:
            element = 0
    tp = config.parallel.tensor_model_parallel_size
    same = config.expert_replicas
    sent = 0.0
    twins = 0.0
    for rank in range(place.num_ranks):
        works = [plan.works[stage] for stage in place.stages_on(rank)]
        experts = sum(work.experts for work in works) / plan.expert_ranks
        dense = sum(work.parameters - work.experts for work in works) / tp
        lighter = sum(work.lighter for work in works) * bool(element) * (n - 1) / n
        numbers = dense * (n - 1) / n + experts * (same - 1) / same
        sent = max(sent, (gradient + element) * numbers - lighter)
        if place.num_chains > 1:
            twins = max(twins, 4 * (dense + experts))
    reduced = device.seconds(sent, replicas(plan, config), 2)
    return reduced + device.seconds(twins, config.world_size)
