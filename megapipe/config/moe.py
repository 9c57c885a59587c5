"""The experts of a model: the mixture-of-experts layers among its layers, their router and its losses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from megapipe.config.notes import ABOVE_0, BELOW_1, FINITE, FREE, MUST, NAMED, Range, Refused, at_least, excludes, needs

EXPERTS = needs("num_experts", "there are no experts")
WEIGHTS = Range("at least 0 and finite", lambda v: all(0 <= x < inf for x in v))
NOT_SINKHORN = excludes(
    "moe_router_load_balancing_type",
    "{} has no part in {}",
    "Leave it out.",
    lambda c: c.model.has_experts and c.model.by_sinkhorn,
)


@dataclass(frozen=True)
class MoEConfig:
    """Experts in place of the MLP. Without --num-experts all layers are dense."""

    num_experts: Annotated[int | None, at_least(0), MUST] = None
    """Experts of each mixture-of-experts layer. Default, and with 0: none, every layer has an MLP."""
    moe_layer_freq: Annotated[str, MUST, EXPERTS] = "1"
    """Which layers have experts: N for layers 0, N, 2N, ..., or a list with a 1 for each, such as ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: Annotated[int | None, at_least(1), MUST, EXPERTS] = None
    """Width of an expert; per half with --swiglu. Default: --ffn-hidden-size."""
    moe_router_topk: Annotated[int, at_least(1), MUST, EXPERTS] = 2
    """Experts that each token is sent to."""
    moe_router_load_balancing_type: Annotated[
        tuple[Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn", "quantile_balancing"], ...],
        NAMED,
        EXPERTS,
    ] = ("aux_loss",)
    """Means of an even load: losses over a microbatch, over each sequence, over the step so far, several at once; or
    Sinkhorn's choice."""
    moe_aux_loss_coeff: Annotated[tuple[float, ...], WEIGHTS, NAMED, EXPERTS, NOT_SINKHORN] = (0.0,)
    """Weight of each loss of --moe-router-load-balancing-type; at 0 there is none."""
    moe_z_loss_coeff: Annotated[float | None, at_least(0), NAMED, EXPERTS] = None
    """Weight of the loss on large router logits, for example 1e-3. Default: none."""
    moe_router_score_function: Annotated[Literal["softmax", "sigmoid", "sqrtsoftplus"], MUST, EXPERTS, NOT_SINKHORN] = (
        "softmax"
    )
    """From a router's logits to the scores of experts."""
    moe_router_pre_softmax: Annotated[
        bool, MUST, EXPERTS, NOT_SINKHORN, needs("moe_router_score_function", "there is no softmax", "softmax")
    ] = False
    """Softmax over all experts, then the best, whose weights add up to less than 1; not over the best alone."""
    moe_router_dtype: Annotated[Literal["fp32", "fp64"] | None, NAMED, EXPERTS] = None
    """Type that the router computes in. Default: that of the activations."""
    moe_router_num_groups: Annotated[
        int | None, at_least(1), MUST, EXPERTS, needs("moe_router_group_topk", "each token may use all experts")
    ] = None
    """Groups of experts of which a token may use --moe-router-group-topk."""
    moe_router_group_topk: Annotated[
        int | None,
        at_least(1),
        MUST,
        EXPERTS,
        NOT_SINKHORN,
        Refused(
            "{} of how many? Give --moe-router-num-groups.",
            lambda c: c.model.has_experts and c.model.moe_router_num_groups is None,
        ),
    ] = None
    """Groups for each token, those with the best sum of their best scores."""
    moe_router_group_score_topk: Annotated[
        int | None, at_least(1), MUST, EXPERTS, needs("moe_router_group_topk", "each token may use all experts")
    ] = None
    """Best scores of a group that its sum is of: 1 in DeepSeek-V2. Default: --moe-router-topk / --moe-router-group-topk
    rounded down, as in Megatron-LM. Not in Megatron-LM."""
    moe_router_topk_scaling_factor: Annotated[float | None, ABOVE_0, MUST, EXPERTS, NOT_SINKHORN] = None
    """Factor on the weights of a token's experts."""
    moe_router_enable_expert_bias: Annotated[
        bool,
        MUST,
        EXPERTS,
        NOT_SINKHORN,
        Refused(
            "{} works on scores of sigmoid or sqrtsoftplus. Add --moe-router-score-function sigmoid.",
            lambda c: c.model.has_experts and c.model.moe_router_score_function == "softmax",
        ),
    ] = False
    """A bias on each expert's score, for the choice alone, that moves each step towards an even load."""
    moe_router_bias_update_rate: Annotated[
        float, at_least(0), NAMED, EXPERTS, needs("moe_router_enable_expert_bias", "there is no bias to move")
    ] = 1e-3
    """How far that bias moves in a step."""
    moe_router_force_load_balancing: Annotated[bool, NAMED, EXPERTS] = False
    """Random logits in place of the router's, for benchmarks: the model learns nothing."""
    moe_input_jitter_eps: Annotated[float | None, BELOW_1, NAMED, EXPERTS] = None
    """The router sees its input times random factors in 1 - eps .. 1 + eps while it trains."""
    moe_expert_capacity_factor: Annotated[float | None, FINITE, NAMED, EXPERTS] = None
    """An expert takes at most tokens x k / experts x this of a microbatch, the rest is dropped. Default, and below 0:
    all."""
    moe_token_drop_policy: Annotated[
        Literal["probs", "position"],
        NAMED,
        EXPERTS,
        needs("moe_expert_capacity_factor", "nothing is dropped", least=0),
    ] = "probs"
    """Which tokens an expert keeps: those of the largest weights, or the first."""
    moe_pad_expert_input_to_capacity: Annotated[
        bool,
        NAMED,
        EXPERTS,
        Refused(
            "{} pads to the rows that --moe-expert-capacity-factor allows. Add it, for example "
            "--moe-expert-capacity-factor 1.0.",
            lambda c: c.model.has_experts and c.model.capacity_factor is None,
        ),
    ] = False
    """Each expert computes as many rows as it may take, with rows that count nothing: all shapes are fixed."""
    moe_token_dispatcher_type: Annotated[Literal["allgather", "alltoall", "flex"], FREE, EXPERTS] = "allgather"
    """How tokens reach experts on other ranks: every rank sees all tokens, or rows go where they are needed; flex, with
    its kernels, is alltoall."""
    moe_shared_expert_intermediate_size: Annotated[int | None, at_least(1), MUST, EXPERTS] = None
    """Width of an MLP beside the experts that every token goes through, of all shared experts together."""
    moe_shared_expert_gate: Annotated[
        bool, MUST, EXPERTS, needs("moe_shared_expert_intermediate_size", "there is no shared expert")
    ] = False
    """A sigmoid of the input weighs the shared expert's output."""

    @property
    def has_experts(self) -> bool:
        """Is any layer's MLP a mixture of experts? Of the configuration of one layer: is its own?"""
        return bool(self.num_experts)

    @property
    def experts(self) -> int:
        assert self.num_experts
        return self.num_experts

    def has_experts_in(self, layer: int) -> bool:
        """Are there experts in this layer of the model? Raises: ValueError for a frequency that is none."""
        if not self.has_experts:
            return False
        frequency = layer_frequency(self.moe_layer_freq)
        return layer % frequency == 0 if isinstance(frequency, int) else frequency[layer] == 1

    @property
    def group_scores(self) -> int:
        """Scores that a group is chosen by; 0 where there are no groups."""
        if not self.moe_router_group_topk:
            return 0
        return self.moe_router_group_score_topk or self.moe_router_topk // self.moe_router_group_topk

    @property
    def balancing(self) -> dict[str, float]:
        """Weight of each loss that keeps the load even, by its name in --moe-router-load-balancing-type."""
        kinds = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return {kind: weight for kind, weight in kinds if weight and kind.endswith("aux_loss")}

    @property
    def by_sinkhorn(self) -> bool:
        """Is the load kept even by the choice itself, without a loss?"""
        return "sinkhorn" in self.moe_router_load_balancing_type

    @property
    def capacity_factor(self) -> float | None:
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else factor


MOST_LAYERS = 10_000
DEEPEST = 50


def layer_frequency(text: str) -> int | list[int]:
    """Return the layers that --moe-layer-freq names: every n-th, or a list with 1 for each layer of experts.

    Args:
        text: an integer, or an expression of lists, sums and products in Python's syntax. It is never executed.

    Raises: ValueError for anything else.
    """
    # Not parsed by `ast`: CPython 3.11 raises SystemError where threads make syntax trees at the same time.
    words = re.findall(r"\d+|\S", text.strip().strip("'\""))  # a shell's array keeps inner quotes
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
        return found
    raise ValueError(text)


def _sum(words: list[str]) -> int | list[int]:
    """Take a sum of lists from the end of `words`, which stand in reverse order."""
    total = _product(words)
    while words and words[-1] == "+":
        words.pop()
        more = _product(words)
        if isinstance(total, int) or isinstance(more, int):
            raise ValueError("a sum of integers")
        total = total + more
    return total


def _product(words: list[str]) -> int | list[int]:
    """Take a list, or one times an integer, from the end of `words`."""
    total = _value(words)
    while words and words[-1] == "*":
        words.pop()
        more = _value(words)
        times, items = (total, more) if isinstance(total, int) else (more, total)
        if not isinstance(times, int) or isinstance(items, int) or times * len(items) > MOST_LAYERS:
            raise ValueError("not a list times an integer")
        total = items * times
    return total


def _value(words: list[str]) -> int | list[int]:
    """Take an integer, a list of integers, or an expression in parentheses from the end of `words`."""
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
