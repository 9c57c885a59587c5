"""Speeds of devices and of links, in seconds: what FLOPs do not say, and no rank measures alone.

Rings: a collective over n ranks sends (n-1)/n of its bytes from each, an all-reduce twice that. Nothing of tensor and
context parallelism is taken to be hidden behind computation.
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
    """A device, one of equal ones.

    Attributes:
        flops: per second, as matrix products of this model reach them, not as a data sheet has them.
        node: devices that the fast link joins.
        inside, outside: bytes per second that a device sends within a node and beyond.
        latency: seconds of a message, and of a collective.
        overhead: seconds that a pass takes beside its work.
    """

    flops: float = 4e14
    node: int = 8
    inside: float = 3e11
    outside: float = 4e10
    latency: float = 1e-5
    overhead: float = 4e-4

    @property
    def links(self) -> str:
        """The links in words."""
        near, far = self.inside / 1e9, self.outside / 1e9
        return f"{near:g} GB/s among {self.node}, {far:g} GB/s beyond, {self.latency * 1e6:g} us a message"

    def seconds(self, sent: float, extent: int, calls: int = 1) -> float:
        """Seconds of so many bytes from each rank, in so many collectives. extent: devices from first to last."""
        return sent / self.speed(extent) + calls * self.latency if sent else 0.0

    def speed(self, extent: int) -> float:
        """Bytes per second that a device sends in a collective of so many, from first to last."""
        return self.inside if extent <= self.node else self.outside


NOTHING = Device(inside=inf, outside=inf, latency=0.0)
"""Links that cost nothing."""


def load_device(path: str) -> Device:
    """Read a JSON object with some of Device's fields. Raises: ConfigError that names file and field."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--device {path} cannot be read: {error}") from None
    names = [field.name for field in fields(Device)]
    if not isinstance(given, dict) or given.keys() - set(names):
        raise ConfigError(f"--device {path} must be an object of {', '.join(names)}.")
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (1e-30 <= value <= 1e30 or (value == 0 and name in ("latency", "overhead"))):
            said = f"{name} must be a number above 0, from 1e-30 to 1e30, got {json.dumps(value)[:100]}."
            raise ConfigError(f"--device {path}: {said}")
    return Device(**given)


