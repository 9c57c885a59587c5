"""Bring tokens to the ranks of their experts and back, as rows sorted by expert.

Two dispatchers. All-gather: every rank of the experts' axis sees the tokens of all ranks, and the
outputs are summed. All-to-all: each token's row goes to the ranks of its experts and comes back; a
token sends k rows, where the all-gather sends size - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis, Pending
from megapipe.models.moe.router import Routing
from megapipe.tensor_parallel.collectives import Edge


class Rows(NamedTuple):
    """The rows that experts compute, sorted by expert: one for each choice of an expert by a token.

    T tokens have k choices each. R counts the rows, padding included.

    Attributes:
        choices: [R], which choice a row is for, counted 0..T k - 1, token by token.
        tokens, experts: [R], the row's token and its expert.
        real: [R], 0 for padding rows and 1 for others; None where there are no padding rows.
        ends: [E], one past the last row of each expert.
        of_token: [T, k], the rows of each token, ascending. Entries without a row are R.
    """

    choices: Tensor
    tokens: Tensor
    experts: Tensor
    real: Tensor | None
    ends: Tensor
    of_token: Tensor


def rows_of(
    experts: Tensor,
    num_experts: int,
    kept: Tensor | None = None,
    each: int | None = None,
    count: Callable[[Tensor], int] = lambda counts: int(counts.sum()),
) -> Rows:
    """Sort the tokens' choices into rows by expert.

    Args:
        experts: [T, k], each token's experts, of num_experts.
        kept: [T, k], True for the choices that get a row; None for all.
        each: if given, every expert gets this number of rows, some of them padding. The number must
            be at least an expert's number of choices.
        count: returns the sum of the experts' numbers of rows [E], for which the host waits. Called
            only if `kept` is given and `each` is None.
    """
    tokens, k = experts.shape
    # Choices that are not kept get the number of one more expert, so they sort last.
    if kept is not None:
        experts = experts.masked_fill(~kept, num_experts)
    flat = experts.flatten()
    # Stable: within an expert, rows keep the order of the tokens, on every device.
    order = torch.argsort(flat, stable=True)
    ascending = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order).scatter_(0, order, ascending)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    ends = counts.cumsum(0)
    if each is None:
        number = len(order) if kept is None else count(counts)
        choices = order
        if number < len(order):
            choices = order[:number].clone()  # a view would keep all of `order` alive
        of_token = place.view(tokens, k).sort(-1).values.clamp_(max=number)
        return Rows(choices, choices // k, flat[choices], None, ends, of_token)
    starts = ends - counts
    column = torch.arange(each, device=flat.device)
    real = (column < counts[:, None]).flatten()
    rows = (starts[:, None] + column).flatten().clamp_(max=len(order) - 1)
    choices = order[rows].masked_fill(~real, 0)
    # A row moves by the padding before its expert. Dropped choices move past the last row.
    shift = torch.arange(num_experts, device=flat.device) * each - starts
    moved = place + torch.cat((shift, shift.new_full((1,), num_experts * each)))[flat]
    of_token = moved.view(tokens, k).sort(-1).values.clamp_(max=num_experts * each)
    owners = torch.arange(num_experts, device=flat.device).repeat_interleave(each)
    ends = (owners.new_ones(num_experts) * each).cumsum(0)
    return Rows(choices, choices // k, owners, real, ends, of_token)


def summed(rows: Tensor, of: Rows) -> Tensor:
    """Sum the rows of each token, in ascending order of the rows, so that results are reproducible.

    Args:
        rows: [R, n].
        of: says which rows belong to a token.
    Returns: [T, n].
    """
    of_token = of.of_token
    if of.real is not None or len(rows) < of_token.numel():
        # Choices without a row add a row of zeros, at index R.
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    # Column by column: on a GPU, index_add_ adds in an order that changes from run to run.
    out = rows[of_token[:, 0]]
    for column in of_token[:, 1:].unbind(1):
        out += rows[column]
    return out


class Dispatcher(Protocol):
    """Moves the tokens of one pass to the experts and back.

    Below, n is any width, e counts this rank's experts, and R the rows that they compute.

    The gradient of `dispatch` is computed by `combine`, and the gradient of `combine` by
    `dispatch`.

    `dispatch` and `combine` move vectors, `dispatch_weights` and `combine_weights` one number for
    each choice.

    Attributes:
        experts: [R], which of this rank's experts a row is for, counted from 0.
        ends: [e], one past the last row of each of this rank's experts.
        keeps_rows: True if the rows are saved for backward because bringing them again is slow;
            otherwise the layer's input is saved.
    """

    experts: Tensor
    ends: Tensor
    keeps_rows: bool

    def dispatch(self, x: Tensor) -> Pending:
        """Bring tokens to the experts: x [s, b, n] -> [R, n] for the experts on this rank."""

    def combine(self, rows: Tensor) -> Pending:
        """Return outputs to the tokens: [R, n] -> [s, b, n], the sum of each token's rows."""

    def dispatch_weights(self, weights: Tensor) -> Tensor:
        """Bring the choices' weights to the rows: [s, b, k] -> [R], 0 for padding."""

    def combine_weights(self, by_row: Tensor) -> Tensor:
        """Return a value of each row to the row's choice: by_row [R] -> [s, b, k]."""


