"""Run slices of a microbatch: the tokens of each, its layers' view of earlier slices, and its loss.

Layers of a slice attend to the keys and values of earlier slices. The losses of all slices are
joined, because a mean over a microbatch's tokens is known only once all its slices are counted.
"""

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
from megapipe.schedule.core.cuts import at_borders, in_tokens
from megapipe.tensor_parallel.rng import MicrobatchContext


@dataclass(frozen=True)
class Lengths:
    """The lengths of a microbatch's slices, in tokens of the whole sequence on all ranks.

    `of` returns the lengths for one microbatch.

    Attributes:
        usual: the lengths without regard to documents.
        multiple: each length is a multiple of this number.
        documents: takes a microbatch and returns its documents. A cut moves to a border of a
            document if one is near. None to cut every microbatch into the usual lengths.
    """

    usual: tuple[int, ...]
    multiple: int = 1
    documents: Callable[[int], Documents | None] | None = None

    def of(self, microbatch: int) -> tuple[int, ...]:
        """Return the length in tokens of each slice of the microbatch with this number."""
        if self.documents is None:
            return self.usual
        documents = self.documents(microbatch)
        if documents is None:
            return self.usual
        return at_borders(self.usual, documents.borders, self.multiple)


@dataclass(frozen=True)
class Slices(Microbatches):
    """The slices of the microbatches on one stage, numbered through all microbatches.

    With 2 slices, microbatch 3 has the numbers 6 and 7. `Microbatches` describes the methods.

    Attributes:
        lengths: the lengths of the slices of each microbatch, in tokens.
        prefixes: {microbatch: {a layer's name for it: tensors, such as keys and values, that the
            layer keeps for later slices}}. A microbatch is removed when its last slice's forward
            begins.
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

    def keeping(self, stream: MicrobatchContext, number: int, keep: Keep) -> MicrobatchContext:
        after = range(number + 1, (self.microbatch(number) + 1) * self.count)
        begins = [self.tokens(n)[0].start for n in after]

        def keep_until_last(keys: Tensor, sees: Callable[[int], bool]) -> Callable[[], Tensor]:
            # The slices that see some of these keys follow at once: later ones see fewer.
            return keep(number, number + sum(map(sees, begins)), keys)

        return replace(stream, keep=keep_until_last)

    def stream(self, whole: MicrobatchContext, number: int) -> MicrobatchContext:
        tokens, length = self.tokens(number)
        prefix = self.prefixes.get(self.microbatch(number), {})
        return replace(whole, piece=tokens, length=length, prefix=prefix)

    def begun(self, number: int, stream: Callable[[int], MicrobatchContext]) -> MicrobatchContext:
        # The first slice finds nothing kept, also when it runs again.
        if number % self.count == 0:
            self.prefixes[self.microbatch(number)] = {}
        made = stream(number)
        # From the last slice on only graphs hold the prefix. An evaluation has no graphs and frees
        # it here.
        if (number + 1) % self.count == 0:
            del self.prefixes[self.microbatch(number)]
        return made

    def share(self, number: int) -> float:
        piece, length = self.tokens(number)
        return len(piece) / length

    def share_of(
        self, number: int, losses: Mapping[int, Loss], share: Callable[[Loss], Tensor]
    ) -> Grad:
        # A function, because the microbatch's number of tokens is not known yet. It is known when
        # all its forwards have run, which is before its first backward.
        return lambda: share(self._loss_of(number, losses))

    def losses_of(self, losses: Mapping[int, Loss]) -> list[tuple[int, Loss]]:
        firsts = sorted(losses)[:: self.count]
        return [(self.microbatch(number), self._loss_of(number, losses)) for number in firsts]

    def refuse_lossless(self, loss_func: object, collects: bool) -> None:
        if loss_func is None or collects:
            raise ConfigError(
                "--pipeline-slices runs steps with a loss: let forward_step return (output, "
                "loss_func), and leave out collect_non_loss_data."
            )

    def shape(self, whole: Shape, made_by: Pass) -> Shape | None:
        if made_by.slice is None:
            return None
        lengths = self.lengths.of(made_by.microbatch)
        # `whole` has this rank's tokens only, and each slice its share of them.
        return whole[0] * lengths[made_by.slice] // sum(lengths), *whole[1:]

    def _loss_of(self, number: int, losses: Mapping[int, Loss]) -> Loss:
        """Return the loss of the whole microbatch to which a slice belongs.

        Args:
            number: number of the slice, among all slices.
            losses: {number: loss} of the slices so far.
        """
        first = self.microbatch(number) * self.count
        return joined([losses[n] for n in range(first, first + self.count)])


def joined(losses: Sequence[Loss]) -> Loss:
    """Return the loss of a microbatch, made from the losses of its slices in order.

    Raises: ConfigError if a loss is a mean over an unknown number of tokens, or if a reported value
        is one number: means over unknown numbers of tokens cannot be joined.
    """
    if len(losses) == 1:
        return losses[0]
    tokens = [loss.tokens for loss in losses if loss.tokens is not None]
    if len(tokens) < len(losses):
        raise ConfigError(
            "--pipeline-slices divides a microbatch's loss by the tokens of all its slices, and "
            "loss_func does not say its number: return (sum of token losses, number of tokens, "
            "dict) instead of (loss, dict)."
        )
    reported: dict[str, Any] = {}
    for name in losses[0].reported:
        values = [loss.reported[name] for loss in losses]
        reported[name] = _sum(name, values)
    value = sum((loss.value for loss in losses[1:]), losses[0].value)
    return Loss(value, sum(tokens[1:], tokens[0]), reported)


def _sum(name: str, values: Sequence[Any]) -> Any:
    """Return the sum of several (sum, count), one for each slice.

    name: the key under which loss_func reports `values`.
    Raises: ConfigError for single numbers.
    """
    first = values[0]
    if isinstance(first, tuple | list) and len(first) == 2:
        return tuple(sum(of[1:], of[0]) for of in zip(*values, strict=True))
    if hasattr(first, "numel") and first.numel() == 2:
        return sum(values[1:], first)
    raise ConfigError(
        f"--pipeline-slices adds up what loss_func reports of each slice, and {name!r} is one "
        "number, whose mean over a microbatch is unknown: report (sum, count)."
    )


def slices_of(
    table: Schedule,
    length: int | None,
    mesh: ProcessMesh,
    config: Any,
    documents: Callable[[int], Documents | None] | None = None,
) -> Callable[[], Slices] | None:
    """Return a function that returns a new `Slices` for a stage; None for a table without slices.

    Args:
        table: the schedule.
        length: number of tokens of a sequence; None if sequences differ in length.
        mesh: this rank's mesh; its context-parallel ranks share the tokens of a sequence.
        config: may have `sequence_parallel`, with which tensor-parallel ranks share them too.
        documents: takes the number of a microbatch and returns its documents, so that slices are
            cut near their borders; None to cut all microbatches at the same tokens.
    Raises: ConfigError if the sequence cannot be cut as the table says. Also, for a table with
        slices, if `length` is None, if ranks share the vocabulary, or if the table has an order of
        documents.
    """
    if not table.cuts:
        return None
    if length is None or table.placement.vocabulary or table.documents:
        why = "has no order of documents in them"
        if length is None:
            why = "needs sequences of one length, seq_length"
        elif not table.documents:
            why = "has no shares of the vocabulary in them"
        raise ConfigError(
            f"the schedule {table.name} cuts sequences in slices and {why}. Take one of whole "
            "sequences."
        )
    multiple = ranks_of_tokens(mesh, config)
    # A context-parallel rank has two runs of each slice, so that causal attention is balanced. Each
    # run is divided further over the tensor-parallel ranks.
    if mesh.cp.size > 1:
        multiple *= 2
    usual = tuple(int(n) for n in table.cuts)
    # Cuts are tokens already, or shares of the sequence that are rounded here.
    if sum(table.cuts) != length or any(n % multiple for n in table.cuts):
        try:
            usual = in_tokens(table.cuts, length, multiple)
        except ScheduleError as error:
            raise ConfigError(f"the schedule {table.name}: {error}") from None
    # Each pass of a slice asks for the documents of its microbatch.
    cached = documents and lru_cache(maxsize=64)(documents)
    return partial(Slices, Lengths(usual, multiple, cached))
