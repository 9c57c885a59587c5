"""Slices of a microbatch in a run: how many tokens each has, and what its layers and its loss need of the others.

Stages number slices of all microbatches through, as a table of whole microbatches numbers these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Documents
from megapipe.errors import ConfigError, ScheduleError
from megapipe.pipeline_parallel.loss import Loss
from megapipe.schedule import Pass, Schedule
from megapipe.schedule.shapes.slices.cuts import at_borders, in_tokens
from megapipe.tensor_parallel.rng import Stream

Grad = Tensor | Callable[[], Tensor] | None
"""A gradient, which may be known later only."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the slices of each microbatch, in tokens of whole sequences, before ranks share them.

    Attributes:
        usual: of a microbatch whose documents nobody asks for; () where microbatches are whole.
        multiple: of which each length is one.
        documents: of a microbatch, whose borders the cuts follow.
    """

    usual: tuple[int, ...] = ()
    multiple: int = 1
    documents: Callable[[int], Documents | None] | None = None

    def of(self, microbatch: int) -> tuple[int, ...]:
        """The lengths in this microbatch."""
        documents = self.documents(microbatch) if self.documents else None
        return self.usual if documents is None else at_borders(self.usual, documents.borders, self.multiple)


@dataclass(frozen=True)
class Slices:
    """The slices of microbatches on one stage.

    Attributes:
        prefixes: what layers keep for the slices to come, by microbatch, until the last slice has it.
    """

    lengths: Lengths = Lengths()
    prefixes: dict[int, dict[object, Any]] = field(default_factory=dict, compare=False)

    @property
    def count(self) -> int:
        return len(self.lengths.usual) or 1

    @property
    def cuts(self) -> bool:
        """Are microbatches cut?"""
        return bool(self.lengths.usual)

    def tokens(self, number: int) -> tuple[range | None, int]:
        """The tokens of a slice, of sequences of this length; None, 0 of whole microbatches."""
        if not self.cuts:
            return None, 0
        lengths, piece = self.lengths.of(self.microbatch(number)), number % self.count
        begin = sum(lengths[:piece])
        return range(begin, begin + lengths[piece]), sum(lengths)

    def microbatch(self, number: int) -> int:
        """The microbatch that a slice is of."""
        return number // self.count

    def keeping(
        self, number: int, keep: Callable[[int, int, Tensor], Callable[[], Tensor]]
    ) -> Callable[[Tensor, Callable[[int], bool]], Callable[[], Tensor]]:
        """A Stream's `keep` for a slice. keep: is also told the slice, and the last of its microbatch that sees it."""
        behind = range(number + 1, (self.microbatch(number) + 1) * self.count)
        begins = [tokens.start for n in behind if (tokens := self.tokens(n)[0])]
        return lambda keys, sees: keep(number, number + sum(map(sees, begins)), keys)

    def stream(self, whole: Stream, number: int) -> Stream:
        """The stream of a microbatch as the layers of one of its slices see it."""
        if not self.cuts:
            return whole
        tokens, length = self.tokens(number)
        return replace(whole, piece=tokens, length=length, prefix=self.prefixes.get(self.microbatch(number), {}))

    def begun(self, number: int, stream: Callable[[int], Stream]) -> Stream:
        """The stream of a forward that begins: that of the first slice with nothing kept, also when it runs again."""
        if self.cuts and number % self.count == 0:
            self.prefixes[self.microbatch(number)] = {}
        made = stream(number)
        # From the last slice on the graphs hold what is kept, as long as there are any: an evaluation has none.
        if self.cuts and (number + 1) % self.count == 0:
            del self.prefixes[self.microbatch(number)]
        return made

    def share(self, number: int) -> float:
        """The part of the microbatch's tokens that a slice has."""
        piece, length = self.tokens(number)
        return 1.0 if piece is None else len(piece) / length

    def share_of(self, number: int, losses: Mapping[int, Loss], share: Callable[[Loss], Tensor]) -> Grad:
        """The weight of a slice's loss in the step's: how many tokens the microbatch has is known when all of its
        forwards have run, before its first backward."""
        return (lambda: share(self.loss_of(number, losses))) if self.cuts else share(losses[number])

    def refuse_lossless(self, loss_func: object, collects: bool) -> None:
        """Raises: ConfigError for forwards of slices whose results nobody would put together."""
        if self.cuts and (loss_func is None or collects):
            raise ConfigError(
                "--pipeline-slices runs steps with a loss: let forward_step return (output, loss_func), and leave out "
                "collect_non_loss_data."
            )

    def loss_of(self, number: int, losses: Mapping[int, Loss]) -> Loss:
        """The loss of the microbatch that a slice is of, once all of its forwards have run."""
        first = self.microbatch(number) * self.count
        return joined([losses[n] for n in range(first, first + self.count)])

    def losses_of(self, losses: Mapping[int, Loss]) -> list[tuple[int, Loss]]:
        """The losses of all microbatches, each with its number."""
        return [(self.microbatch(number), self.loss_of(number, losses)) for number in sorted(losses)[:: self.count]]


def joined(losses: Sequence[Loss]) -> Loss:
    """The loss of a microbatch from those of its slices. Raises: ConfigError for means of unknown numbers of tokens."""
    if len(losses) == 1:
        return losses[0]
    tokens = [loss.tokens for loss in losses if loss.tokens is not None]
    if len(tokens) < len(losses):
        raise ConfigError(
            "--pipeline-slices divides a microbatch's loss by the tokens of all its slices, and loss_func does not say "
            "its number: return (sum of token losses, number of tokens, dict) instead of (loss, dict)."
        )
    reported: dict[str, Any] = {}
    for name in losses[0].reported:
        values = [loss.reported[name] for loss in losses]
        reported[name] = _sum(name, values)
    return Loss(sum((x.value for x in losses[1:]), losses[0].value), sum(tokens[1:], tokens[0]), reported)


def _sum(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, tuple | list) and len(first) == 2:
        return tuple(sum(of[1:], of[0]) for of in zip(*values, strict=True))
    if hasattr(first, "numel") and first.numel() == 2:
        return sum(values[1:], first)
    raise ConfigError(
        f"--pipeline-slices adds up what loss_func reports of each slice, and {name!r} is one number, whose mean over "
        "a microbatch is unknown: report (sum, count)."
    )


def ranks_of_tokens(mesh: ProcessMesh, config: Any) -> int:
    """Ranks that share the tokens of a message among them."""
    return mesh.cp.size * (mesh.tp.size if getattr(config, "sequence_parallel", False) else 1)


def lengths_of(
    table: Schedule,
    length: int | None,
    mesh: ProcessMesh,
    config: Any,
    documents: Callable[[int], Documents | None] | None = None,
) -> Lengths:
    """Lengths of the table's slices in tokens of sequences of this length.

    Args:
        documents: of a microbatch, for cuts that follow them.
    Raises: ConfigError if the sequence cannot be cut so.
    """
    if not table.cuts:
        return Lengths()
    if length is None or table.placement.vocabulary or table.documents:
        why = "needs sequences of one length, seq_length"
        if length is not None:
            why = f"has no {'shares of the vocabulary' if not table.documents else 'order of documents'} in them"
        raise ConfigError(f"the schedule {table.name} cuts sequences in slices and {why}. Take one of whole sequences.")
    # Each context-parallel rank has two runs of a slice, and of these each tensor-parallel one a part.
    multiple = ranks_of_tokens(mesh, config) * (2 if mesh.cp.size > 1 else 1)
    of = lru_cache(maxsize=64)(documents) if documents else None
    if sum(table.cuts) == length and all(n % multiple == 0 for n in table.cuts):
        return Lengths(tuple(int(n) for n in table.cuts), multiple, of)
    try:
        return Lengths(in_tokens(table.cuts, length, multiple), multiple, of)
    except ScheduleError as error:
        raise ConfigError(f"the schedule {table.name}: {error}") from None


def shape_of_slice(lengths: Lengths, shape: tuple[int, int, int], made_by: Pass) -> tuple[int, ...] | None:
    """The shape of a message of a slice, None of a whole microbatch. shape: of the whole, on one rank."""
    if made_by.slice is None:
        return None
    own = lengths.of(made_by.microbatch)
    return shape[0] * own[made_by.slice] // sum(own), *shape[1:]
