"""The work of a dense MLP, and of experts with their router under an even load.

A row is one token at one of the experts that it chose. Bytes of rows are counted where they lie:
at home, on the rank of the token, or here, on the rank of the expert.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megapipe.config import ModelConfig
from megapipe.config.model.activation import ACTIVATIONS
from megapipe.plan.layers.load import RankLoad, norm_size, norms_of_half
from megapipe.plan.layers.work import Work

NUMBER = 8
"""Bytes of the number of a row or of an expert, an int64."""


def mlp_work(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work and memory of a layer's MLP or experts, with the norm before it.

    Args:
        load: the tokens of a microbatch on one rank, and the ranks that split the layer.
    """
    if model.no_mlp:
        return Work()
    if model.has_experts:
        return _experts(model, load)
    h = model.hidden
    ffn = model.ffn
    matrices = _matrices(model)
    products = 2.0 * load.tokens * h * ffn * matrices
    again = model.recompute_mlp
    # The norm's result, or the residual stream itself where no norm precedes; then what a norm
    # after the MLP reads.
    normed = h * _keeps_normed(model) + h * model.has_post_norm
    inside = _kept(model) * ffn * (not again)
    rest = load.bytes(normed, inside, h * bool(model.hidden_dropout))
    return Work(
        products,
        products * (1 + again),
        products,
        **load.saved((load.bytes(h * _norm_keeps_input(model), 0), "mlp_norm"), (rest, "")),
        kept=load.bytes(2 * h, matrices * ffn),
        parameters=_parameters(model, ffn) + _norms(model),
        # Backward has the gradients of the output, of the last product's input and of the first
        # product's output together.
        passing=load.bytes(h, ffn * (matrices + _kept(model) * again)),
    )


def _matrices(model: ModelConfig) -> int:
    """Return the number of weight matrices of an MLP or expert: 3 with a gate, else 2."""
    return 3 if model.gated else 2


def _parameters(model: ModelConfig, width: int) -> int:
    """Return the number of parameters of an MLP or expert, without a norm.

    Args:
        width: the number of its inner channels.
    """
    matrices = _matrices(model)
    bias = (matrices - 1) * width * model.has_bias("fc1") + model.hidden * model.has_bias("fc2")
    scalars = ACTIVATIONS[model.activation].weights
    return model.hidden * width * matrices + bias + scalars


def _kept(model: ModelConfig) -> int:
    """Return the number of tensors [tokens, width] that an MLP keeps for backward.

    These are the output of the first product (two tensors with a gate) and the input of the last.
    """
    return ACTIVATIONS[model.activation].kept


def _shares_norm(model: ModelConfig) -> bool:
    """Return whether the MLP has no norm of its own, and reads the output of attention's norm."""
    return model.parallel_attention_mlp == "one_norm" and not model.no_attention


def _norm_keeps_input(model: ModelConfig) -> bool:
    """Return whether the norm before the MLP keeps an input that attention's norm does not keep."""
    follows = model.parallel_attention_mlp is None or model.no_attention
    return model.has_pre_norm and follows


def _norms(model: ModelConfig) -> int:
    """Return the number of parameters of the norms before and after an MLP."""
    return norm_size(model, model.hidden) * (norms_of_half(model) - _shares_norm(model))


def _keeps_normed(model: ModelConfig) -> bool:
    """Return whether the MLP keeps its input for backward.

    It does not if the norm before it is recomputed, or if attention keeps the same tensor.
    """
    again = model.has_pre_norm and model.recompute_norms
    return not again and not _shares_norm(model)


class _Rows(NamedTuple):
    """The rows of a microbatch on one rank. A row is a token on its way to one of its experts.

    Attributes:
        here: number of rows that this rank's experts compute.
        exchanged: whether rows come from other ranks by an all-to-all.
        numbers: bytes of the int64 index tables that say where each row goes.
    """

    here: float
    exchanged: bool
    numbers: float


