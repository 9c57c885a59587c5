"""Weights that are used several times: a tied output head, or the ends of multi-token prediction.

Each use is a parameter with its own gradient. The gradients are summed in one order, independent of
the ranks that the uses are on. All uses have the owner's weight. On the owner's rank they are the
same memory. On another rank the weight is a replica that is updated there too. If that rank has no
optimizer state for it, the owner sends it after each update (Layout.received).
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
from megapipe.optim.census import Census, ParameterRow, natural


class Tie(NamedTuple):
    """A weight that several parameters (its uses) repeat, such as a tied embedding and head.

    `owner` is the first use. `on` returns the uses on a rank.

    Attributes:
        uses: one `ParameterRow` (name, rank, shape) for each of these parameters. The first is the
            owner, which has the optimizer state and the place in a checkpoint. Last come the uses
            that only receive updated weights from the owner's rank. The order is equal on all
            ranks.
        across: whether the uses are on several pipeline ranks. These ranks are on the axis
            mesh.ends, over which tied weights are exchanged. False under DualPipe, where each rank
            with a use has a replica of the owner.
    """

    uses: tuple[ParameterRow, ...]
    across: bool

    @property
    def owner(self) -> ParameterRow:
        """The parameter that has the weight's optimizer state and its place in a checkpoint."""
        return self.uses[0]

    def on(self, rank: int) -> tuple[str, ...]:
        """Return the names of the parameters on a pipeline rank that repeat this weight.

        These parameters share one memory. A weight whose uses are all on one rank is asked there
        only.
        """
        return tuple(row.name for row in self.uses if row.rank == rank or not self.across)

    def is_received(self, rank: int) -> bool:
        """Return whether a rank has no optimizer state for the weight, and receives it updated."""
        return self.across and {row.received for row in self.uses if row.rank == rank} == {True}


@dataclass(frozen=True)
class Ties:
    """A rank's tied weights, which several parameters use: memory, gradients and updates.

    `all` lists the weights. `share` lets the parameters of a weight share memory, `add_gradients`
    sums their gradients, and `feed` sends updated weights to other ranks.

    Attributes:
        census: the list of all parameters of the pipeline.
        params: {name: parameter} of this rank.
        mesh: this rank's mesh.
    """

    census: Census
    params: Mapping[str, nn.Parameter]
    mesh: ProcessMesh

    @cached_property
    def all(self) -> tuple[Tie, ...]:
        """The tied weights of this rank, and the ones that several ranks of its pipeline use.

        Every rank of the axis mesh.ends lists the weights of several ranks, because all its ranks
        take part in their sums. The order is equal on all ranks.
        """
        owners = self.census.owners
        users = defaultdict[str, list[ParameterRow]](list)
        for name in sorted(owners, key=natural):
            owner = owners[name].tied_to
            if owner is not None and owners[name].trained:
                users[owner].append(owners[name])
        found = []
        for owner, rows in users.items():
            # Received uses come last, so that the uses with state are the first ones of a rank.
            uses = (owners[owner], *sorted(rows, key=lambda row: row.received))
            # Under DualPipe each rank has a replica of the owner, so the tie stays within ranks.
            across = len({row.rank for row in uses}) > 1 and owner not in self.census.twins
            is_here = any(row.name in self.params for row in uses)
            if is_here or (across and self.mesh.ends.size > 1):
                found.append(Tie(uses, across))
        return tuple(found)

    @cached_property
    def memory_of(self) -> dict[str, str]:
        """{name of a tied parameter of this rank: name of the parameter whose memory it uses}."""
        found = {}
        for tie in self.all:
            own = tie.on(self.mesh.pp.rank)
            for user in own[1:]:
                found[user] = own[0]
        return found

    @property
    def borrowed(self) -> set[str]:
        """The names of this rank's parameters that have no optimizer state."""
        rank = self.mesh.pp.rank
        received = {tie.on(rank)[0] for tie in self.all if tie.is_received(rank)}
        return {*self.memory_of, *received}

    @property
    def names(self) -> set[str]:
        """The names of all parameters that use the weights in `all`."""
        return {row.name for tie in self.all for row in tie.uses}

    @property
    def across_ranks(self) -> set[str]:
        """The names of the parameters that use a weight of several ranks."""
        return {row.name for tie in self.all if tie.across for row in tie.uses}

    @property
    def sent(self) -> tuple[Tie, ...]:
        """The weights that owners send to other ranks after each update."""
        found = []
        for tie in self.all:
            if any(tie.is_received(row.rank) for row in tie.uses):
                found.append(tie)
        return tuple(found)

    def of_chunks(self, names: Sequence[Sequence[str]]) -> tuple[list[set[int]], list[int]]:
        """Return which stages' memory each stage reads, and which stages own weights to be sent.

        A chunk is a stage of this rank, given by its index. If chunk 1 has the head tied to chunk
        0's embedding, and no other rank uses it, the result is ([{0}, {0, 1}], []).

        Args:
            names: for each chunk, the names of its parameters.
        Returns: (needed, senders). `needed` has, for each chunk, the chunks whose memory its
            parameters use, including itself. `senders` are the chunks that own a weight in `sent`,
            ascending.
        """
        chunk_of = {name: n for n, own in enumerate(names) for name in own}
        needed = [{n} for n in range(len(names))]
        for user, other in self.memory_of.items():
            needed[chunk_of[user]].add(chunk_of[other])
        owners = [tie.owner.name for tie in self.sent]
        return needed, sorted({chunk_of[name] for name in owners if name in chunk_of})

    def share(self) -> None:
        """Let parameters of this rank that are one weight share memory, with the owner's values.

        Collective over mesh.ends, the ranks of this pipeline that share weights.
        """
        # `data` is replaced, so that a tied parameter keeps its own gradient.
        for user, other in self.memory_of.items():
            self.params[user].data = self.params[other].data
        # Every rank of mesh.ends takes part in every broadcast, also one without a use.
        for tie in self.all:
            if tie.across:
                self._send(tie, tie.on(self.mesh.pp.rank))

    def feed(self) -> None:
        """Send updated weights to the ranks that have no optimizer state for them.

        Collective over mesh.ends, the ranks of this pipeline that share weights.
        """
        rank = self.mesh.pp.rank
        for tie in self.sent:
            # A replica with its own update has these values already. It must not be written here,
            # because it may be sharded at this time.
            uses: Sequence[str] = ()
            if tie.owner.rank == rank or tie.is_received(rank):
                uses = tie.on(rank)
            self._send(tie, uses)

    def _send(self, tie: Tie, own: Sequence[str]) -> None:
        """Broadcast the owner's weight over mesh.ends into this rank's parameters that repeat it.

        Args:
            tie: the weight.
            own: names of these parameters, which share memory. If empty, the received weight is
                discarded.
        """
        if own:
            weight = self.params[own[0]].data
        else:
            # Any parameter of the rank says the type and the device.
            weight = self._room(tie, next(iter(self.params.values())))
        self._from(tie.owner, weight)

    def add_gradients(self) -> None:
        """Sum the gradients of the parameters that share a weight, for each tied weight.

        Collective over mesh.ends, the ranks of this pipeline that share weights. The parameters
        with optimizer state get the sum.
        """
        for tie in self.all:
            own = [self.main_grad(name) for name in tie.on(self.mesh.pp.rank)]
            if not tie.across:
                for grad in own[1:]:
                    own[0].add_(grad)
            # Two numbers have the same sum in either order; more need the order of `uses`.
            elif len(tie.uses) == self.mesh.ends.size == 2:
                self.mesh.ends.all_reduce(own[0])
            else:
                total = self._sum_across(tie)
                if own:
                    own[0].copy_(total)

    def _sum_across(self, tie: Tie) -> Tensor:
        """Return the sum of the gradients of all parameters, on several ranks, that share a weight.

        Collective over mesh.ends, the axis of the ranks that share weights. The gradients are added
        in the order of `tie.uses`, so every rank gets a bitwise equal sum.

        Args:
            tie: the weight.
        """
        here = tie.on(self.mesh.pp.rank)
        like = self.main_grad(next(iter(self.params)))
        # The first gradient begins the sum: adding it to zeros would turn -0.0 into 0.0.
        total = None
        for use in tie.uses:
            grad = self.main_grad(use.name) if use.name in here else self._room(tie, like)
            self._from(use, grad)
            if total is None:
                total = grad.clone()
            else:
                total.add_(grad)
        assert total is not None
        return total

    def _room(self, tie: Tie, like: Tensor) -> Tensor:
        """Return an empty tensor of the weight's shape, on a rank that does not use the weight.

        Such a rank receives it all the same, as it takes part in each broadcast over mesh.ends.

        Args:
            tie: the weight.
            like: a tensor with the type and device to use.
        """
        return torch.empty(tie.owner.local, dtype=like.dtype, device=like.device)

    def _from(self, use: ParameterRow, x: Tensor) -> None:
        """Broadcast x over `mesh.ends` from the rank that has the parameter `use`.

        `mesh.ends` are the ranks of the pipeline that share tied weights: often the first and the
        last.
        """
        ends = self.mesh.ends
        ends.broadcast(x, ends.ranks.index(self.mesh.pp.ranks[use.rank]))

    def main_grad(self, name: str) -> Tensor:
        """Return the tensor in which the gradient of a parameter of this rank is accumulated."""
        return self.params[name].main_grad  # type: ignore[attr-defined, no-any-return]