class AllGatherDispatcher:
    """A Dispatcher that gathers all ranks' tokens, and selects the tokens for this rank's experts.

    Args:
        routing: the experts and weights of this rank's tokens.
        edge: collectives; the forward gathers the tokens of all ranks, the backward sums outputs.
        shares: the axis of the ranks whose tokens are gathered.
        own: the indices of this rank's experts among all experts of the layer.
        each: the fixed number of rows that one rank's tokens have at each expert, padding included;
            None if the number varies.
    """

    keeps_rows = False

    def __init__(
        self,
        routing: Routing,
        edge: Edge,
        shares: Axis,
        own: range,
        num_experts: int,
        each: int | None,
    ) -> None:
        experts = routing.experts
        kept = routing.kept
        if shares.size > 1:
            experts = shares.all_gather(experts)
            if kept is not None:
                kept = shares.all_gather(kept.byte()).bool()
        # Choices of other ranks' experts get no row here; the sum over the ranks adds them.
        if len(own) < num_experts:
            here = (experts >= own.start) & (experts < own.stop)
            experts = (experts - own.start).masked_fill(~here, 0)
            kept = here if kept is None else here & kept
        if each is not None:
            # Capacity is counted for each rank's tokens separately, so that no rank needs to know
            # the others'.
            each *= shares.size
        self._rows = rows_of(experts, len(own), kept, each)
        self._edge = edge
        self._shape = routing.weights.shape[1:]
        self.experts = self._rows.experts
        self.ends = self._rows.ends

    def dispatch(self, x: Tensor) -> Pending:
        def select(gathered: Tensor) -> Tensor:
            return gathered.reshape(-1, x.shape[-1])[self._rows.tokens]

        return self._edge.forward(x).then(select)

    def combine(self, rows: Tensor) -> Pending:
        gathered = summed(rows, self._rows)
        return self._edge.backward(gathered.view(-1, self._shape[0], rows.shape[1]))

    def dispatch_weights(self, weights: Tensor) -> Tensor:
        return _by_row(self._edge.forward(weights).wait(), self._rows)

    def combine_weights(self, by_row: Tensor) -> Tensor:
        by_choice = _by_choice(by_row, self._rows).view(-1, *self._shape)
        return self._edge.backward(by_choice).wait()


