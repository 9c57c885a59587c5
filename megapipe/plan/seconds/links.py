"""Say what a byte between data-parallel ranks costs on a device, for plans with sharded weights."""

from __future__ import annotations

from megapipe.config import Config, ParallelConfig
from megapipe.config.notes import flag
from megapipe.plan.make import pieces_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import expert_share, shared_out


def by_rates(config: Config, device: Device) -> tuple[Config, list[str]]:
    """Return a configuration whose sharded tensors take as long to gather as --rates says.

    A number that the user gave stays, and so do all configurations without --rates.

    Args:
        device: the device of --rates.
    Returns: (the configuration, lines on the flag with which a run makes the same plan).
    """
    name = "data_parallel_flops_per_byte"
    default = config.value(name) == getattr(ParallelConfig, name)
    sharded = config.parallel.shards_grads and config.weight_replicas > 1
    timed_by_costs = config.parallel.pipeline_costs is not None
    if config.check.rates is None or timed_by_costs or not (default and sharded):
        return config, []
    linked = knows_links(config, device)
    line = (
        f"a byte between data-parallel ranks takes as long as {linked.value(name):g} FLOPs, by "
        f"--rates. So that a run makes this plan, add {flag(name)} {linked.value(name):g}: its "
        f"default is {config.value(name):g}"
    )
    return linked, [line]


def knows_links(config: Config, device: Device) -> Config:
    """Return the configuration with data_parallel_flops_per_byte of this device.

    This is the number of FLOPs that the device computes while it sends one byte of a gather. It is
    the mean over the bytes of experts and of all other weights. A run with sharded weights decides
    by this number, and by the memory, how long gathered weights are kept.
    """
    gathered = 1e12
    pieces = pieces_of(config, config.model)
    parts = [pieces.embedding, *pieces.layers, pieces.head, *pieces.depths]
    par = config.parallel
    share = expert_share(
        sum(part.parameters for part in parts),
        sum(part.experts for part in parts),
        par.tensor_model_parallel_size,
        par.expert_model_parallel_size * par.etp,
    )
    # Of n ranks each sends all but its own part.
    sent = (1 - share) * (1 - 1 / config.weight_replicas)
    sent += share * (1 - 1 / config.expert_replicas)
    # An only replica gathers nothing.
    if not sent:
        return config
    link = device.flops * shared_out(gathered, share, config, device) / (sent * gathered)
    return config.with_fields(data_parallel_flops_per_byte=round(link))