def _experts(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work and memory of a layer's experts, their router, and the norm before them.

    Args:
        load: the tokens of a microbatch on one rank, and the ranks that split the layer.
    """
    h = model.hidden
    experts = model.experts
    choices = model.moe_router_topk
    gate = model.moe_shared_expert_gate
    shared = model.moe_shared_expert_intermediate_size or 0
    matrices = _matrices(model)

    # Without a capacity experts accept all rows, however unevenly a router deals them.
    tokens = load.tokens / load.shared
    accepted = float(load.tokens * choices)
    if model.capacity_factor is not None:
        capacity = math.ceil(tokens * choices / experts * model.capacity_factor)
        full = experts * load.shared * min(tokens, capacity)
        accepted = full if model.moe_pad_expert_input_to_capacity else min(accepted, full)
    rows = _placed(model, load, accepted)

    by_all_tokens = load.tokens * (experts + gate + shared * matrices)
    products = 2.0 * h * (accepted * model.expert_ffn * matrices + by_all_tokens)
    expert = _parameters(model, model.expert_ffn)
    dense = h * (experts + gate) + experts * model.has_bias("router") + _norms(model)
    if shared:
        dense += _parameters(model, shared)

    row = load.element * model.expert_ffn / load.etp
    came = rows.here * load.element * h * rows.exchanged
    of_router = _score(model) * tokens * experts
    kept = load.bytes(2 * h, matrices * shared) + rows.here * row * matrices + 2 * came
    return Work(
        products,
        products * (1 + model.recompute_moe),
        products,
        **load.saved(*_saved(model, load, rows)),
        kept=kept + of_router,
        parameters=experts * expert + dense,
        unused=(experts - choices) * expert,
        experts=experts * expert,
        passing=load.bytes(h, 0) + rows.here * (load.element * h + row * matrices),
    )


def _placed(model: ModelConfig, load: RankLoad, accepted: float) -> _Rows:
    """Return this rank's rows: number, whether they are exchanged, and bytes of their tables.

    A row is one token for one of its experts.

    Args:
        load: a rank's tokens, and the ranks that split the layer.
        accepted: number of rows that no expert drops, on all tensor-parallel ranks together.
    """
    tokens = load.tokens / load.shared
    choices = model.moe_router_topk
    home = accepted / load.shared
    at_home = home * 3 * NUMBER + tokens * choices * NUMBER
    # Tensor-parallel ranks with the same tokens send none: each computes its part of every expert.
    if load.shared < load.tp:
        return _Rows(home, False, at_home)
    here = home * load.etp
    ranks = load.ep * load.etp
    if ranks > 1 and model.moe_token_dispatcher_type != "allgather":
        # An exchange has tables at home and at the expert.
        return _Rows(here, True, at_home + here * 2 * NUMBER)
    # The tokens of all ranks are gathered, and tables say which of them come here.
    return _Rows(here, False, here * 3 * NUMBER + tokens * ranks * choices * NUMBER)


def _saved(model: ModelConfig, load: RankLoad, rows: _Rows) -> list[tuple[float, str]]:
    """Return the bytes that experts, router and norm keep until backward.

    Args:
        load: a rank's tokens, and the ranks that split the layer.
        rows: the rows of the microbatch on one rank.
    Returns: (bytes, names of the modules that save them, separated by spaces) for each group of
        tensors.
    """
    h = model.hidden
    again = model.recompute_moe
    # Rows that were exchanged are copies: then no expert keeps the norm's output.
    of_normed = "" if again or rows.exchanged else "expert_fc1"
    saved = [
        (load.bytes(h * _norm_keeps_input(model), 0), "mlp_norm"),
        (load.bytes(h * model.has_post_norm, 0, h * bool(model.hidden_dropout)), ""),
        (load.bytes(h * _keeps_normed(model), 0), of_normed),
    ]
    if again:
        return saved
    came = rows.here * load.element * h * rows.exchanged
    # Of a row the first product's output and the row's weight; the activation is computed again.
    row = load.element * model.expert_ffn / load.etp
    acts = rows.here * (row * (_matrices(model) - 1) + _score(model))
    return [*saved, (_rest(model, load, rows), ""), (came, "expert_fc1"), (acts, "moe_act")]


def _rest(model: ModelConfig, load: RankLoad, rows: _Rows) -> float:
    """Return the bytes kept by router and shared expert, and of tables that say where rows go.

    Args:
        load: a rank's tokens, and the ranks that split the layer.
        rows: the rows of the microbatch on one rank.
    """
    tokens = load.tokens / load.shared
    choices = tokens * model.moe_router_topk
    score = _score(model)
    shared = model.moe_shared_expert_intermediate_size or 0
    of_shared = _kept(model) * shared * (not model.recompute_shared_experts)

    # A router keeps the scores of all experts, or of the chosen ones alone if it chooses first.
    # Losses that balance the experts read all scores once more.
    softmax = model.moe_router_score_function == "softmax"
    all_scores = not softmax or model.moe_router_pre_softmax
    router = score * tokens * model.experts * (all_scores + bool(model.balancing))
    of_choice = NUMBER + score + (NUMBER + 2 * score) * (not all_scores)

    tables = rows.numbers + rows.here * score + choices * of_choice
    # The weights of rows lie with the experts' activations, and are not counted twice.
    gate = model.hidden * model.moe_shared_expert_gate
    return load.bytes(gate, of_shared) + router + tables - rows.here * score


def _score(model: ModelConfig) -> int:
    """Return the bytes of one router score: 8 for float64, else 4."""
    return 8 if model.moe_router_dtype == "fp64" else 4
