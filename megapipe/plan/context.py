"""Bytes that context parallelism sends, beside those of tensor parallelism over as many ranks, and those that tokens on
their way to experts are; and the lines on them."""

from __future__ import annotations

from megapipe.config import Config, ModelConfig, ParallelConfig
from megapipe.plan.plan import Plan

MIB = 2**20


def context_bytes(
    model: ModelConfig, tokens: int, *, ranks: int, tp: int = 1, element_bytes: int = 4
) -> tuple[float, float]:
    """Bytes that a rank sends for one layer and microbatch, (in forward, in backward).

    With a block the keys or the values of a rank's tokens: 2 (c - 1) blocks in forward, and in backward twice as many,
    keys, values and their gradients, by p2p and all_gather alike. By a2a (c - 1) / c of queries, keys, values and
    output, each way. Attention that is computed again sends what its forward sends once more.

    Args:
        tokens: of a microbatch over all `ranks`.
    """
    width = max(model.qk_dim, model.v_head_dim) if model.multi_latent_attention else model.head_dim
    row = tokens / ranks * width / tp * element_bytes
    if "a2a" in model.cp_comm_type:
        once = (ranks - 1) / ranks * row * 2 * (model.heads + model.query_groups)
        again = model.recompute_attention or model.recompute_granularity == "full"
        return once, once * (1 + again)
    once = 2 * (ranks - 1) * row * model.query_groups
    return once, once * (2 + (model.recompute_granularity == "full"))


def tensor_bytes(model: ModelConfig, tokens: int, *, ranks: int, element_bytes: int = 4) -> tuple[float, float]:
    """Bytes of tensor parallelism with --sequence-parallel: an all-gather and a reduce-scatter of the hidden states
    around attention and around the MLP, in backward two all-gathers more, for the weights' gradients."""
    once = (ranks - 1) / ranks * tokens * model.hidden * element_bytes
    return 4 * once, 6 * once


def context_line(plan: Plan, config: Config) -> str:
    """A line on the bytes that are sent, and those of as much tensor parallelism; empty without context parallelism."""
    model, par, c = config.model, config.parallel, config.parallel.context_parallel_size
    if c == 1:
        return ""
    t, m, parameters = par.tensor_model_parallel_size, config.num_microbatches, plan.pieces.layers[0].parameters
    tokens, element = (config.batch.seq_length or 0) * config.batch.micro_batch, config.precision.element_bytes
    forth, back = context_bytes(model, tokens, ranks=c, tp=t, element_bytes=element)
    beside = sum(tensor_bytes(model, tokens // c, ranks=t, element_bytes=element))
    mine = m * (forth + back + beside) + 2 * (c - 1) / c * 4 * parameters / t
    other = m * sum(tensor_bytes(model, tokens, ranks=t * c, element_bytes=element))
    said, instead = _plain(mine / MIB), _plain(other / MIB)
    return (
        f"context parallel {c} ({model.cp_comm_type[0]}): a rank sends {forth / MIB:.3g} MiB per layer and microbatch "
        f"forward, {back / MIB:.3g} backward; with the sum of gradients {said} MiB per layer and step, where "
        f"--tensor-model-parallel-size {t * c} would send {instead} and hold 1/{c} of the weights"
    )


def _plain(number: float) -> str:
    """A number without an exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


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
    par = config.parallel
    ep, etp, model = par.expert_model_parallel_size, par.etp, config.model
    if not model.has_experts or (ep == 1 and etp == par.tensor_model_parallel_size):
        return ""
    tokens = (config.batch.seq_length or 0) * config.batch.micro_batch
    forth, back, once = expert_bytes(model, par, tokens, element_bytes=config.precision.element_bytes)
    replicas = config.expert_replicas
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
