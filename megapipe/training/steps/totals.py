"""Sum what loss_func returned in a step over microbatches and ranks.

One all-reduce and one copy to the host are enough. Reported values are kept separate from what the
optimizer needs: the number of tokens, and whether the differentiated losses are finite.
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
"""Modulus of the positions that ranks compare.

float64 holds the sum of the squared remainders exactly, for up to 2^19 ranks. A prime, because
positions of successive steps are multiples of the batch size and must have different remainders.
"""


@dataclass(frozen=True)
class Totals:
    """The sums of one step or one evaluation, equal on every rank.

    `means` divides sums by counts.

    Attributes:
        sums: {name: (sum, count)} of reported values. A single number of a microbatch has count 1.
        tokens: the sum of the token numbers that loss_func returned; 0 if it returns none.
        finite: whether every differentiated loss was finite.
        extra: sums of the argument `extra` of `Adder.start` over all ranks.
    """

    sums: dict[str, tuple[float, float]]
    tokens: float
    finite: bool
    extra: tuple[float, ...] = ()

    @property
    def means(self) -> dict[str, float]:
        """Return {name: sum / count}, without names whose count is 0."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}

    def __add__(self, other: Totals) -> Totals:
        names = dict.fromkeys([*self.sums, *other.sums])
        nothing = (0.0, 0.0)
        sums = {}
        for name in names:
            a = self.sums.get(name, nothing)
            b = other.sums.get(name, nothing)
            sums[name] = (a[0] + b[0], a[1] + b[1])
        return Totals(sums, self.tokens + other.tokens, self.finite and other.finite)


class Adder:
    """Sums losses over the ranks of a mesh; `start` begins one sum.

    Remembers the names of the losses of the last step, so that ranks agree on their order.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh = mesh
        # The agreed names, separately for training (False) and evaluation (True).
        self._names: dict[bool, list[str]] = {}

    def start(
        self,
        losses: Sequence[Loss],
        consumed: int,
        *,
        evaluate: bool,
        extra: Tensor | None = None,
    ) -> Late[Totals]:
        """Begin to sum the losses of one step over all ranks. Collective over the world.

        Args:
            losses: the losses of this rank's microbatches; none on a rank without the loss.
            consumed: samples consumed before this step.
            evaluate: whether the step is an evaluation.
            extra: further numbers to sum, [n] in float64; n is the same on every rank. None for no
                further numbers.
        Raises: RanksDiffer, when the result is read, if ranks are at different samples. Without
            this check, losses of different steps would be added unnoticed.
        """
        # All ranks of a tensor-parallel group have the same losses.
        mine = losses if self.mesh.tp.rank == 0 else ()
        reported = {name for loss in mine for name in loss.reported}
        # Evaluations count separately: a rank that evaluates must not be added to one that trains.
        position = (2 * consumed + evaluate) % _PRIME
        more = 0 if extra is None else extra.numel()

        def begin() -> tuple[list[str], Pending]:
            # Names are agreed once, not in every step. A rank that reports a new one sets
            # `changed`, and all ranks agree again.
            if evaluate not in self._names:
                everyone = self.mesh.world.gather_json(sorted(reported))
                union = {name for of_rank in everyone for name in of_rank}
                self._names[evaluate] = sorted(union)
            names = self._names[evaluate]
            check = [(position, not reported <= set(names)), (position**2, 0)]
            rows = _rows(mine, names, check, self.mesh.device)
            if extra is not None and more:
                # The sum has two columns, so an odd number is filled up with a 0.
                rows = torch.cat((F.pad(extra, (0, more % 2)).view(-1, 2), rows))
            return names, self.mesh.world.start_all_reduce(rows)

        def read(values: Sequence[float]) -> Totals:
            names = begun[0]
            while True:
                found = tuple(values[:more])
                values = values[more + more % 2 :]
                pairs = list(zip(values[::2], values[1::2], strict=True))
                *sums, (tokens, broken), (positions, changed), (squares, _) = pairs
                # Cauchy-Schwarz: (sum of x)^2 = n (sum of x^2) holds only for equal numbers.
                if int(positions) ** 2 != int(squares) * self.mesh.world.size:
                    raise RanksDiffer(_different_positions(self.mesh.world.gather_json(consumed)))
                if not changed:
                    return Totals(dict(zip(names, sums, strict=True)), tokens, not broken, found)
                del self._names[evaluate]
                names, rows = begin()
                values = rows.wait().flatten().tolist()

        # Reads may be repeated, but a collective is waited for once.
        begun = begin()
        return Late(cache(begun[1].wait), read)


def counted_tokens(totals: Late[Totals]) -> Tensor:
    """Return the number of tokens in the totals, [] in float64 on the device, without waiting."""
    # The last three rows are (tokens, not finite) and the two of the check.
    return totals.tensor()[-3, 0]


def _rows(
    losses: Sequence[Loss],
    names: Sequence[str],
    check: Sequence[Sequence[float]],
    device: torch.device,
) -> Tensor:
    """Return the numbers that this rank adds to the sum, [names + 3, 2] in float64.

    The rows are (sum, count) of each name, (tokens, number of losses that are not finite), and the
    two rows of `check`.

    Args:
        losses: the losses of this rank's microbatches.
        names: the names of reported values, in the order of the rows.
        check: two pairs of numbers, whose sums show whether ranks are at the same step.
        device: where the sum is made.
    """
    on_host = torch.cat((torch.zeros(len(names) + 1, 2), torch.tensor(check, dtype=torch.float64)))
    on_device = None
    if device.type != "cpu":
        on_device = torch.zeros_like(on_host, device=device)
    for loss in losses:
        tokens = loss.value.new_zeros(()) if loss.tokens is None else loss.tokens
        values = [loss.reported.get(name) for name in names]
        for i, value in enumerate([*values, (tokens, ~loss.value.isfinite())]):
            if value is None:
                continue
            pair = _pair(value)
            # Each number is added where it lies, so that the host does not wait for the device.
            rows = on_host
            if on_device is not None and pair.device.type != "cpu":
                rows = on_device
            rows[i] += pair.to(rows.device)
    if on_device is None:
        return on_host
    return on_device.add_(on_host.to(device, non_blocking=True))


def _pair(value: Any) -> Tensor:
    """Return (sum, count) of a reported value, [2] in float64, on the value's device.

    A single number counts as 1.
    """
    parts = value if isinstance(value, tuple | list) else (value,)
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    # float64, so that counts of tokens are exact.
    flat = []
    for part in parts:
        if isinstance(part, Tensor):
            flat.append(part.detach().double().to(device).flatten())
        else:
            flat.append(torch.full((1,), part, dtype=torch.float64, device=device))
    pair = torch.cat(flat)
    if pair.numel() == 2:
        return pair
    return torch.cat((pair, torch.ones_like(pair)))


def _different_positions(samples: Sequence[int]) -> str:
    where = ", ".join(f"rank {rank} at sample {sample}" for rank, sample in enumerate(samples))
    return (
        f"the ranks are at different places of the data: {where}. "
        "Nothing was updated; start again from the last checkpoint with --load."
    )
