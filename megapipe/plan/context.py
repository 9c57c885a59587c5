"""Bytes that context and expert parallelism send, and the lines on them in a plan's text."""

from __future__ import annotations

from megapipe.config import Config, ModelConfig, ParallelConfig
from megapipe.plan.plan import Plan

MIB = 2**20


def context_bytes(
    model: ModelConfig, tokens: int, *, ranks: int, tp: int = 1, element_bytes: int = 4
) -> tuple[float, float]:
    """Return the bytes that context parallelism sends from a rank, per layer and microbatch.

    Args:
        tokens: number of tokens of a microbatch over all `ranks`.
        ranks: context-parallel ranks.
        tp: tensor-parallel ranks, which split the heads.
        element_bytes: bytes of an element of an activation.
    Returns: (bytes in forward, bytes in backward).
    """
    width = model.head_dim
    if model.multi_latent_attention:
        width = max(model.qk_dim, model.v_head_dim)
    row = tokens / ranks * width / tp * element_bytes
    full = model.recompute_granularity == "full"
    if "a2a" in model.cp_comm_type:
        # (c - 1) / c of queries, keys, values and output, each way.
        forth = (ranks - 1) / ranks * row * 2 * (model.heads + model.query_groups)
        back = forth * (1 + (full or model.recompute_attention))
        if model.has_delta:
            # The mean of both kinds of layers. A gated delta net exchanges what its projection
            # makes, and its output.
            share = sum(map(model.has_delta_in, range(model.layers))) / model.layers
            sent = model.delta_rows + model.delta_values
            once = (ranks - 1) / ranks * tokens / ranks * sent / tp * element_bytes
            forth += (once - forth) * share
            back += (once * (1 + full) - back) * share
        return forth, back
    # A block has the keys or the values of a rank's tokens: 2 (c - 1) blocks in forward, by p2p and
    # all_gather equally. Backward sends keys, values and their gradients.
    once = 2 * (ranks - 1) * row * model.query_groups
    return once, once * (2 + full)


def tensor_bytes(
    model: ModelConfig, tokens: int, *, ranks: int, element_bytes: int = 4
) -> tuple[float, float]:
    """Return the bytes that tensor parallelism sends from a rank, per layer and microbatch.

    Sequence parallelism is assumed. Forward gathers the hidden states before attention and before
    the MLP, and reduce-scatters the outputs of both. Backward does the reverse of these four, and
    gathers both inputs once more for the weight gradients.

    Args:
        tokens: tokens of a microbatch over all `ranks`.
        ranks: tensor-parallel ranks.
        element_bytes: bytes of an element of an activation.
    Returns: (bytes in forward, bytes in backward).
    """
    once = (ranks - 1) / ranks * tokens * model.hidden * element_bytes
    return 4 * once, 6 * once


def context_line(plan: Plan, config: Config) -> str:
    """Return a line that compares the bytes that a rank sends under two layouts.

    One layout is the run's. The other has tensor parallelism in place of its context parallelism.
    The line is "" without context parallelism.
    """
    model = config.model
    par = config.parallel
    ranks = par.context_parallel_size
    if ranks == 1:
        return ""
    tp = par.tensor_model_parallel_size
    tokens = config.batch.tokens
    element = config.precision.element_bytes
    forth, back = context_bytes(model, tokens, ranks=ranks, tp=tp, element_bytes=element)
    of_tensors = tensor_bytes(model, tokens // ranks, ranks=tp, element_bytes=element)
    # Context-parallel ranks have equal weights, so gradients are summed over them in float32.
    gradients = 2 * (ranks - 1) / ranks * 4 * plan.pieces.layers[0].parameters / tp
    mine = config.num_microbatches * (forth + back + sum(of_tensors)) + gradients
    instead = tensor_bytes(model, tokens, ranks=tp * ranks, element_bytes=element)
    other = config.num_microbatches * sum(instead)
    return (
        f"context parallel {ranks} ({model.cp_comm_type[0]}): a rank sends {forth / MIB:.3g} MiB "
        f"per layer and microbatch forward, {back / MIB:.3g} backward; with the sum of gradients "
        f"{_plain(mine / MIB)} MiB per layer and step, where --tensor-model-parallel-size "
        f"{tp * ranks} would send {_plain(other / MIB)} and hold 1/{ranks} of the weights"
    )


def _plain(number: float) -> str:
    """Return a number as text without an exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def expert_bytes(
    model: ModelConfig, par: ParallelConfig, tokens: int, *, element_bytes: int
) -> tuple[float, float, float]:
    """Return the bytes that a rank sends for its experts, per layer and microbatch.

    An even load of the experts is assumed. All three numbers are 0 if each rank has all experts, or
    if tensor parallelism alone splits the experts, as it splits an MLP.

    Args:
        par: the sizes of the parallelism.
        tokens: number of tokens of a microbatch over all tensor- and context-parallel ranks.
        element_bytes: bytes of an element of an activation.
    Returns: (bytes in forward, bytes in backward, bytes of the largest collective).
    """
    tp = par.tensor_model_parallel_size
    ranks = par.expert_model_parallel_size * par.etp
    if ranks == 1 or _as_an_mlp(par):
        return 0.0, 0.0, 0.0
    mine = tokens / par.context_parallel_size / tp
    row = model.hidden * element_bytes
    if model.moe_token_dispatcher_type == "allgather":
        # The tokens of all ranks are gathered and their outputs summed. Backward needs the gathered
        # input once more.
        once = (ranks - 1) * mine * row
        return 2 * once, 3 * once, once
    # All to all, (n - 1) / n of k rows of each token go to each slice of their experts and come
    # back, with 4 bytes of a weight each way. Backward sends as much.
    rows = mine * model.moe_router_topk * par.etp * (ranks - 1) / ranks
    sent = rows * (2 * row + 4)
    return sent, sent, rows * row


def _as_an_mlp(par: ParallelConfig) -> bool:
    """Return whether tensor parallelism alone splits the experts, as it splits an MLP."""
    return par.expert_model_parallel_size == 1 and par.etp == par.tensor_model_parallel_size


def expert_line(config: Config) -> str:
    """Return a line on how many experts a rank has, and on the bytes a rank sends for them.

    The line is "" without experts, or if tensor parallelism alone splits the experts, as it splits
    an MLP.
    """
    par = config.parallel
    model = config.model
    if not model.has_experts or _as_an_mlp(par):
        return ""
    tokens = config.batch.tokens
    element = config.precision.element_bytes
    forth, back, once = expert_bytes(model, par, tokens, element_bytes=element)
    replicas = config.expert_replicas
    said = (
        f"experts: {model.experts // par.expert_model_parallel_size} of {model.experts} on a rank, "
        f"each split over {par.etp}, on {replicas} rank{'s' * (replicas > 1)} the same"
    )
    factor = model.capacity_factor
    if factor is not None and factor < 1:
        # Even with an even load; a slip such as 0.01 would train almost nothing of the experts.
        said += f"; --moe-expert-capacity-factor {factor:g} drops {1 - factor:.1%} of the choices"
    if not once:
        return f"{said}; no token leaves its rank"
    name = "a gather" if model.moe_token_dispatcher_type == "allgather" else "an all-to-all"
    return (
        f"{said}; {name} is {once / MIB:.3g} MiB from a rank, and a layer and microbatch sends "
        f"{forth / MIB:.3g} MiB forward, {back / MIB:.3g} backward"
    )
