"""The way of tokens to the experts of a rank and back, as rows that lie by expert.

Gathered: every rank of the experts' axis sees the tokens of all, and sums what each has computed. Exchanged: a token's
row goes to the ranks that have its experts and comes back, k rows of each token in place of size - 1.
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
    """The rows that experts compute, R of them, for T tokens of k choices each.

    Attributes:
        choices: [R], which choice a row is, counted token by token.
        tokens, experts: [R], whose.
        real: [R], 0 for a row that only fills an expert's share; None where all are real.
        ends: [E], where each expert's rows end.
        of_token: [T, k], the rows of each token in ascending order; R where there are fewer.
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
    """The rows of choices [T, k].

    Args:
        kept: [T, k], those that have rows here; None: all.
        each: rows of each expert, at least as many as it has choices, where all are to have as many.
        count: rows of each expert -> their number, for which the host waits; not asked where it is known.
    """
    tokens, k = experts.shape
    flat = experts.flatten() if kept is None else experts.masked_fill(~kept, num_experts).flatten()
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    ends = counts.cumsum(0)
    if each is None:
        number = len(order) if kept is None else count(counts)
        choices = order if number == len(order) else order[:number].clone()  # a view would hold all of it
        of_token = place.view(tokens, k).sort(-1).values.clamp_(max=number)
        return Rows(choices, choices // k, flat[choices], None, ends, of_token)
    starts, column = ends - counts, torch.arange(each, device=flat.device)
    real = (column < counts[:, None]).flatten()
    choices = order[(starts[:, None] + column).flatten().clamp_(max=len(order) - 1)].masked_fill(~real, 0)
    shift = torch.arange(num_experts, device=flat.device) * each - starts
    moved = place + torch.cat((shift, shift.new_full((1,), num_experts * each)))[flat]  # dropped: behind all rows
    of_token = moved.view(tokens, k).sort(-1).values.clamp_(max=num_experts * each)
    owners = torch.arange(num_experts, device=flat.device).repeat_interleave(each)
    return Rows(choices, choices // k, owners, real, (owners.new_ones(num_experts) * each).cumsum(0), of_token)


def summed(rows: Tensor, of: Rows) -> Tensor:
    """rows [R, n] -> [T, n], for each token the sum of its rows in their order."""
    of_token = of.of_token
    if of.real is not None or len(rows) < of_token.numel():  # some choices have none: they add a row of zeros
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    out = rows[of_token[:, 0]]
    for column in of_token[:, 1:].unbind(1):
        out += rows[column]
    return out


class Way(Protocol):
    """A way of the tokens of one pass; n is any width. The gradient of `there` goes `back`, and the other way round.

    Attributes:
        experts: [R], which of this rank's experts a row is for.
        ends: where each one's rows end.
        keeps_rows: rows are kept for backward, as they are too dear to come again; else what they are made of.
    """

    experts: Tensor
    ends: Tensor
    keeps_rows: bool

    def there(self, x: Tensor) -> Pending:
        """[s, b, n] of this rank's tokens -> [R, n] for its experts."""

    def back(self, rows: Tensor) -> Pending:
        """[R, n] -> [s, b, n], the sum of each token's rows."""

    def weights_there(self, weights: Tensor) -> Tensor:
        """[s, b, k] -> [R], 0 for a row that only fills."""

    def weights_back(self, by_row: Tensor) -> Tensor:
        """[R] -> [s, b, k]."""


class Gathered:
    """Tokens of all ranks of an axis, as far as they are for experts of this one.

    Args:
        edge: what brings tokens together, and adds what comes of them.
        shares: the ranks that have other tokens.
        own: the numbers of this rank's experts among `num_experts`.
        each: rows of each expert from each rank's tokens, where shapes are fixed.
    """

    keeps_rows = False

    def __init__(
        self, routing: Routing, edge: Edge, shares: Axis, own: range, num_experts: int, each: int | None
    ) -> None:
        experts, kept = routing.experts, routing.kept
        if shares.size > 1:
            experts = shares.all_gather(experts)
            kept = kept if kept is None else shares.all_gather(kept.byte()).bool()
        if len(own) < num_experts:
            here = (experts >= own.start) & (experts < own.stop)
            experts, kept = (experts - own.start).masked_fill(~here, 0), here if kept is None else here & kept
        self._rows = rows_of(experts, len(own), kept, each if each is None else each * shares.size)
        self._edge, self._shape = edge, routing.weights.shape[1:]
        self.experts, self.ends = self._rows.experts, self._rows.ends

    def there(self, x: Tensor) -> Pending:
        return self._edge.forward(x).then(lambda whole: whole.reshape(-1, x.shape[-1])[self._rows.tokens])

    def back(self, rows: Tensor) -> Pending:
        whole = summed(rows, self._rows)
        return self._edge.backward(whole.view(-1, self._shape[0], rows.shape[1]))

    def weights_there(self, weights: Tensor) -> Tensor:
        return _by_row(self._edge.forward(weights).wait(), self._rows)

    def weights_back(self, by_row: Tensor) -> Tensor:
        return self._edge.backward(_by_choice(by_row, self._rows).view(-1, *self._shape)).wait()


class Exchanged:
    """Rows that go to the ranks that have their experts, all to all, and come back.

    Counts of all ranks are exchanged once, and the host waits for them; for nothing where shapes are fixed. Where
    several ranks have a slice of each expert, each gets its rows, and their home adds what the slices made of them.

    Args:
        axis: the ranks that have all experts, those with slices of the same ones behind each other.
        slices: how many these are.
        each: rows of each expert from each rank's tokens, where shapes are fixed.
    """

    keeps_rows = True

    def __init__(self, routing: Routing, axis: Axis, slices: int, num_experts: int, each: int | None) -> None:
        self._axis, self._slices, self._shape = axis, slices, routing.weights.shape[:2]
        own, device = num_experts * slices // axis.size, routing.experts.device
        first = axis.rank // slices * own
        counts, table = torch.full((axis.size, num_experts), each or 0, device=device), list[list[int]]()

        def exchange(mine: Tensor) -> int:
            nonlocal counts, table
            counts = axis.all_gather(mine[None])
            table = counts.tolist()  # the host waits for the device, once a layer
            return sum(table[axis.rank])

        self._rows = rows = rows_of(routing.experts, num_experts, routing.kept, each, exchange)
        if each is not None:
            table = [[each] * num_experts] * axis.size
        elif routing.kept is None:
            exchange(torch.diff(rows.ends, prepend=rows.ends.new_zeros(1)))
        blocks = [[sum(row[n : n + own]) for n in range(0, num_experts, own)] for row in table]
        self._blocks, self._there = blocks[axis.rank], [[n for n in row for _ in range(slices)] for row in blocks]
        arriving_rows = sum(row[axis.rank] for row in self._there)
        # They arrive by rank, and lie by expert, of one expert by rank.
        arriving, here = counts[:, first : first + own], torch.arange(own, device=device)
        owners = here.repeat(axis.size).repeat_interleave(arriving.flatten(), output_size=arriving_rows)
        self._order = torch.argsort(owners, stable=True)
        self.experts, self.ends = owners[self._order], arriving.sum(0).cumsum(0)

    def there(self, x: Tensor) -> Pending:
        return self._sent(x.reshape(-1, x.shape[-1])[self._rows.tokens])

    def back(self, rows: Tensor) -> Pending:
        pending = self._returned(rows)
        return pending.then(lambda x: summed(x, self._rows).view(*self._shape, rows.shape[1]))

    def weights_there(self, weights: Tensor) -> Tensor:
        return self._sent(_by_row(weights, self._rows)).wait()

    def weights_back(self, by_row: Tensor) -> Tensor:
        return _by_choice(self._returned(by_row).wait(), self._rows).view(*self._shape, -1)

    def _sent(self, rows: Tensor) -> Pending:
        """Rows of this rank's tokens -> those for its experts."""
        if self._slices > 1:
            rows = torch.cat([block for block in torch.split(rows, self._blocks) for _ in range(self._slices)])
        return self._axis.start_all_to_all(rows, self._there).then(lambda x: x[self._order])

    def _returned(self, rows: Tensor) -> Pending:
        """The other way."""
        by_rank = torch.empty_like(rows).index_copy_(0, self._order, rows)
        return self._axis.start_all_to_all(by_rank, [*zip(*self._there, strict=True)]).then(self._added)

    def _added(self, rows: Tensor) -> Tensor:
        """The sum of what all slices of an expert have made of a row, in their order."""
        if self._slices == 1:
            return rows
        blocks = torch.split(rows, self._there[self._axis.rank])
        return torch.cat([reduce(torch.add, blocks[n : n + self._slices]) for n in range(0, len(blocks), self._slices)])


def _by_row(weights: Tensor, rows: Rows) -> Tensor:
    """[..., k] -> [R], 0 for a row that only fills."""
    by_row = weights.flatten()[rows.choices]
    return by_row if rows.real is None else by_row * rows.real


def _by_choice(by_row: Tensor, rows: Rows) -> Tensor:
    """[R] -> [T k], 0 for a choice without row."""
    by_row = by_row if rows.real is None else by_row * rows.real
    return by_row.new_zeros(rows.of_token.numel()).index_add_(0, rows.choices, by_row)
