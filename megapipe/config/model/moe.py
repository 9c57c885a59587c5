"""Mixture of experts: which layers have experts, how the router chooses them, and its losses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Literal

from megapipe.config.notes import (
    ABOVE_0,
    BELOW_1,
    FINITE,
    FREE,
    FROM_0,
    FROM_1,
    MUST,
    NAMED,
    Range,
    Refused,
    excludes,
    needs,
)

EXPERTS = needs("num_experts", "there are no experts")
GROUPED = needs("moe_router_group_topk", "each token may use all experts")
WEIGHTS = Range("at least 0 and finite", lambda v: all(0 <= x < inf for x in v))
NOT_SINKHORN = excludes(
    "moe_router_load_balancing_type",
    "{} has no part in {}",
    "Leave it out.",
    lambda c: c.model.has_experts and c.model.by_sinkhorn,
)
Balancing = Literal[
    "aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn", "quantile_balancing"
]


@dataclass(frozen=True)
class MoEConfig:
    """Experts in place of the MLP. Without --num-experts these flags do nothing."""

    # Which layers have experts, and their width.
    num_experts: Annotated[int | None, FROM_0, MUST] = None
    """Experts of each mixture-of-experts layer. Default, and with 0: every layer has an MLP."""
    moe_layer_freq: Annotated[str, MUST, EXPERTS] = "1"
    """Which layers have experts. N: the layers 0, N, 2N, ... A list: the layers with a 1, such as
    ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: Annotated[int | None, FROM_1, MUST, EXPERTS] = None
    """Width of an expert; with a gate, such as --swiglu's, of each half. Default:
    --ffn-hidden-size."""
    # Balance: a loss, or the choice itself.
    moe_router_topk: Annotated[int, FROM_1, MUST, EXPERTS] = 2
    """Number of experts that each token is sent to."""
    # NAMED on --load, unlike the choice of experts: a loss changes the training, and not the
    # function that the weights compute.
    moe_router_load_balancing_type: Annotated[tuple[Balancing, ...], NAMED, EXPERTS] = ("aux_loss",)
    """How the router is kept balanced. A loss over each microbatch (aux_loss), each sequence
    (seq_aux_loss) or the step so far (global_aux_loss); several may be given. none: no loss.
    sinkhorn: the choice itself is balanced."""
    moe_aux_loss_coeff: Annotated[tuple[float, ...], WEIGHTS, NAMED, EXPERTS, NOT_SINKHORN] = (0.0,)
    """Weight of each loss of --moe-router-load-balancing-type, in the same order. 0 switches a
    loss off."""
    moe_z_loss_coeff: Annotated[float | None, FROM_0, NAMED, EXPERTS] = None
    """Weight of the loss on large router logits, for example 1e-3. Default: no such loss."""
    # The router: its scores, and the choice by them.
    moe_router_score_function: Annotated[
        Literal["softmax", "sigmoid", "sqrtsoftplus"], MUST, EXPERTS, NOT_SINKHORN
    ] = "softmax"
    """Function that turns the router's logits into scores of experts."""
    moe_router_pre_softmax: Annotated[
        bool,
        MUST,
        EXPERTS,
        NOT_SINKHORN,
        needs("moe_router_score_function", "there is no softmax", "softmax"),
    ] = False
    """Apply the softmax to all experts before the best are chosen, so that their weights add up to
    less than 1. Default: apply it to the chosen experts only."""
    moe_router_dtype: Annotated[Literal["fp32", "fp64"] | None, NAMED, EXPERTS] = None
    """Type in which the router computes. Default: the type of the activations."""
    moe_router_num_groups: Annotated[int | None, FROM_1, MUST, EXPERTS, GROUPED] = None
    """Number of equal groups of experts. A token may use --moe-router-group-topk groups."""
    moe_router_group_topk: Annotated[
        int | None,
        FROM_1,
        MUST,
        EXPERTS,
        NOT_SINKHORN,
        Refused(
            "{} of how many? Give --moe-router-num-groups.",
            lambda c: c.model.has_experts and c.model.moe_router_num_groups is None,
        ),
    ] = None
    """Number of groups that a token may use. The groups with the largest sum of their best scores
    are chosen. Default: all experts."""
    moe_router_group_score_topk: Annotated[int | None, FROM_1, MUST, EXPERTS, GROUPED] = None
    """Number of best scores in the sum that a group is chosen by; 1 in DeepSeek-V2. Default:
    --moe-router-topk / --moe-router-group-topk rounded down, as in Megatron-LM. Not in
    Megatron-LM."""
    moe_router_topk_scaling_factor: Annotated[
        float | None, ABOVE_0, MUST, EXPERTS, NOT_SINKHORN
    ] = None
    """Factor on the weights of a token's experts. Default: 1."""
    moe_router_enable_expert_bias: Annotated[
        bool,
        MUST,
        EXPERTS,
        NOT_SINKHORN,
    ] = False
    """Add a bias to each expert's score when experts are chosen, but not to its weight. Every step
    moves the biases towards an even load. Unlike in Megatron-LM the scores may be a softmax."""
    moe_router_bias_update_rate: Annotated[
        float,
        FROM_0,
        NAMED,
        EXPERTS,
        needs("moe_router_enable_expert_bias", "there is no bias to move"),
    ] = 1e-3
    """Amount by which a step changes each bias of --moe-router-enable-expert-bias."""
    moe_router_force_load_balancing: Annotated[bool, NAMED, EXPERTS] = False
    """Replace the router's logits by random ones, for benchmarks. All weights are still trained,
    but the choice of experts has no meaning."""
    moe_input_jitter_eps: Annotated[float | None, BELOW_1, NAMED, EXPERTS] = None
    """Multiply the router's input by random factors from 1 - eps to 1 + eps in training. Default:
    no jitter."""
    moe_apply_probs_on_input: Annotated[
        bool,
        MUST,
        EXPERTS,
        excludes(
            "moe_pad_expert_input_to_capacity",
            "{} gives padding rows of {} a gradient, as no weight of 0 follows them",
        ),
    ] = False
    """Multiply an expert's input by its weight, as Llama 4, and not what its activation returns."""
    # Limits on the tokens of an expert, and how they get there.
    moe_expert_capacity_factor: Annotated[float | None, FINITE, NAMED, EXPERTS] = None
    """Limit an expert to tokens x k / experts x this factor, rounded up, in each microbatch, and
    drop the rest. Default, and below 0: drop nothing."""
    moe_token_drop_policy: Annotated[
        Literal["probs", "position"],
        NAMED,
        EXPERTS,
        needs("moe_expert_capacity_factor", "nothing is dropped", least=0),
    ] = "probs"
    """Which tokens an expert at its capacity keeps. probs: the ones with the largest weights.
    position: the first ones."""
    moe_pad_expert_input_to_capacity: Annotated[
        bool,
        NAMED,
        EXPERTS,
        Refused(
            "{} pads to the rows that --moe-expert-capacity-factor allows. "
            "Add it, for example --moe-expert-capacity-factor 1.0.",
            lambda c: c.model.has_experts and c.model.capacity_factor is None,
        ),
    ] = False
    """Pad each expert's input to its capacity with rows that have no effect, so that all shapes
    are fixed."""
    # FREE on --load: each way brings the same rows to the same experts.
    moe_token_dispatcher_type: Annotated[
        Literal["allgather", "alltoall", "flex"], FREE, EXPERTS
    ] = "allgather"
    """How tokens reach experts on other ranks. allgather: every rank gets all tokens. alltoall:
    each token goes to the ranks of its experts. flex: the same as alltoall."""
    # The shared expert.
    moe_shared_expert_intermediate_size: Annotated[int | None, FROM_1, MUST, EXPERTS] = None
    """Width of the MLP that every token passes in addition to its experts, the sum over all shared
    experts. Default: there is none."""
    moe_shared_expert_gate: Annotated[
        bool,
        MUST,
        EXPERTS,
        needs("moe_shared_expert_intermediate_size", "there is no shared expert"),
    ] = False
    """Weigh the shared expert's output by a sigmoid of its input."""

    @property
    def has_experts(self) -> bool:
        """Return whether any layer has experts, or this layer in the configuration of one."""
        return bool(self.num_experts)

    @property
    def experts(self) -> int:
        """The number of experts of a layer. Read it only for a model with experts."""
        assert self.num_experts
        return self.num_experts

    def has_experts_in(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts.

        Raises: ValueError if --moe-layer-freq cannot be read, IndexError if its list is too short.
        """
        if not self.has_experts:
            return False
        frequency = frequency_of(self.moe_layer_freq)
        return layer % frequency == 0 if isinstance(frequency, int) else frequency[layer] == 1

    @property
    def group_scores(self) -> int:
        """Number of a group's best experts whose scores add up to the group's score.

        0 if experts are not chosen by groups.
        """
        if not self.moe_router_group_topk:
            return 0
        return (
            self.moe_router_group_score_topk or self.moe_router_topk // self.moe_router_group_topk
        )

    @property
    def balancing(self) -> dict[str, float]:
        """{name of a load-balancing loss, such as seq_aux_loss: its coefficient}.

        Losses with the coefficient 0 are left out.
        """
        # Not strict: a check reports lists of unequal length, and asks for this property meanwhile.
        kinds = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return {kind: weight for kind, weight in kinds if weight and kind.endswith("aux_loss")}

    @property
    def by_sinkhorn(self) -> bool:
        """Return whether Sinkhorn's algorithm balances the choice of experts, without a loss."""
        return "sinkhorn" in self.moe_router_load_balancing_type

    @property
    def capacity_factor(self) -> float | None:
        """The capacity of an expert, as a multiple of its even share; None drops no token."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else factor


MOST_LAYERS = 10_000
"""Limit on the length of the list, so that a slip such as [0]*10**9 does not fill the memory."""
DEEPEST = 50
"""Limit on the parentheses within each other."""


def layer_frequency(text: str) -> int | list[int]:
    """Return the value of --moe-layer-freq: an integer, or a list with a 0 or 1 for each layer.

    An integer n puts experts into the layers 0, n, 2n and so on. The list may be written with sums
    and products, as in Python: [0] * 2 + [1] * 3 is [0, 0, 1, 1, 1]. The text is never executed.

    Raises: ValueError for anything else.
    """
    found = frequency_of(text)
    return found if isinstance(found, int) else list(found)


@cache
def frequency_of(text: str) -> int | tuple[int, ...]:
    """Return the value of a text such as "2" or "[0]*3+[1]*9": an integer or a tuple.

    Raises: ValueError for anything but an integer of at least 1, or a list of 0 and 1.
    """
    # Read once: a search of plans asks for every layer of every plan.
    # A shell's array variable can leave quotes in the value.
    bare = text.strip().strip("'\"")
    # Not parsed by `ast`: CPython 3.11 raises SystemError where threads make syntax trees at once.
    words = re.findall(r"\d+|\S", bare)
    if not text.isascii() or words.count("(") > DEEPEST:
        raise ValueError(text)
    words.reverse()
    found = _sum(words)
    if words:
        raise ValueError(text)
    if isinstance(found, int):
        if found >= 1:
            return found
    elif set(found) <= {0, 1}:
        return tuple(found)
    raise ValueError(text)


# Recursive descent. `words` is in reverse order, so that the next word is at its end:
#   sum = product {"+" product}     product = value {"*" value}
#   value = integer | "[" integers "]" | "(" sum ")"


def _sum(words: list[str]) -> int | list[int]:
    """Parse one value, or lists with + between, such as [0] * 2 + [1]. Remove the parsed words."""
    total = _product(words)
    while words and words[-1] == "+":
        words.pop()
        more = _product(words)
        if isinstance(total, int) or isinstance(more, int):
            raise ValueError("a sum of integers")
        total = total + more
    return total


def _product(words: list[str]) -> int | list[int]:
    """Parse one value or a product such as [0,1]*3, and remove the parsed words."""
    total = _value(words)
    while words and words[-1] == "*":
        words.pop()
        more = _value(words)
        times = total
        items = more
        if not isinstance(total, int):
            times = more
            items = total
        if not isinstance(times, int) or isinstance(items, int) or times * len(items) > MOST_LAYERS:
            raise ValueError("not a list times an integer")
        total = items * times
    return total


def _value(words: list[str]) -> int | list[int]:
    """Parse an integer, a list, or an expression in parentheses. Remove the parsed words."""
    word = words.pop() if words else ""
    if word == "(":
        inside = _sum(words)
        _take(words, ")")
        return inside
    if word != "[":
        return int(word)
    items: list[int] = []
    while words and words[-1] != "]":
        items.append(int(words.pop()))
        if words and words[-1] != "]":
            _take(words, ",")
    _take(words, "]")
    return items


def _take(words: list[str], word: str) -> None:
    if not words or words.pop() != word:
        raise ValueError(f"no {word}")