def with_messages(costs: Costs, plan: Plan, config: Config, device: Device) -> Costs:
    """Costs in seconds of stages that compute alone, with what their ranks send each other added: tensor and context
    parallelism within passes, a message between stages, gathers and sums of runs of passes."""
    model, par = config.model, config.parallel
    t, c = par.tensor_model_parallel_size, par.context_parallel_size
    tokens, element = config.batch.sequence * config.batch.micro_batch, config.precision.element_bytes
    forth = back = 0.0
    if t > 1:
        f, b = tensor_bytes(model, tokens // c, ranks=t, element_bytes=element)
        b = b if model.sequence_parallel else f  # two all-reduces each way
        again = f * (model.recompute_granularity == "full")
        forth, back = device.seconds(f, t, 4), device.seconds(b + again, t, 6)
        if config.overlaps_tp:
            one = (_of_layer(costs.f, plan), _of_layer(costs.b, plan))
            forth, back = (_showing(sent, here, model, t) for sent, here in zip((forth, back), one, strict=True))
    if c > 1:
        f, b = context_bytes(model, tokens, ranks=c, tp=t, element_bytes=element)
        forth, back = forth + device.seconds(f, t * c), back + device.seconds(b, t * c, 2)
    if model.has_experts:
        f, b, _ = expert_bytes(model, par, tokens, element_bytes=element)
        share, extent = _sparse(model), c * t * (1 if par.use_tp_pp_dp_mapping else config.data_parallel_size)
        extent = min(extent, par.expert_model_parallel_size * par.etp)
        forth, back = forth + share * device.seconds(f, extent, 4), back + share * device.seconds(b, extent, 4)
    hidden = tokens / c / (t if model.sequence_parallel else 1) * model.hidden * element
    extent = 2 * t * c * (1 if par.use_tp_pp_dp_mapping else config.data_parallel_size)
    f_all, b_all = costs.f, costs.b
    layers = [*plan.counts, *(1 for _ in plan.pieces.depths)]
    assert isinstance(f_all, tuple)
    assert isinstance(b_all, tuple)
    if "sharding" in plan.own:
        n, ranks = config.weight_replicas, replicas(plan, config)
        own, lent, left = (x if isinstance(x, tuple) else (x,) for x in (costs.mem_a, costs.mem_lent, costs.mem_g))
        whole = tuple(map(add, own, lent)), left
        a, g = (tuple(device.seconds((n - 1) / n * x, ranks) for x in sizes) for sizes in whole)
        costs = replace(costs, a=a, g=g)
    longer_f = tuple(x + n * forth for x, n in zip(f_all, layers, strict=True))
    longer_b = tuple(x + n * back for x, n in zip(b_all, layers, strict=True))
    hidden /= len(plan.schedule.cuts) or 1  # of a slice, in the mean
    return replace(
        costs,
        f=longer_f,
        b=longer_b,
        attention_f=_less(costs.attention_f, f_all, longer_f),
        attention_b=_less(costs.attention_b, b_all, longer_b),
        comm=device.seconds(hidden, extent) if len(plan.schedule.ranks) > 1 else 0.0,
    )


def _of_layer(times: PerStage, plan: Plan) -> float:
    """Seconds of a layer's pass, with its part of the model's ends."""
    stages = plan.schedule.placement.chain
    return sum(times[:stages] if isinstance(times, tuple) else [times] * stages) / sum(plan.counts)


def _showing(sent: float, computed: float, model: ModelConfig, ranks: int) -> float:
    """Seconds of a layer's collectives that are beside no product made in pieces."""
    last = 0.0 if model.sequence_parallel else sent / PIECES
    beside = 1 - 1 / (ranks if model.sequence_parallel else PIECES)
    return last + max(0.0, sent - last - beside * computed)


def replicas(plan: Plan, config: Config) -> int:
    """Devices from the first to the last rank with the same weights."""
    ranks = plan.schedule.placement.num_ranks
    return config.world_size if config.parallel.use_tp_pp_dp_mapping else config.world_size // ranks


def _less(share: PerStage, of: tuple[float, ...], more: tuple[float, ...]) -> PerStage:
    """A share of times as one of longer ones."""
    if not isinstance(share, tuple):
        return share
    return tuple(part * x / y if y else 0.0 for part, x, y in zip(share, of, more, strict=True))


def _sparse(model: ModelConfig) -> float:
    """The share of the layers that have experts."""
    return sum(map(model.has_experts_in, range(model.layers))) / model.layers


def sums(plan: Plan, config: Config, device: Device) -> float:
    """Seconds in which the slowest rank sums its gradients, also with a second copy, and gathers weights at the end."""
    n, par, place = config.weight_replicas, config.parallel, plan.schedule.placement
    element = config.precision.element_bytes if par.splits_optimizer else 4
    gradient = 4
    if "sharding" in plan.own:  # what the table has
        gradient, element = 0, 0 if par.shards_weights else element
    works = [[plan.works[s] for s in place.stages_on(r)] for r in range(place.num_ranks)]
    same = config.expert_replicas
    sent, twins = 0.0, 0.0
    for row in works:
        experts = sum(work.experts for work in row) / plan.expert_ranks
        dense = sum(work.parameters - work.experts for work in row) / par.tensor_model_parallel_size
        lighter = sum(work.lighter for work in row) * bool(element) * (n - 1) / n
        sent = max(sent, (gradient + element) * (dense * (n - 1) / n + experts * (same - 1) / same) - lighter)
        twins = max(twins, 4 * (dense + experts) * (place.num_chains > 1))
    return device.seconds(sent, replicas(plan, config), 2) + device.seconds(twins, config.world_size)
