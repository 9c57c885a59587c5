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
        # Without anything to send there is no call either.
        if not sent:
            return 0.0
        return sent / self.speed(extent) + calls * self.latency

    def speed(self, extent: int) -> float:
        """Return the bytes per second that a device sends to another, `extent` devices away."""
        if extent <= self.node:
            return self.inside
        return self.outside


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
        # bool is an int in Python. The range keeps products of two numbers finite.
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
    # Collectives inside a layer make each of a stage's layers slower. A depth has one layer.
    computed_f = costs.f
    computed_b = costs.b
    assert isinstance(computed_f, tuple)
    assert isinstance(computed_b, tuple)
    f = tuple(x + n * forward for x, n in zip(computed_f, layers, strict=True))
    b = tuple(x + n * backward for x, n in zip(computed_b, layers, strict=True))
    if "sharding" in plan.own:
        costs = _with_shards(costs, plan, config, device)
    # One rank sends nothing to itself.
    comm = 0.0
    if len(plan.schedule.ranks) > 1:
        comm = _message(plan, config, device)
    return replace(
        costs,
        f=f,
        b=b,
        # Attention keeps its seconds, and is a smaller part of a longer pass.
        attention_f=_rescaled(costs.attention_f, computed_f, f),
        attention_b=_rescaled(costs.attention_b, computed_b, b),
        comm=comm,
    )


def _of_layer(costs: Costs, plan: Plan, config: Config, device: Device) -> tuple[float, float]:
    """Return (forward, backward): the seconds that a layer's pass waits for its collectives.

    Args:
        costs: seconds of computation, which hides a part of them with --tp-comm-overlap.
    """
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
        # Full recomputation runs the forward's collectives once more in the backward.
        again = f * (model.recompute_granularity == "full")
        # Four collectives of a forward: two around attention and two around the MLP. The backward
        # gathers inputs of two of them once more, for W.
        forward = device.seconds(f, t, 4)
        backward = device.seconds(b + again, t, 6)
        # --tp-comm-overlap hides a part in the products of the layer.
        if config.overlaps_tp:
            forward = _not_hidden(forward, _mean_of_layer(costs.f, plan), model, t)
            backward = _not_hidden(backward, _mean_of_layer(costs.b, plan), model, t)
    # Keys and values go to the other context ranks, and in the backward their gradients too.
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
    """Return how many devices lie from a rank of a stage to its neighbour in the next stage.

    The number decides whether a message stays in a node.
    """
    par = config.parallel
    extent = par.context_parallel_size * par.tensor_model_parallel_size
    # In Megatron's order of ranks, data parallel comes before pipeline parallel.
    if not par.use_tp_pp_dp_mapping:
        extent *= config.data_parallel_size
    return extent


def _message(plan: Plan, config: Config, device: Device) -> float:
    """Return the seconds of a message between two stages."""
    model = config.model
    tokens = config.batch.sequence * config.batch.micro_batch
    # With sequence parallelism each tensor-parallel rank sends its own part of the sequence.
    split = 1
    if model.sequence_parallel:
        split = config.parallel.tensor_model_parallel_size
    size = tokens / config.parallel.context_parallel_size / split
    size = size * model.hidden * config.precision.element_bytes
    # Slices may differ in length; a message has the mean.
    size /= len(plan.schedule.cuts) or 1
    return device.seconds(size, 2 * _stage_extent(config))


def _with_shards(costs: Costs, plan: Plan, config: Config, device: Device) -> Costs:
    """Return the costs with the seconds to gather weights and to reduce-scatter gradients."""
    n = config.weight_replicas
    extent = replicas(plan, config)

    # In a ring of n ranks each rank sends all shards but one.
    def seconds(size: float) -> float:
        return device.seconds((n - 1) / n * size, extent)

    # A stage that uses the first stage's embedding gathers it too.
    weights = map(add, _per_stage(costs.mem_a), _per_stage(costs.mem_lent))
    gradients = _per_stage(costs.mem_g)
    return replace(costs, a=tuple(map(seconds, weights)), g=tuple(map(seconds, gradients)))


def _per_stage(sizes: PerStage) -> tuple[float, ...]:
    """Return the sizes of the stages as a tuple; one number is the size of a single stage."""
    if isinstance(sizes, tuple):
        return sizes
    return (sizes,)


def _mean_of_layer(times: PerStage, plan: Plan) -> float:
    """Return the mean seconds of a layer's pass, with its part of embedding and head."""
    stages = plan.schedule.placement.chain
    layers = sum(plan.counts)
    if not isinstance(times, tuple):
        return times * stages / layers
    # With two copies of the model the times of the first copy are enough.
    return sum(times[:stages]) / layers


def _not_hidden(sent: float, computed: float, model: ModelConfig, ranks: int) -> float:
    """Return the part of a layer's collectives that its products do not hide.

    With --tp-comm-overlap a product is computed in pieces, while the collective of another piece
    runs. The first or last piece has nothing to hide with.

    Args:
        sent: seconds of the collectives of a layer's pass.
        computed: seconds of the products of that pass.
        ranks: the number of tensor-parallel ranks.
    """
    if model.sequence_parallel:
        # A piece for each rank; the first one is this rank's own and needs no communication.
        pieces = ranks
        last = 0.0
    else:
        # The all-reduce of the last piece begins when all products are over.
        pieces = PIECES
        last = sent / PIECES
    return last + max(0.0, sent - last - (1 - 1 / pieces) * computed)


def replicas(plan: Plan, config: Config) -> int:
    """Return how many devices lie from the first to the last rank with the same weights."""
    # With this order of ranks, pipeline comes before data parallel.
    if config.parallel.use_tp_pp_dp_mapping:
        return config.world_size
    return config.world_size // plan.schedule.placement.num_ranks


def _rescaled(share: PerStage, old: tuple[float, ...], new: tuple[float, ...]) -> PerStage:
    """Return a share of the old times as a share of the new, longer times.

    Args:
        share: a part of the pass of each stage, or one part for all. The latter stays as it is.
        old, new: the seconds of the pass on each stage.
    """
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
    # The slowest rank counts, as all ranks end the step together.
    for rank in range(place.num_ranks):
        works = [plan.works[stage] for stage in place.stages_on(rank)]
        # Experts are split over expert-parallel ranks, other weights over tensor parallelism.
        experts = sum(work.experts for work in works) / plan.expert_ranks
        dense = sum(work.parameters - work.experts for work in works) / tp
        # FP8 weights are gathered with fewer bytes.
        lighter = sum(work.lighter for work in works) * bool(element) * (n - 1) / n
        numbers = dense * (n - 1) / n + experts * (same - 1) / same
        sent = max(sent, (gradient + element) * numbers - lighter)
        # The two copies of a stage are on mirrored ranks, which sum in float32.
        if place.num_chains > 1:
            twins = max(twins, 4 * (dense + experts))
    reduced = device.seconds(sent, replicas(plan, config), 2)
    return reduced + device.seconds(twins, config.world_size)