class AllToAllDispatcher:
    """A Dispatcher that sends each row to the ranks of its expert, and returns the outputs.

    All ranks exchange their row counts once, and the host waits for the counts. Where shapes are
    fixed, there is no such exchange. Expert tensor parallelism splits each expert into slices on
    several ranks. Each of these ranks receives the expert's rows, and the token's rank adds their
    partial outputs.

    Args:
        routing: the experts and weights of this rank's tokens.
        axis: the ranks that hold all num_experts experts. Ranks with slices of the same experts
            are adjacent.
        slices: number of ranks that an expert is split over.
        each: the fixed number of rows that one rank's tokens have at each expert, padding included;
            None if the number varies.
    """

    keeps_rows = True

    def __init__(
        self, routing: Routing, axis: Axis, slices: int, num_experts: int, each: int | None
    ) -> None:
        self._axis = axis
        self._slices = slices
        self._shape = routing.weights.shape[:2]
        own = num_experts * slices // axis.size
        device = routing.experts.device
        first = axis.rank // slices * own
        # [rank, expert]: the rows that a rank sends to an expert, on the device and on the host.
        counts = torch.full((axis.size, num_experts), each or 0, device=device)
        table = list[list[int]]()

        def exchange(mine: Tensor) -> int:
            nonlocal counts, table
            counts = axis.all_gather(mine[None])
            table = counts.tolist()  # the host waits for the device, once a layer
            return sum(table[axis.rank])

        # With dropped choices the number of rows is unknown too, so one exchange of the counts
        # serves both.
        self._rows = rows = rows_of(routing.experts, num_experts, routing.kept, each, exchange)
        if each is not None:
            table = [[each] * num_experts] * axis.size
        elif routing.kept is None:
            exchange(torch.diff(rows.ends, prepend=rows.ends.new_zeros(1)))
        # [rank][group of ranks with the same experts]: rows that a rank sends to the group.
        blocks = []
        for row in table:
            blocks.append([sum(row[n : n + own]) for n in range(0, num_experts, own)])
        self._blocks = blocks[axis.rank]
        # [rank][rank]: rows from the first rank to the second.
        self._sizes = [[n for n in row for _ in range(slices)] for row in blocks]
        # Rows arrive sorted by rank. They are reordered by expert; an expert's rows stay by rank.
        arriving_rows = sum(row[axis.rank] for row in self._sizes)
        arriving = counts[:, first : first + own]
        numbers = torch.arange(own, device=device).repeat(axis.size)
        # Without output_size a GPU's repeat_interleave would make the host wait for the length.
        owners = numbers.repeat_interleave(arriving.flatten(), output_size=arriving_rows)
        self._order = torch.argsort(owners, stable=True)
        self.experts = owners[self._order]
        self.ends = arriving.sum(0).cumsum(0)

    def dispatch(self, x: Tensor) -> Pending:
        return self._sent(x.reshape(-1, x.shape[-1])[self._rows.tokens])

    def combine(self, rows: Tensor) -> Pending:
        def add_up(returned: Tensor) -> Tensor:
            return summed(returned, self._rows).view(*self._shape, rows.shape[1])

        return self._returned(rows).then(add_up)

    def dispatch_weights(self, weights: Tensor) -> Tensor:
        return self._sent(_by_row(weights, self._rows)).wait()

    def combine_weights(self, by_row: Tensor) -> Tensor:
        returned = self._returned(by_row).wait()
        return _by_choice(returned, self._rows).view(*self._shape, -1)

    def _sent(self, rows: Tensor) -> Pending:
        """Send the S rows [S, n] of this rank's tokens; return the R rows [R, n] of its experts."""
        if self._slices > 1:
            # One copy for each rank with a slice of the experts.
            blocks = torch.split(rows, self._blocks)
            rows = torch.cat([block for block in blocks for _ in range(self._slices)])
        pending = self._axis.start_all_to_all(rows, self._sizes)
        return pending.then(lambda x: x[self._order])

    def _returned(self, rows: Tensor) -> Pending:
        """Send the rows [R, n] of this rank's experts back, and return its tokens' rows [S, n].

        Where experts are split into slices, the returned rows are the sums of the partial outputs.
        """
        # The inverse of the order of `_sent`: place i goes to place order[i].
        by_rank = torch.empty_like(rows).index_copy_(0, self._order, rows)
        sizes = [*zip(*self._sizes, strict=True)]
        return self._axis.start_all_to_all(by_rank, sizes).then(self._added)

    def _added(self, rows: Tensor) -> Tensor:
        """Return the sums of the partial outputs from ranks that split an expert, in rank order.

        Args:
            rows: the partial outputs in the order of the sending ranks. Ranks with slices of one
                expert are adjacent.
        Returns: [S, n], a sum for each row that this rank sent; `rows` itself without slices.
        """
        if self._slices == 1:
            return rows
        blocks = torch.split(rows, self._sizes[self._axis.rank])
        sums = []
        for n in range(0, len(blocks), self._slices):
            sums.append(reduce(torch.add, blocks[n : n + self._slices]))
        return torch.cat(sums)


def _by_row(weights: Tensor, rows: Rows) -> Tensor:
    """Return each row's weight [R], 0 for padding, from the weights [..., k] of the choices."""
    by_row = weights.flatten()[rows.choices]
    if rows.real is None:
        return by_row
    return by_row * rows.real


def _by_choice(by_row: Tensor, rows: Rows) -> Tensor:
    """Return a value for each choice [T k], from a value for each row; 0 for choices without a row.

    Args:
        by_row: [R], the values of the rows.
        rows: says which choice a row is for.
    """
    if rows.real is not None:
        by_row = by_row * rows.real
    return by_row.new_zeros(rows.of_token.numel()).index_add_(0, rows.choices, by_row)
