"""Sums of what loss_func said in a step, over microbatches and ranks: one all-reduce, one copy to the host.

What is only reported stays apart from what the optimizer needs: the number of tokens, and whether what was
differentiated is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.distributed.axis import Pending
from megapipe.distributed.late import Late
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import RanksDiffer
from megapipe.pipeline_parallel.loss import Loss

_PRIME = 2**17 - 1
"""Places are compared by their remainders, which steps of a batch repeat after so many. float64 holds the sum of their
squares exactly, on up to 2^19 ranks."""


@dataclass(frozen=True)
class Totals:
    """The sums of one step or one evaluation, the same on every rank.

    Attributes:
        sums: name -> (sum, count) of what was reported; one number of a microbatch counts as 1.
        tokens: the number that loss_func returns beside its loss; 0 if it does not.
        finite: every loss that was differentiated.
        beside: the sums of what was given beside the losses.
    """

    sums: dict[str, tuple[float, float]]
    tokens: float
    finite: bool
    beside: tuple[float, ...] = ()

    @property
    def means(self) -> dict[str, float]:
        """Sum over count, by name; names of which nothing was counted are left out."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}

    def __add__(self, other: Totals) -> Totals:
        names = dict.fromkeys([*self.sums, *other.sums])
        pairs = {name: (self.sums.get(name, (0.0, 0.0)), other.sums.get(name, (0.0, 0.0))) for name in names}
        sums = {name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in pairs.items()}
        return Totals(sums, self.tokens + other.tokens, self.finite and other.finite)


class Adder:
    """Adds up over the ranks of a mesh. Knows the names that were reported last, so that ranks agree on their order."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh = mesh
        self._names: dict[bool, list[str]] = {}

    def start(
        self, losses: Sequence[Loss], consumed: int, *, evaluate: bool, beside: Tensor | None = None
    ) -> Late[Totals]:
        """Begin to add up. Collective over the world.

        Args:
            losses: of this rank's microbatches; none where the loss is not.
            consumed, evaluate: where this rank is in the data and what it does there.
            beside: [n] in float64, as many on every rank, to be added up with them.
        Raises: RanksDiffer, when it is read, if ranks are at different places: they would add up different steps
            unnoticed.
        """
        mine = losses if self.mesh.tp.rank == 0 else ()  # all ranks of a tensor-parallel group have the same
        reported = {name for loss in mine for name in loss.reported}
        place = (2 * consumed + evaluate) % _PRIME
        more = 0 if beside is None else beside.numel()

        def begin() -> tuple[list[str], Pending]:
            # Names are agreed once, not in every step: a rank that reports a new one flags it in `changed`, and all
            # agree anew.
            if evaluate not in self._names:
                everyone = self.mesh.world.gather_json(sorted(reported))
                self._names[evaluate] = sorted({name for of_rank in everyone for name in of_rank})
            names = self._names[evaluate]
            check = [(place, not reported <= set(names)), (place**2, 0)]
            rows = _rows(mine, names, check, self.mesh.device)
            if more:
                rows = torch.cat((F.pad(beside, (0, more % 2)).view(-1, 2), rows))  # type: ignore[arg-type]
            return names, self.mesh.world.start_all_reduce(rows)

        def read(values: Sequence[float]) -> Totals:
            names = begun[0]
            while True:
                also, values = tuple(values[:more]), values[more + more % 2 :]
                *pairs, (tokens, broken), (places, changed), (squares, _) = zip(values[::2], values[1::2], strict=True)
                # Cauchy-Schwarz: equal for equal numbers alone
                if int(places) ** 2 != int(squares) * self.mesh.world.size:
                    raise RanksDiffer(_at_different_places(self.mesh.world.gather_json(consumed)))
                if not changed:
                    sums = {name: (a, b) for name, (a, b) in zip(names, pairs, strict=True)}
                    return Totals(sums, tokens, not broken, also)
                del self._names[evaluate]
                names, rows = begin()
                values = rows.wait().flatten().tolist()

        begun = begin()
        return Late(cache(begun[1].wait), read)


def counted_tokens(totals: Late[Totals]) -> Tensor:
    """Totals.tokens, on the device."""
    return totals.tensor()[-3, 0]


def _rows(
    losses: Sequence[Loss], names: Sequence[str], check: Sequence[Sequence[float]], device: torch.device
) -> Tensor:
    """[names + 3, 2] in float64: (sum, count) of each name, (tokens, losses that are not finite), and `check`."""
    here = torch.cat((torch.zeros(len(names) + 1, 2), torch.tensor(check, dtype=torch.float64)))
    there = None if device.type == "cpu" else torch.zeros_like(here, device=device)
    for loss in losses:
        tokens = loss.value.new_zeros(()) if loss.tokens is None else loss.tokens
        values = [loss.reported.get(name) for name in names]
        for i, value in enumerate([*values, (tokens, ~loss.value.isfinite())]):
            if value is not None:
                pair = _pair(value)
                into = here if there is None or pair.device.type == "cpu" else there
                into[i] += pair.to(into.device)
    return here if there is None else there.add_(here.to(device, non_blocking=True))


def _pair(value: Any) -> Tensor:
    """(sum, count) of one number or of two, where they are: nothing waits for a device."""
    parts = value if isinstance(value, tuple | list) else (value,)
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    flat = [
        part.detach().double().to(device).flatten()
        if isinstance(part, Tensor)
        else torch.full((1,), part, dtype=torch.float64, device=device)
        for part in parts
    ]
    pair = torch.cat(flat)
    return pair if pair.numel() == 2 else torch.cat((pair, torch.ones_like(pair)))


def _at_different_places(samples: Sequence[int]) -> str:
    where = ", ".join(f"rank {rank} at sample {sample}" for rank, sample in enumerate(samples))
    return (
        f"the ranks are at different places of the data: {where}. "
        "Nothing was updated; start again from the last checkpoint with --load."
    )
