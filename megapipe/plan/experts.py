"""Bytes that tokens on their way to experts are, and the line on where experts lie."""

from __future__ import annotations

from megapipe.config import Config, ModelConfig, ParallelConfig
from megapipe.plan.make import Plan

MIB = 2**20


def expert_bytes(
    model: ModelConfig, par: ParallelConfig, tokens: int, *, element_bytes: int = 4
) -> tuple[float, float, float]:
    """Bytes that a rank sends for one layer with experts and microbatch, (in forward, in backward), and of the largest
    of these collectives; an even load. Nothing where tensor parallelism alone splits experts, like an MLP.

    All to all, (n - 1) / n of k rows of each token go to each slice of their experts and come back, in backward as
    well, and 4 bytes of weights each way. Gathered, the tokens of n ranks are sent and their outputs summed, and in
    backward the gathered input is needed once more.

    Args:
        tokens: of a microbatch over tensor- and context-parallel ranks.
    """
    n, tp = par.expert_model_parallel_size * par.etp, par.tensor_model_parallel_size
    if n == 1 or (par.expert_model_parallel_size == 1 and par.etp == tp):
        return 0.0, 0.0, 0.0
    mine, row = tokens / par.context_parallel_size / tp, model.hidden * element_bytes
    if model.moe_token_dispatcher_type == "allgather":
        once = (n - 1) * mine * row
        return 2 * once, 3 * once, once
    rows = mine * model.moe_router_topk * par.etp * (n - 1) / n
    return rows * (2 * row + 4), rows * (2 * row + 4), rows * row


def expert_line(plan: Plan, config: Config) -> str:
    """A line on where experts lie and what a rank sends for them; empty where they lie as an MLP does."""
    par, train = config.parallel, config.train
    ep, etp, model = par.expert_model_parallel_size, par.etp, config.model
    if not model.has_experts or (ep == 1 and etp == par.tensor_model_parallel_size):
        return ""
    tokens = (train.seq_length or 0) * train.micro_batch
    forth, back, once = expert_bytes(model, par, tokens, element_bytes=2 if train.half else 4)
    replicas = config.world_size // (ep * etp * par.pipeline_model_parallel_size)
    said = (
        f"experts: {model.experts // ep} of {model.experts} on a rank, each split over {etp}, "
        f"on {replicas} rank{'s' * (replicas > 1)} the same"
    )
    if not once:
        return f"{said}; no token leaves its rank"
    name = "a gather" if model.moe_token_dispatcher_type == "allgather" else "an all-to-all"
    return (
        f"{said}; {name} is {once / MIB:.3g} MiB from a rank, and a layer and microbatch sends {forth / MIB:.3g} MiB "
        f"forward, {back / MIB:.3g} backward"
    )
