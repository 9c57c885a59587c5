"""The vocabulary split over the ranks of a pipeline: the mathematics of a share, and what becomes of all of them.

The one-barrier form of Yeung et al. 2024 (arXiv 2411.05288, section 4): a share gives its maximum, its sum of
exponentials and both parts of the input gradient at once; the sums over all shares decide only how much these count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
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


class VocabularyRows(nn.Module):
    """A rank's rows of a weight [v, h] that all ranks of a pipeline share; its parameter is called `weight[k/n]`.

    Args:
        part: (k, n), the k-th of n equal shares, each of which tp splits again.
    """

    def __init__(
        self, full: tuple[int, int], part: tuple[int, int], tp: Axis, std: float | None, tied_to: str | None = None
    ) -> None:
        super().__init__()
        assert full[0] % (part[1] * tp.size) == 0, f"{full[0]} rows do not divide over {part[1]} x {tp.size} ranks"
        rows = full[0] // part[1] // tp.size
        self.first, self.tp, self._name = (part[0] * tp.size + tp.rank) * rows, tp, f"weight[{part[0]}/{part[1]}]"
        layout = Layout(full, 0, tied_to, std=std, part=part)
        self.register_parameter(self._name, set_layout(nn.Parameter(torch.empty(rows, full[1])), layout))

    @property
    def weight(self) -> nn.Parameter:
        """[v/(n t), h]."""
        return self.get_parameter(self._name)


class Kept(NamedTuple):
    """The state of a microbatch from its share to its weight gradient: hidden states [n, h], labels [n] from the first
    row, and the logits of each block if they are few."""

    rows: Tensor
    labels: Tensor
    logits: list[Tensor] | None


def share_of_loss(rows: Tensor, weight: Tensor, labels: Tensor, *, differentiated: bool) -> tuple[Tensor, Kept]:
    """The part of the loss, and of its input gradient, that one share of the vocabulary knows.

    Args:
        rows: last hidden states [n, h]. weight: [v', h], this share's rows. labels: [n], counted from its first row.
    Returns: one tensor of rows' type to be sent: mean row under the share's own softmax [n, h], the label's row [n, h]
        (zeros where it is in another share), and in float32 [3, n] the maximum, sum of exponentials and logit of the
        label (-inf where it is in another share).
    """
    n = len(rows)
    highest = rows.new_full((n,), float("-inf"), dtype=wide_of(rows))
    total, at_label = torch.zeros_like(highest), highest.clone()
    mean = rows.new_zeros(rows.shape, dtype=highest.dtype)
    kept: list[Tensor] | None = [] if differentiated and n * weight.shape[0] <= KEPT_ELEMENTS else None
    space = space_of(rows, weight.shape[0])
    for block in blocks_of(rows, weight.shape[0]):
        logits = linear(rows, weight[block])
        if kept is not None:
            kept.append(logits)
        inside, column = columns_of(labels, block)
        at_label = torch.where(inside, logits.gather(1, column).squeeze(1).to(at_label.dtype), at_label)
        higher = torch.maximum(highest, logits.amax(1))
        # Sums so far are brought to the new maximum: one pass over the blocks, and no exponential overflows.
        fewer = (highest - higher).exp_()
        exp = exp_of(logits, higher, space)
        total = total * fewer + exp.sum(1)
        if differentiated:
            mean.mul_(fewer[:, None]).add_(linear(exp.to(rows.dtype), weight[block].t()))
        highest = higher
    inside, column = columns_of(labels, slice(0, weight.shape[0]))
    label_row = weight[column.squeeze(1)].masked_fill(~inside[:, None], 0.0)
    # float32 numbers travel as bits in a tensor of the rows' type: one message in place of two.
    numbers = torch.stack((highest, total, at_label)).view(rows.dtype).flatten()
    mean = mean.div_(total[:, None]).to(rows.dtype)
    return torch.cat((mean.flatten(), label_row.flatten(), numbers)), Kept(rows, labels, kept)


def size_of_share(tokens: int, hidden: int, dtype: torch.dtype) -> int:
    """Elements of what `share_of_loss` returns."""
    return tokens * (2 * hidden + 3 * _numbers(dtype))


def size_of_loss(tokens: int, dtype: torch.dtype) -> int:
    """Elements of what `packed_loss` returns."""
    return tokens * 2 * _numbers(dtype)


class Combined(NamedTuple):
    """The shares put together, each [n] in float32.

    Attributes:
        losses: of each token, 0 for a label outside of the vocabulary.
        log_sum: logarithm of the softmax's denominator.
        ignored: which labels are outside.
        to_input: gradient of each token's loss with respect to its hidden state [n, h]; over tp a summand of it.
    """

    losses: Tensor
    log_sum: Tensor
    ignored: Tensor
    to_input: Tensor


def combine(shares: Sequence[Tensor], hidden: int, tp: Axis, part: tuple[int, int] = (0, 1)) -> Combined:
    """Put the shares together, always in their order.

    Args:
        shares: as `share_of_loss` returns them, of one dtype.
        part: (k, n): of the k-th of n equal runs of their tokens.
    """
    dtype = shares[0].dtype
    tokens = shares[0].numel() // (2 * hidden + 3 * _numbers(dtype))
    n = tokens // part[1]
    own = slice(part[0] * n, (part[0] + 1) * n)
    rows = [share[: 2 * tokens * hidden].view(2, tokens, hidden)[:, own] for share in shares]
    # A copy: a view as float32 would need an aligned beginning.
    numbers = [share[2 * tokens * hidden :].clone().view(torch.promote_types(dtype, torch.float32)) for share in shares]
    highest, total, at_label = torch.stack([one.view(3, tokens)[:, own] for one in numbers], dim=1)
    most = torch.stack((highest.amax(0), at_label.amax(0)))
    top, label = tp.all_reduce(most, "max") if tp.size > 1 else most
    sums = (total * (highest - top).exp()).sum(0)
    log_sum = (tp.all_reduce(sums) if tp.size > 1 else sums).log() + top
    ignored = label == float("-inf")
    weights = total * (highest - log_sum).exp()
    to_input = torch.zeros(n, hidden, dtype=log_sum.dtype, device=log_sum.device)
    for (mean, label_row), weight in zip(rows, weights, strict=True):
        to_input += mean * weight[:, None] - label_row
    return Combined((log_sum - label).masked_fill(ignored, 0.0), log_sum, ignored, to_input)


def packed_loss(log_sum: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that shares need for their weight gradient, as a message. scale: gradient of each token's loss."""
    return torch.stack((log_sum, scale)).view(dtype).flatten()


def add_head_gradient(kept: Kept, weight: Tensor, into: Tensor, *losses: Tensor) -> None:
    """The gradient of a share's rows of the head. losses: of each run of tokens, from `packed_loss`; into: [v', h]."""
    rows, labels, logits = kept
    log_sum, scale = torch.cat([loss.clone().view(wide_of(rows)).view(2, -1) for loss in losses], 1)
    space = space_of(rows, weight.shape[0])
    for number, block in enumerate(blocks_of(rows, weight.shape[0])):
        dy = linear(rows, weight[block]) if logits is None else logits[number]
        to_gradient_(dy, log_sum, scale, labels - block.start, space)
        add_product(into[block], dy, rows)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids], zeros where an id, counted from the share's first row, is in another share."""
    outside = without_loss(ids, weight.shape[0])
    return weight[ids.masked_fill(outside, 0)].masked_fill_(outside.unsqueeze(-1), 0.0)


def add_rows_gradient(ids: Tensor, grad: Tensor, into: Tensor) -> None:
    """The gradient of what `look_up` gave; into: [v', h]."""
    outside = without_loss(ids, into.shape[0])
    rows = grad.masked_fill(outside.unsqueeze(-1), 0.0).reshape(-1, grad.shape[-1])
    into.index_add_(0, ids.masked_fill(outside, 0).reshape(-1), rows.to(into.dtype))


def _numbers(dtype: torch.dtype) -> int:
    """Elements of the type that take the place of a float32."""
    return torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize
