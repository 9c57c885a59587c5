"""Embedding and loss of a vocabulary that is split over the ranks of a pipeline.

Each rank has a share of the rows. This is the one-barrier form of Yeung et al. 2024 (arXiv
2411.05288, section 4). A share computes its maximum, its sum of exponentials and both parts of the
input gradient at once; the sums over all shares then only scale these. Shapes: n tokens, v' rows
of a share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, parameter
from megapipe.tensor_parallel.cross_entropy import without_loss
from megapipe.tensor_parallel.fused_cross_entropy import (
    KEPT_ELEMENTS,
    blocks_of,
    columns_of,
    exp_of,
    space_of,
    to_gradient_,
    wide_of,
)
from megapipe.tensor_parallel.products import add_product, linear
from megapipe.tensor_parallel.softcap import cap_, slope_of


class VocabularyRows(nn.Module):
    """A rank's rows of a weight [v, h] that is split over all ranks of a pipeline.

    The parameter is named `weight[k/n]`, such as weight[0/4] on the first of four ranks.

    Args:
        full: (v, h).
        part: (k, n): this is the k-th of n equal shares; tensor parallelism splits it again.
        std: standard deviation of the initial weight; None for a uniform distribution.
        tied_to: global name of the parameter that this weight repeats, or None.
    Attributes:
        first: the first row, counted in the whole vocabulary.
    """

    def __init__(
        self,
        full: tuple[int, int],
        part: tuple[int, int],
        tp: Axis,
        std: float | None,
        tied_to: str | None = None,
    ) -> None:
        super().__init__()
        v, h = full
        k, n = part
        assert v % (n * tp.size) == 0, f"{v} rows are not divisible by {n} x {tp.size} ranks"
        rows = v // n // tp.size
        self.first = (k * tp.size + tp.rank) * rows
        self.tp = tp
        self._name = f"weight[{k}/{n}]"
        layout = Layout(full, 0, tied_to, std=std, part=part)
        self.register_parameter(self._name, parameter(layout, rows, h))

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, [v/(n t), h]."""
        return self.get_parameter(self._name)


class Kept(NamedTuple):
    """The state of a vocabulary share for a microbatch, kept from the loss to the weight gradient.

    A share is one rank's rows of the output head.

    Attributes:
        rows: hidden states [n, h].
        labels: [n], counted from the share's first row.
        logits: for each block of the share's vocabulary, the logits [n, block]; None if they are
            too many to keep.
        cap: the number that caps the logits; None for plain ones.
    """

    rows: Tensor
    labels: Tensor
    logits: list[Tensor] | None
    cap: float | None = None


def share_of_loss(
    rows: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    differentiated: bool,
    cap: float | None = None,
) -> tuple[Tensor, Kept]:
    """Compute one rank's part of loss and input gradient, from its share of the vocabulary's rows.

    Args:
        rows: last hidden states [n, h].
        weight: [v', h], this share's rows of the head.
        labels: [n], counted from the share's first row.
        differentiated: whether gradients will be needed.
        cap: the number c of capped logits, c tanh(logit / c); None for plain ones.
    Returns: a message, and the state for `add_head_gradient`. The message is one flat tensor of
        rows' type with
        - [n, h], for each token the mean of `weight`'s rows under the share's own softmax;
        - [n, h], the label's row of `weight`, 0 if the label is in another share;
        - [3, n] in float32: maximum, sum of exponentials, and the label's logit, -inf if the label
          is in another share.

        The mean is 0 if not `differentiated`. Under a cap, mean and row have its slope as a factor.
    """
    n = len(rows)
    highest = rows.new_full((n,), float("-inf"), dtype=wide_of(rows))
    total, at_label = torch.zeros_like(highest), highest.clone()
    mean = rows.new_zeros(rows.shape, dtype=highest.dtype)
    kept: list[Tensor] | None = (
        [] if differentiated and n * weight.shape[0] <= KEPT_ELEMENTS else None
    )
    space = space_of(rows, weight.shape[0])
    for block in blocks_of(rows, weight.shape[0]):
        logits = cap_(linear(rows, weight[block]), cap)
        if kept is not None:
            kept.append(logits)
        inside, column = columns_of(labels, block)
        at_label = torch.where(
            inside, logits.gather(1, column).squeeze(1).to(at_label.dtype), at_label
        )
        higher = torch.maximum(highest, logits.amax(1))
        # The sums so far are scaled to the new maximum, so that no exponential overflows.
        fewer = (highest - higher).exp_()
        exp = exp_of(logits, higher, space)
        total = total * fewer + exp.sum(1)
        # Before the barrier, though only backward reads it: later it would need an exchange of its
        # own.
        if differentiated:
            if cap is not None:
                exp.mul_(slope_of(logits, cap))
            mean.mul_(fewer[:, None]).add_(linear(exp.to(rows.dtype), weight[block].t()))
        highest = higher
    inside, column = columns_of(labels, slice(0, weight.shape[0]))
    label_row = weight[column.squeeze(1)].masked_fill(~inside[:, None], 0.0)
    if cap is not None:
        label_row = label_row * slope_of(at_label.clamp(min=-cap), cap)[:, None].to(rows.dtype)
    # The float32 numbers are viewed as the rows' type: one message instead of two.
    numbers = torch.stack((highest, total, at_label)).view(rows.dtype).flatten()
    mean = mean.div_(total[:, None]).to(rows.dtype)
    return torch.cat((mean.flatten(), label_row.flatten(), numbers)), Kept(rows, labels, kept, cap)


