"""Predict the seconds of data-parallel communication that the passes of a step do not hide.

Replicas of a stage are ranks with the same weights. They reduce its gradients, which takes g, and
gather its updated weights, which takes a. A step becomes longer by

    lead + tail + both copies of DualPipe        see `exposed`

- Without flags both wait for all passes: lead = 0, and tail = sum of g + a over a rank's stages.
- With --overlap-grad-reduce a rank reduces a stage after the stage's last weight gradient, while
  passes of its other stages run. So only the last passes of the step can hide it: gradients grow
  until the last microbatch. Of k buckets all but the last may start within the stage's last pass,
  of length w. Alone on its rank, such a stage ends g - (1 - 1/k) w after the pass, or the time of
  its last bucket if that is more.
- With --overlap-param-gather a rank gathers its stages in the order of the model at the start of
  the next step. Forwards of a stage wait for its gather: lead is the longest such wait.

Communication is assumed not to slow the passes down. A stage's layers are assumed to take equal
times, and no pass to make up for a late first forward. Ranks end a step together, so the slowest
one counts. Collectives are rings, see `messages.ring`.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

from megapipe.config import Config
from megapipe.plan.layers import Work
from megapipe.plan.plan import Plan
from megapipe.plan.recipes import step_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import replicas, ring
from megapipe.schedule import Schedule
from megapipe.schedule.simulate import SimulatedTimes


class OfRank(NamedTuple):
    """The number of parameters of one stage on one rank; replicas reduce their gradients.

    Attributes:
        dense: number of parameters outside experts.
        experts: number of parameters of experts.
        lighter: bytes that one gather of all these weights saves because some are sent in eight
            bits.
    """

    dense: float
    experts: float
    lighter: float = 0.0

    @property
    def parameters(self) -> float:
        """Return the number of all parameters."""
        return self.dense + self.experts


class Sent(NamedTuple):
    """Seconds of a stage's data-parallel communication.

    Attributes:
        reduce: to reduce its gradients. Without --use-distributed-optimizer this is an all-reduce.
        gather: to gather its updated weights; 0 if every rank updates them itself.
    """

    reduce: float
    gather: float


def sent(weights: OfRank, config: Config, device: Device, buckets: int = 1) -> Sent:
    """Return the seconds of a stage's data-parallel communication.

    The time is 0 for what passes of the table do, as with sharded weights.

    Args:
        buckets: number of collectives in which the gradients are reduced.
    """
    par = config.parallel
    # A ring sends every gradient once for a reduce-scatter, and twice for an all-reduce.
    gradient = 2 if config.precision.grad_reduce_in_bf16 else 4
    calls = buckets
    weight = 0
    if par.shards_grads:
        gradient = 0
    elif not par.splits_optimizer:
        gradient *= 2
        calls *= 2
    if par.splits_optimizer and not par.shards_weights:
        weight = config.precision.element_bytes
    extent = replicas(config)

    def seconds(element: int, lighter: float, calls: int) -> float:
        found = 0.0
        n = config.weight_replicas
        dense = element * weights.dense - lighter
        for size, ranks in ((dense, n), (element * weights.experts, config.expert_replicas)):
            found += ring(device, size * (ranks - 1) / ranks, ranks, extent, calls)
        return found

    return Sent(seconds(gradient, 0.0, calls), seconds(weight, weights.lighter * bool(weight), 1))


class Buckets(NamedTuple):
    """The buckets in which a stage's gradients are reduced, see optim.buckets.

    Attributes:
        number: how many there are.
        last: the last bucket's fraction of the parameters. This bucket has the parameters outside
            of layers too.
    """

    number: int = 1
    last: float = 1.0


def buckets(plan: Plan, stage: int, config: Config) -> Buckets:
    """Return the buckets of a stage under --ddp-bucket-size or --ddp-num-buckets."""
    par = config.parallel
    span = plan.spans[stage]
    if span.depth or not span.count or not (par.ddp_bucket_size or par.ddp_num_buckets):
        return Buckets()
    layers = [plan.pieces.layers[layer] for layer in span.layers]
    of_layers = sum(_here(layer, plan).parameters for layer in layers)
    least = par.ddp_bucket_size or -(-of_layers // (par.ddp_num_buckets or 1))
    # A bucket has whole layers, until it is large enough.
    each = ceil(least * len(layers) / of_layers)
    number = ceil(len(layers) / each)
    early = (number - 1) * each / len(layers) * of_layers
    return Buckets(number, 1 - early / _of_stage(plan, stage).parameters)


def _here(work: Work, plan: Plan) -> OfRank:
    """Return the parameters of a piece of the model on one of its ranks."""
    dense = (work.parameters - work.experts) / plan.tp
    return OfRank(dense, work.experts / plan.expert_ranks, work.lighter)


def _of_stage(plan: Plan, stage: int) -> OfRank:
    """Return how many parameters of each kind one rank of a stage has."""
    found = _here(plan.works[stage], plan)
    span = plan.spans[stage]
    if plan.tied and span.embedding and span.loss:
        # The work counts embedding and head. They are one weight here.
        found = found._replace(dense=found.dense - plan.vocab_weights / plan.tp)
    return found


class _Used(NamedTuple):
    """The times at which passes use a stage.

    Attributes:
        first: the start of its first forward.
        start, end: of its last pass that adds to gradients of weights.
    """

    first: float
    start: float
    end: float


def exposed(
    plan: Plan, config: Config, device: Device, table: Schedule, clock: SimulatedTimes
) -> float:
    """Return the seconds by which data-parallel communication makes a step longer.

    Args:
        table: the passes of the step, without reductions and gathers.
        clock: their times, without this communication.
    """
    step = step_of(config, plan.schedule)
    place = table.placement
    used = _used(table, clock)
    passes = max(map(max, clock.end))
    reduced = passes
    gathered = 0.0
    lead = 0.0
    copied = 0.0
    for rank in range(place.num_ranks):
        stages = sorted(place.stages_on(rank), key=place.position)
        here = {stage: _of_stage(plan, stage) for stage in stages}
        copied = max(copied, sum(weights.parameters for weights in here.values()))
        # When the rank has reduced the stages so far: one after another, in the order of a run.
        free = 0.0 if step.reduce else passes
        for stage in sorted(stages, key=lambda x: used[x].end):
            bucket = buckets(plan, stage, config)
            seconds = sent(here[stage], config, device, bucket.number).reduce
            begin = used[stage].end
            if bucket.number > 1:
                begin = used[stage].start + (begin - used[stage].start) / bucket.number
            free = max(max(free, begin) + seconds, used[stage].end + bucket.last * seconds)
        reduced = max(reduced, free)
        waits = 0.0
        for stage in stages:
            waits += sent(here[stage], config, device).gather
            lead = max(lead, waits - used[stage].first)
        gathered = max(gathered, waits)
    found = reduced - passes
    # Updates wait for the gradients of all ranks, as their norm is needed.
    found += lead if step.gather else gathered
    if place.num_chains > 1:
        # The two copies of a stage are on mirrored ranks, which sum in float32.
        found += device.seconds(4 * copied, config.world_size)
    return found


def after_passes(
    plan: Plan, config: Config, device: Device, table: Schedule, clock: SimulatedTimes
) -> list[Sent]:
    """Return, for each stage of a copy of the model, the communication that its passes do not hide.

    Passes of other stages may hide it. Here the last pass of a stage hides all buckets that may
    start within it, so that the rest follows the pass.

    Args:
        table: the passes of the step, without reductions and gathers.
        clock: their times, without this communication.
    """
    used = _used(table, clock)
    place = table.placement
    found = []
    for stage in range(place.chain):
        weights = _of_stage(plan, stage)
        bucket = buckets(plan, stage, config)
        reduce, gather = sent(weights, config, device, bucket.number)
        hidden = (used[stage].end - used[stage].start) * (1 - 1 / bucket.number)
        rest = max(reduce - hidden, bucket.last * reduce)
        if place.num_chains > 1:
            # The two copies of a stage are on mirrored ranks, which sum in float32.
            rest += device.seconds(4 * weights.parameters, config.world_size)
        found.append(Sent(rest, gather))
    return found


def reductions(plan: Plan, config: Config, device: Device) -> list[float]:
    """Return the numbers from which `exposed` computes, apart from the times of the passes.

    They are, for each stage, the seconds of its communication, then its buckets if they reduce
    during passes; at last whether gradients are reduced, and weights gathered, during passes.
    """
    step = step_of(config, plan.schedule)
    found: list[float] = []
    reduced = 0.0
    gathered = 0.0
    for stage in range(len(plan.spans)):
        bucket = buckets(plan, stage, config)
        seconds = sent(_of_stage(plan, stage), config, device, bucket.number)
        reduced += seconds.reduce
        gathered += seconds.gather
        found += seconds
        if step.reduce and seconds.reduce:
            found += bucket
    return [*found, bool(step.reduce and reduced), bool(step.gather and gathered)]


def _used(table: Schedule, clock: SimulatedTimes) -> dict[int, _Used]:
    """Return {stage: when passes use it}.

    Under DualPipe the end of a stage's last gradients is the later one of its two copies.
    """
    first: dict[int, float] = {}
    last: dict[int, tuple[float, float]] = {}
    for row, starts, ends in zip(table.ranks, clock.start, clock.end, strict=True):
        for step, start, end in zip(row, starts, ends, strict=True):
            for item in step:
                if item.kind.is_forward:
                    first.setdefault(item.stage, start)
                if item.kind.is_gradient_of_weights:
                    last[item.stage] = (start, end)
    place = table.placement
    found = {}
    for stage in range(place.num_stages):
        same = [last.get(twin, (0.0, 0.0)) for twin in place.replicas(stage)]
        found[stage] = _Used(first.get(stage, inf), *map(max, zip(*same, strict=True)))
    return found
