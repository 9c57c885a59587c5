"""Predict the seconds of communication from the speeds of a device and its links.

Collectives are taken as rings: over n ranks each rank sends (n-1)/n of the bytes, and twice as much
for an all-reduce. Communication of context parallelism and experts is never hidden by computation,
unless the table runs two passes together. Communication of tensor parallelism is hidden only
with --tp-comm-overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megapipe.config import Config, ModelConfig
from megapipe.plan.context import context_bytes, expert_bytes, tensor_bytes
from megapipe.plan.plan import Plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.sizes import PIECES
from megapipe.schedule import Costs
from megapipe.schedule.costs import PerStage


def with_messages(costs: Costs, plan: Plan, config: Config, device: Device) -> Costs:
    """Return the costs in seconds with communication added.

    Passes get the time of their tensor-, context- and expert-parallel collectives. Messages between
    stages get times of their own, and so do gathers and reduce-scatters of sharded weights.

    Args:
        costs: the seconds of each stage's passes without communication.
        device: the speeds of devices and links.
    """
    forward, backward = of_layer(_means_of_layer(costs, plan), config, device)
    # Collectives inside a layer make each of a stage's layers slower. A depth has one layer.
    layers = [*plan.counts, *(1 for _ in plan.pieces.depths)]
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
        # What of a pass a pair can hide under the arithmetic of its other pass.
        link_f=_share_of(computed_f, f),
        link_b=_share_of(computed_b, b),
        attention_f=_rescaled(costs.attention_f, computed_f, f),
        attention_b=_rescaled(costs.attention_b, computed_b, b),
        comm=comm,
    )


def _share_of(computed: tuple[float, ...], whole: tuple[float, ...]) -> float:
    """Return the fraction of the passes' time, over all stages, that is communication.

    Args:
        computed: seconds of each stage's pass without communication.
        whole: seconds of each stage's pass with communication.
    """
    total = sum(whole)
    return 1 - sum(computed) / total if total else 0.0


TENSOR = "messages of tensor parallel"
CONTEXT = "messages of context parallel"
EXPERTS = "messages of experts"


def of_layer(means: tuple[float, float], config: Config, device: Device) -> tuple[float, float]:
    """Return (forward, backward): seconds that a pass of one layer waits for its collectives.

    Args:
        means: the seconds that a layer computes, (forward, backward), as means over the layers.
    """
    causes = by_cause(means, config, device).values()
    return sum(f for f, _ in causes), sum(b for _, b in causes)


def by_cause(
    means: tuple[float, float], config: Config, device: Device
) -> dict[str, tuple[float, float]]:
    """Return {TENSOR, CONTEXT or EXPERTS: (forward, backward)}, a layer's waits in seconds.

    Args:
        means: the seconds that a layer computes, (forward, backward), as means over the layers.
            With --tp-comm-overlap communication hides under this time.
    """
    model = config.model
    t = config.parallel.tensor_model_parallel_size
    c = config.parallel.context_parallel_size
    tokens = config.batch.tokens
    element = config.precision.element_bytes
    found = {TENSOR: (0.0, 0.0), CONTEXT: (0.0, 0.0), EXPERTS: (0.0, 0.0)}
    if t > 1:
        f, b = tensor_bytes(model, tokens // c, ranks=t, element_bytes=element)
        # Four collectives of a forward: two around attention and two around the MLP. The backward
        # gathers inputs of two of them once more, for W.
        # Without sequence parallelism both directions have two all-reduces.
        if not model.sequence_parallel:
            b = f
        again = f * (model.recompute_granularity == "full")
        forward = device.seconds(f, t, 4)
        backward = device.seconds(b + again, t, 6)
        if config.overlaps_tp:
            forward = _not_hidden(forward, means[0], model, t)
            backward = _not_hidden(backward, means[1], model, t)
        found[TENSOR] = (forward, backward)
    # Keys and values go to the other context ranks, and in the backward their gradients too.
    if c > 1:
        f, b = context_bytes(model, tokens, ranks=c, tp=t, element_bytes=element)
        found[CONTEXT] = (device.seconds(f, t * c), device.seconds(b, t * c, 2))
    if model.has_experts:
        f, b, _ = expert_bytes(model, config.parallel, tokens, element_bytes=element)
        # The costs do not say which layers have experts, so each layer gets the mean.
        sparse = sum(map(model.has_experts_in, range(model.layers))) / model.layers
        extent = expert_extent(config)
        forward = sparse * device.seconds(f, extent, 4)
        backward = sparse * device.seconds(b, extent, 4)
        found[EXPERTS] = (forward, backward)
    return found


def expert_extent(config: Config) -> int:
    """Return the number of devices from the first to the last rank that share a layer's experts."""
    par = config.parallel
    return par.expert_model_parallel_size * par.etp


def ring(device: Device, sent: float, ranks: int, extent: int, calls: int = 1) -> float:
    """Return the seconds of ring collectives over ranks with copies of the same weights.

    There are several rings, as in NCCL. Each runs through all ranks of a node before it leaves the
    node by a network card of its own. So with k ranks on a node, each network card sends 1/k of the
    bytes.

    Args:
        sent: bytes that each rank sends, summed over all `calls`.
        ranks: the number of ranks.
        extent: number of devices from the first to the last rank.
        calls: the number of collectives.
    """
    if extent <= device.node:
        return device.seconds(sent, extent, calls)
    here = max(1, ranks * device.node // extent)
    within = device.seconds(sent, device.node, calls)
    return max(within, device.seconds(sent / here, extent, calls))


def _stage_extent(config: Config) -> int:
    """Return the number of devices from a rank of one stage to its peer in the next stage.

    This distance decides whether a message between stages stays within a node.
    """
    par = config.parallel
    extent = par.context_parallel_size * par.tensor_model_parallel_size
    # In Megatron's order of ranks, data parallel comes before pipeline parallel.
    if not par.use_tp_pp_dp_mapping:
        extent *= config.data_parallel_size
    return extent


def _message(plan: Plan, config: Config, device: Device) -> float:
    """Return the seconds of a message between two stages: hidden states or their gradient."""
    model = config.model
    tokens = config.batch.tokens
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
    """Return the costs with the seconds of weight gathers and gradient reduce-scatters.

    Args:
        costs: the costs, with the bytes that are gathered and reduced for each stage.
    """
    stages = plan.works[: plan.schedule.placement.chain]
    shares = [
        expert_share(work.parameters, work.experts, plan.tp, plan.expert_ranks) for work in stages
    ]

    def seconds(sizes: Sequence[float]) -> tuple[float, ...]:
        each = zip(sizes, shares, strict=True)
        return tuple(shared_out(size, share, config, device) for size, share in each)

    # A stage that uses the first stage's embedding gathers it too.
    both = zip(_per_stage(costs.mem_a), _per_stage(costs.mem_lent), strict=True)
    weights = [own + tied for own, tied in both]
    return replace(costs, a=seconds(weights), g=seconds(_per_stage(costs.mem_g)))


def expert_share(parameters: float, experts: float, tp: int, expert_ranks: int) -> float:
    """Return the experts' fraction of the weights that a rank has of a part of the model.

    Args:
        parameters: number of parameters of the part, over all its ranks.
        experts: number of these that belong to experts.
        tp: number of ranks that divide the other parameters.
        expert_ranks: number of ranks that divide the experts.
    """
    of_experts = experts / expert_ranks
    dense = (parameters - experts) / tp
    return of_experts / ((dense + of_experts) or 1.0)


def shared_out(size: float, share: float, config: Config, device: Device) -> float:
    """Return the seconds to gather sharded weights, or to reduce and scatter their gradients.

    Ranks with the same experts are fewer than ranks with the same other weights, over as many
    nodes. So fewer of them are on a node, and each network card sends more of their bytes.

    Args:
        size: bytes of the whole weights.
        share: the experts' fraction of them.
    """
    extent = replicas(config)
    found = 0.0
    parts = (((1 - share), config.weight_replicas), (share, config.expert_replicas))
    for part, ranks in parts:
        if part:
            found += ring(device, (ranks - 1) / ranks * part * size, ranks, extent)
    return found


def _per_stage(sizes: PerStage) -> tuple[float, ...]:
    """Return sizes as a tuple, one size for each stage. A lone number becomes a tuple of one."""
    if isinstance(sizes, tuple):
        return sizes
    return (sizes,)


def causes_of_layer(costs: Costs, plan: Plan, config: Config, device: Device) -> dict[str, float]:
    """Return {cause: seconds that a layer waits for collectives, forward plus backward}.

    The causes are TENSOR, CONTEXT and EXPERTS.

    Args:
        costs: the seconds of each stage's passes without communication.
    """
    causes = by_cause(_means_of_layer(costs, plan), config, device)
    return {name: f + b for name, (f, b) in causes.items()}


def _means_of_layer(costs: Costs, plan: Plan) -> tuple[float, float]:
    return _mean_of_layer(costs.f, plan), _mean_of_layer(costs.b, plan)


def _mean_of_layer(times: PerStage, plan: Plan) -> float:
    """Return the mean seconds that a pass takes for one layer.

    Embedding and head are spread evenly over the layers.

    Args:
        times: seconds of that pass on each stage.
    """
    stages = plan.schedule.placement.chain
    layers = sum(plan.counts)
    if not isinstance(times, tuple):
        return times * stages / layers
    # With two copies of the model the times of the first copy are enough.
    return sum(times[:stages]) / layers


def _not_hidden(sent: float, computed: float, model: ModelConfig, ranks: int) -> float:
    """Return the seconds of a layer's collectives that its matrix products cannot hide.

    With --tp-comm-overlap a product is computed in pieces, while the collective of another piece
    runs. One piece stays exposed: no product runs during its collective.

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


def replicas(config: Config) -> int:
    """Return the number of devices from the first to the last rank with the same weights."""
    # With this order of ranks, pipeline comes before data parallel.
    if config.parallel.use_tp_pp_dp_mapping:
        return config.world_size
    return config.world_size // config.parallel.pipeline_model_parallel_size


def _rescaled(share: PerStage, old: tuple[float, ...], new: tuple[float, ...]) -> PerStage:
    """Return attention's fraction of each stage's time after communication is added.

    The seconds of attention stay the same: a fraction of 0.3 becomes 0.2 if the time grows by half.

    Args:
        share: attention's fraction of the old time of each stage.
        old: seconds of each stage without communication.
        new: seconds of each stage with communication.
    """
    if not isinstance(share, tuple):
        return share
    times = zip(share, old, new, strict=True)
    return tuple(part * x / y if y else 0.0 for part, x, y in times)
