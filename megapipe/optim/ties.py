"""Weights that are used several times: a head that repeats the word embedding, the ends of multi-token prediction.

Each use is a parameter with a gradient of its own. They are summed in one order, whichever of them share a rank, and
the owner's weight is every use's: the same memory on its rank; elsewhere a replica that is updated there too, or, if it
is lent, what the owner sends after each update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.census import Census, Row, natural


class Tie(NamedTuple):
    """One such weight.

    Attributes:
        uses: the owner, then those that repeat it, the lent ones last: in one order on all ranks.
        across: they are on several ranks, those of mesh.ends among them.
    """

    uses: tuple[Row, ...]
    across: bool

    @property
    def owner(self) -> Row:
        return self.uses[0]

    def on(self, rank: int) -> tuple[str, ...]:
        """The uses of a rank, whose weight is that of the first."""
        return tuple(row.name for row in self.uses if row.rank == rank or not self.across)

    def is_fed(self, rank: int) -> bool:
        """Has the rank uses, but none with state, so that its weight comes from the owner?"""
        return self.across and {row.lent for row in self.uses if row.rank == rank} == {True}


@dataclass(frozen=True)
class Ties:
    """The weights of this kind that a rank has to do with.

    Attributes:
        params: of this rank, by name.
    """

    census: Census
    params: Mapping[str, nn.Parameter]
    mesh: ProcessMesh

    @cached_property
    def all(self) -> tuple[Tie, ...]:
        """The weights used here, and all whose uses are apart, whose sums ranks make together; in one order."""
        owners, users = self.census.owners, defaultdict[str, list[Row]](list)
        for name in sorted(owners, key=natural):
            if (owner := owners[name].tied_to) is not None and owners[name].trained:
                users[owner].append(owners[name])
        found = []
        for owner, rows in users.items():
            uses = (owners[owner], *sorted(rows, key=lambda row: row.lent))
            across = len({row.rank for row in uses}) > 1 and owner not in self.census.twins
            if any(row.name in self.params for row in uses) or (across and self.mesh.ends.size > 1):
                found.append(Tie(uses, across))
        return tuple(found)

    @cached_property
    def lenders(self) -> dict[str, str]:
        """Uses of this rank that are another's memory, and whose."""
        here = [tie.on(self.mesh.pp.rank) for tie in self.all]
        return {user: own[0] for own in here for user in own[1:]}

    @property
    def borrowed(self) -> set[str]:
        """Uses of this rank without state."""
        rank = self.mesh.pp.rank
        return {*self.lenders, *(tie.on(rank)[0] for tie in self.all if tie.is_fed(rank))}

    @property
    def names(self) -> set[str]:
        """All uses of all of them."""
        return {row.name for tie in self.all for row in tie.uses}

    @property
    def apart(self) -> set[str]:
        """Uses of weights that other ranks have uses of too."""
        return {row.name for tie in self.all if tie.across for row in tie.uses}

    @property
    def fed(self) -> tuple[Tie, ...]:
        """The weights that owners send after each update."""
        return tuple(tie for tie in self.all if any(tie.is_fed(row.rank) for row in tie.uses))

    def of_chunks(self, names: Sequence[Sequence[str]]) -> tuple[list[set[int]], list[int]]:
        """The chunks that each chunk of this rank has weights of, itself among them; and those whose weights others
        have no state of. names: of each chunk's parameters."""
        chunk_of = {name: n for n, own in enumerate(names) for name in own}
        lenders = [{n} for n in range(len(names))]
        for user, lender in self.lenders.items():
            lenders[chunk_of[user]].add(chunk_of[lender])
        return lenders, sorted({chunk_of[tie.owner.name] for tie in self.fed if tie.owner.name in chunk_of})

    def share(self) -> None:
        """Make the uses of this rank one memory, with the owner's values. Collective over mesh.ends."""
        for user, lender in self.lenders.items():
            self.params[user].data = self.params[lender].data
        for tie in self.all:
            if tie.across:
                self._send(tie, tie.on(self.mesh.pp.rank))

    def feed(self) -> None:
        """Send the updated weights that other ranks have no state of. Collective over mesh.ends."""
        rank = self.mesh.pp.rank
        for tie in self.fed:
            # A replica that is updated has these values already, and may be a share between two runs of passes.
            self._send(tie, tie.on(rank) if tie.owner.rank == rank or tie.is_fed(rank) else ())

    def _send(self, tie: Tie, own: Sequence[str]) -> None:
        self._from(tie.owner, self.params[own[0]].data if own else self._room(tie, next(iter(self.params.values()))))

    def add_gradients(self) -> None:
        """The sum of each weight's gradients, at its uses with state. Collective over mesh.ends."""
        for tie in self.all:
            own = [self.main_grad(name) for name in tie.on(self.mesh.pp.rank)]
            if not tie.across:
                for grad in own[1:]:
                    own[0].add_(grad)
            elif len(tie.uses) == self.mesh.ends.size == 2:  # two numbers have one sum
                self.mesh.ends.all_reduce(own[0])
            else:
                total = self._sum_across(tie)
                if own:
                    own[0].copy_(total)

    def _sum_across(self, tie: Tie) -> Tensor:
        here, total = tie.on(self.mesh.pp.rank), None
        like = self.main_grad(next(iter(self.params)))
        for use in tie.uses:
            grad = self.main_grad(use.name) if use.name in here else self._room(tie, like)
            self._from(use, grad)
            total = grad.clone() if total is None else total.add_(grad)
        assert total is not None
        return total

    def _room(self, tie: Tie, like: Tensor) -> Tensor:
        return torch.empty(tie.owner.local, dtype=like.dtype, device=like.device)

    def _from(self, use: Row, x: Tensor) -> None:
        ends = self.mesh.ends
        ends.broadcast(x, ends.ranks.index(self.mesh.pp.ranks[use.rank]))

    def main_grad(self, name: str) -> Tensor:
        """Return where the gradient of a parameter of this rank is summed."""
        return self.params[name].main_grad  # type: ignore[attr-defined, no-any-return]