def size_of_share(tokens: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the number of elements of the message that `share_of_loss` returns.

    tokens: n, their number. hidden: h, the hidden size. dtype: the type of the hidden states.
    """
    return tokens * (2 * hidden + 3 * _numbers(dtype))


def size_of_loss(tokens: int, dtype: torch.dtype) -> int:
    """Return the number of elements of the message that `packed_loss` returns.

    tokens: n, their number. dtype: the type of the message.
    """
    return tokens * 2 * _numbers(dtype)


class Combined(NamedTuple):
    """The loss over the whole vocabulary, from all shares, in float32.

    Attributes:
        losses: [n], 0 for a label outside of the vocabulary.
        log_sum: [n], logarithm of the softmax denominator.
        ignored: [n], True for a label outside of the vocabulary.
        to_input: [n, h], gradient of each token's loss with respect to its hidden state. Under
            tensor parallelism it is a summand; the sum over tp is the gradient.
    """

    losses: Tensor
    log_sum: Tensor
    ignored: Tensor
    to_input: Tensor


def combine(
    shares: Sequence[Tensor], hidden: int, tp: Axis, part: tuple[int, int] = (0, 1)
) -> Combined:
    """Combine the messages of all ranks' shares into the loss, always in the order of the shares.

    Collective over tp.

    Args:
        shares: the messages of `share_of_loss`, of one dtype.
        hidden: h. tp: the ranks that split each share.
        part: (k, n): cut the tokens into n equal ranges, and combine range k only, from 0.
    """
    dtype = shares[0].dtype
    tokens = shares[0].numel() // (2 * hidden + 3 * _numbers(dtype))
    n = tokens // part[1]
    own = slice(part[0] * n, (part[0] + 1) * n)
    rows = [share[: 2 * tokens * hidden].view(2, tokens, hidden)[:, own] for share in shares]
    wide = torch.promote_types(dtype, torch.float32)
    numbers = []
    for share in shares:
        # A copy, because a view as float32 needs an aligned address.
        packed = share[2 * tokens * hidden :].clone().view(wide)
        numbers.append(packed.view(3, tokens)[:, own])
    highest, total, at_label = torch.stack(numbers, dim=1)
    # The label's logit is -inf in all shares but one, so the maximum finds it. Where it is -inf in
    # all of them, the label is outside of the vocabulary.
    most = torch.stack((highest.amax(0), at_label.amax(0)))
    if tp.size > 1:
        most = tp.all_reduce(most, "max")
    top, label = most
    sums = (total * (highest - top).exp()).sum(0)
    if tp.size > 1:
        sums = tp.all_reduce(sums)
    log_sum = sums.log() + top
    ignored = label == float("-inf")
    # The gradient is the mean row under the whole softmax, minus the label's row. A share's mean
    # counts by its part of the denominator.
    weights = total * (highest - log_sum).exp()
    to_input = torch.zeros(n, hidden, dtype=log_sum.dtype, device=log_sum.device)
    for (mean, label_row), weight in zip(rows, weights, strict=True):
        to_input += mean * weight[:, None] - label_row
    return Combined((log_sum - label).masked_fill(ignored, 0.0), log_sum, ignored, to_input)


def packed_loss(log_sum: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what each vocabulary share needs for its weight gradient, as one flat message.

    Args:
        log_sum: [n], logarithm of the softmax denominator over the whole vocabulary.
        scale: [n], the gradient of each token's loss, float32 as log_sum.
        dtype: the type of the message.
    """
    return torch.stack((log_sum, scale)).view(dtype).flatten()


def add_head_gradient(kept: Kept, weight: Tensor, into: Tensor, *losses: Tensor) -> None:
    """Add the gradient of a share's rows of the head into a tensor, in place.

    Args:
        kept: the state that `share_of_loss` returned. Call this once: kept logits are overwritten.
        weight: [v', h]. into: [v', h].
        losses: messages of `packed_loss`, one for each range of the tokens.
    """
    rows, labels, logits, cap = kept
    numbers = [loss.clone().view(wide_of(rows)).view(2, -1) for loss in losses]
    log_sum, scale = torch.cat(numbers, 1)
    space = space_of(rows, weight.shape[0])
    for number, block in enumerate(blocks_of(rows, weight.shape[0])):
        dy = cap_(linear(rows, weight[block]), cap) if logits is None else logits[number]
        to_gradient_(dy, log_sum, scale, labels - block.start, space, cap)
        add_product(into[block], dy, rows)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[ids], with zeros where an id is in another share.

    Args:
        ids: [...], counted from the share's first row.
        weight: [v', h].
    Returns: [..., h].
    """
    outside = without_loss(ids, weight.shape[0])
    rows = weight[ids.masked_fill(outside, 0)]
    return rows.masked_fill_(outside.unsqueeze(-1), 0.0)


def add_rows_gradient(ids: Tensor, grad: Tensor, into: Tensor) -> None:
    """Add the gradient of an embedding lookup to a tensor of the weight's shape, in place.

    Args:
        ids: [...], counted from the share's first row.
        grad: [..., h], the gradient of the embeddings that `look_up` returned.
        into: [v', h].
    """
    outside = without_loss(ids, into.shape[0])
    rows = grad.masked_fill(outside.unsqueeze(-1), 0.0).reshape(-1, grad.shape[-1])
    # Rows of other shares were zeroed, and add to row 0 without effect.
    into.index_add_(0, ids.masked_fill(outside, 0).reshape(-1), rows.to(into.dtype))


def _numbers(dtype: torch.dtype) -> int:
    """Return how many elements of `dtype` in a message hold one float32 number: 2 for bf16."""
    return torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize
