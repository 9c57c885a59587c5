"""Slices of a microbatch in a run: how many tokens each has, and what its layers and its loss need of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Documents
from megapipe.errors import ConfigError, ScheduleError
from megapipe.pipeline_parallel.loss import Loss
from megapipe.pipeline_parallel.microbatches import Grad, Keep, Microbatches, Shape, ranks_of_tokens
from megapipe.schedule import Pass, Schedule
from megapipe.schedule.shapes.slices.cuts import at_borders, in_tokens
from megapipe.tensor_parallel.rng import Stream


@dataclass(frozen=True)
class Lengths:
    """Lengths of the slices of each microbatch, in tokens of whole sequences, before ranks share them.

    Attributes:
        usual: of a microbatch whose documents nobody asks for.
        multiple: of which each length is one.
        documents: of a microbatch, whose borders the cuts follow.
    """

    usual: tuple[int, ...]
    multiple: int = 1
    documents: Callable[[int], Documents | None] | None = None

    def of(self, microbatch: int) -> tuple[int, ...]:
        """The lengths in this microbatch."""
        documents = self.documents(microbatch) if self.documents else None
        return self.usual if documents is None else at_borders(self.usual, documents.borders, self.multiple)


@dataclass(frozen=True)
class Slices(Microbatches):
    """The slices of microbatches on one stage, numbered through all of them.

    Attributes:
        prefixes: what layers keep for later slices, by microbatch, until the last slice has it.
    """

    lengths: Lengths
    prefixes: dict[int, dict[object, Any]] = field(default_factory=dict, compare=False)

    @property
    def count(self) -> int:
        return len(self.lengths.usual)

    def tokens(self, number: int) -> tuple[range, int]:
        lengths = self.lengths.of(self.microbatch(number))
        piece = number % self.count
        begin = sum(lengths[:piece])
        return range(begin, begin + lengths[piece]), sum(lengths)

    def microbatch(self, number: int) -> int:
        return number // self.count

    def keeping(self, stream: Stream, number: int, keep: Keep) -> Stream:
        after = range(number + 1, (self.microbatch(number) + 1) * self.count)
        begins = [self.tokens(n)[0].start for n in after]
        return replace(stream, keep=lambda keys, sees: keep(number, number + sum(map(sees, begins)), keys))

    def stream(self, whole: Stream, number: int) -> Stream:
        tokens, length = self.tokens(number)
        return replace(whole, piece=tokens, length=length, prefix=self.prefixes.get(self.microbatch(number), {}))

    def begun(self, number: int, stream: Callable[[int], Stream]) -> Stream:
        # The first slice finds nothing kept, also when it runs again.
        if number % self.count == 0:
            self.prefixes[self.microbatch(number)] = {}
        made = stream(number)
        # From the last slice on graphs hold what is kept, if there are any: an evaluation has none.
        if (number + 1) % self.count == 0:
            del self.prefixes[self.microbatch(number)]
        return made

    def share(self, number: int) -> float:
        piece, length = self.tokens(number)
        return len(piece) / length

    def share_of(self, number: int, losses: Mapping[int, Loss], share: Callable[[Loss], Tensor]) -> Grad:
        # How many tokens the microbatch has is known when all of its forwards have run, before its first backward.
        return lambda: share(self._loss_of(number, losses))

    def losses_of(self, losses: Mapping[int, Loss]) -> list[tuple[int, Loss]]:
        firsts = sorted(losses)[:: self.count]
        return [(self.microbatch(number), self._loss_of(number, losses)) for number in firsts]

    def refuse_lossless(self, loss_func: object, collects: bool) -> None:
        if loss_func is None or collects:
            raise ConfigError(
                "--pipeline-slices runs steps with a loss: let forward_step return (output, loss_func), and leave out "
                "collect_non_loss_data."
            )

    def shape(self, whole: Shape, made_by: Pass) -> Shape | None:
        if made_by.slice is None:
            return None
        own = self.lengths.of(made_by.microbatch)
        return whole[0] * own[made_by.slice] // sum(own), *whole[1:]

    def _loss_of(self, number: int, losses: Mapping[int, Loss]) -> Loss:
        """Return the loss of the microbatch that a slice belongs to."""
        first = self.microbatch(number) * self.count
        return joined([losses[n] for n in range(first, first + self.count)])


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


def slices_of(
    table: Schedule,
    length: int | None,
    mesh: ProcessMesh,
    config: Any,
    documents: Callable[[int], Documents | None] | None = None,
) -> Callable[[], Slices] | None:
    """Return what makes the slices of a stage; None for a table of whole microbatches.

    Args:
        length: tokens of a sequence.
        documents: of a microbatch, for cuts that follow them.
    Raises: ConfigError if the sequence cannot be cut as the table says.
    """
    if not table.cuts:
        return None
    if length is None or table.placement.vocabulary or table.documents:
        why = "needs sequences of one length, seq_length"
        if length is not None:
            why = f"has no {'shares of the vocabulary' if not table.documents else 'order of documents'} in them"
        raise ConfigError(f"the schedule {table.name} cuts sequences in slices and {why}. Take one of whole sequences.")
    # Each context-parallel rank has two runs of a slice, and of these each tensor-parallel one a part.
    multiple = ranks_of_tokens(mesh, config) * (2 if mesh.cp.size > 1 else 1)
    usual = tuple(int(n) for n in table.cuts)
    if sum(table.cuts) != length or any(n % multiple for n in table.cuts):
        try:
            usual = in_tokens(table.cuts, length, multiple)
        except ScheduleError as error:
            raise ConfigError(f"the schedule {table.name}: {error}") from None
    return partial(Slices, Lengths(usual, multiple, lru_cache(maxsize=64)(documents) if documents else None))
