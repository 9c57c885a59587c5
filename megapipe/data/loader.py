"""Microbatches as a pure function of consumed samples, so that a run resumes exactly, also on another layout.

Token ids are all that is read ahead; labels, mask and positions are made where a stage needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megapipe.data.gpt_dataset import Item, TokenDataset
from megapipe.distributed.tokens import Cut, ahead
from megapipe.errors import DataError

Microbatch = Tensor | Mapping[str, Tensor]
"""A microbatch as it is read: token ids [b, s + 1], or tensors [b, ...] by name with `tokens` among them."""


@dataclass(frozen=True)
class Batch:
    """One microbatch as the model takes it. All [b, s]; loss_mask is float32, the others int64.

    Attributes:
        more: what else the data set gives, [b, ...] by its names.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def ahead(self, depth: int, *, weighs: bool = False, ends: int | None = None) -> Batch:
        """The microbatch of a depth of multi-token prediction: everything so many tokens further, zeros at the end.

        Args:
            weighs: its loss mask adds up to as much as this one's, for losses that are divided by the tokens of a step.
            ends: the id that ends a document; between a token and the one that is predicted from it none may stand.
        """
        if not depth:
            return self
        tokens, labels, mask, positions = (
            ahead(x, depth) for x in (self.tokens, self.labels, self.loss_mask, self.position_ids)
        )
        for between in () if ends is None else range(depth + 1):
            end = self.tokens[:, between:].eq(ends or 0)
            mask = mask * F.pad(~end, (0, min(between, mask.shape[1])))
        if weighs:  # in float64, so that ranks with parts of a sequence add up to the same number
            mask = mask.double()
            mask *= self.loss_mask.double().sum() / mask.sum().clamp(min=1)
        return replace(self, tokens=tokens, labels=labels, loss_mask=mask, position_ids=positions)

    def cut(self, cut: Cut) -> Batch:
        """The tokens that are here. Of `more` that is cut too which has s in its second dimension."""
        if cut.size == 1 and cut.piece is None:
            return self
        s = self.tokens.shape[1]
        more = {name: cut.take(x, 1) if x.ndim > 1 and x.shape[1] == s else x for name, x in self.more.items()}
        tokens, labels, loss_mask, position_ids = (
            cut.take(x, 1) for x in (self.tokens, self.labels, self.loss_mask, self.position_ids)
        )
        return Batch(tokens, labels, loss_mask, position_ids, more)


def tokens_of(microbatch: Microbatch) -> Tensor:
    """[b, s + 1]."""
    return microbatch if isinstance(microbatch, Tensor) else microbatch["tokens"]


def stack(items: Sequence[Item]) -> Microbatch:
    """One microbatch of the items of a data set.

    Token ids become int64, whatever whole numbers the data set has: torch's lookups take no narrower type.

    Raises: DataError if they have other names or shapes than each other, no `tokens`, ids that are no whole numbers,
        or what no tensor holds.
    """
    named = [item if isinstance(item, Mapping) else {"tokens": item} for item in items]
    shapes = [{name: np.shape(array) for name, array in item.items()} for item in named]
    for other in shapes:
        if other != shapes[0]:
            raise DataError(f"the data set gives {shapes[0]} and {other}; one microbatch needs one shape of each field")
    if "tokens" not in shapes[0]:
        raise DataError(f"the data set gives {', '.join(shapes[0])}, and no field `tokens` of s + 1 token ids")
    fields = {}
    for name in shapes[0]:
        array = np.stack([item[name] for item in named])
        if name == "tokens":
            if array.dtype.kind not in "iu":
                raise DataError(
                    f"the field tokens of the data set is of {array.dtype}, and token ids are whole numbers. Give "
                    "integers of any size, such as int64."
                )
            array = array.astype(np.int64, copy=False)
        try:
            fields[name] = torch.from_numpy(array)
        except TypeError:
            raise DataError(f"field {name} of the data set is of {array.dtype}, which no tensor holds") from None
    return fields if isinstance(items[0], Mapping) else fields["tokens"]


def make_batch(
    tokens_plus_one: Tensor, eod: int | None = None, eod_mask_loss: bool = False, reset_position_ids: bool = False
) -> Batch:
    """Inputs are all but the last token, labels all but the first.

    Args:
        tokens_plus_one: [b, s + 1] int64, on the device that the batch shall be on.
        eod: end-of-document id, needed with the two that follow.
        eod_mask_loss: no loss where the INPUT is eod (eod itself is learned).
        reset_position_ids: positions begin at 0 after each eod.
    """
    tokens = tokens_plus_one[:, :-1].contiguous()
    labels = tokens_plus_one[:, 1:].contiguous()
    loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    assert eod is not None or not (eod_mask_loss or reset_position_ids)
    ends = tokens == -1 if eod is None else tokens == eod
    if eod_mask_loss:
        loss_mask.masked_fill_(ends, 0.0)
    position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if reset_position_ids:
        begins = torch.zeros_like(tokens)
        # The position of the first token behind each eod, carried on by the running maximum: no loop over documents.
        begins[:, 1:] = torch.where(ends[:, :-1], position_ids[:, 1:], 0)
        position_ids = position_ids - begins.cummax(dim=1).values
    return Batch(tokens, labels, loss_mask, position_ids)


@dataclass(frozen=True)
class SampleOrder:
    """The samples that a data-parallel rank reads, by the number that the run has consumed (Megatron's two samplers).

    single: in order; of every run of b x dp samples rank r takes the r-th b, so the samples of a global batch depend
    neither on b nor on dp.
    cyclic: each epoch has a torch.randperm seeded with its number; a rest smaller than b x dp is dropped. Sharded, rank
    r has the r-th of dp equal parts of the samples and shuffles it; otherwise all whole microbatches are shuffled, and
    it takes every dp-th sample.

    Attributes:
        wraps: single begins again at sample 0 when it has come to the end.
    """

    num_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    kind: Literal["single", "cyclic"] = "single"
    sharded: bool = True
    wraps: bool = False

    @property
    def width(self) -> int:
        """Samples that all ranks together consume in one microbatch."""
        return self.micro_batch_size * self.data_parallel_size

    def microbatch(self, consumed: int) -> list[int]:
        """Sample ids of the microbatch that starts when `consumed` samples have been consumed.

        Raises: DataError past the end of the dataset (single) or for one smaller than b x dp (cyclic).
        """
        if self.kind == "single":
            # Place in the order follows from the number of samples alone: a run resumes on any layout where it
            # stopped.
            first = consumed + self.data_parallel_rank * self.micro_batch_size
            if self.wraps:
                return [i % self.num_samples for i in range(first, first + self.micro_batch_size)]
            if consumed + self.width > self.num_samples:
                raise DataError(
                    f"The dataset ends at sample {self.num_samples}, the run wants {consumed} to "
                    f"{consumed + self.width - 1}. --train-iters or --train-samples must cover the whole run."
                )
            return list(range(first, first + self.micro_batch_size))
        positions = range(consumed + self.data_parallel_rank, consumed + self.width, self.data_parallel_size)
        return [self._cyclic(p) for p in positions]

    def _cyclic(self, position: int) -> int:
        # A rest that does not fill a microbatch of all ranks is dropped, as in Megatron-LM.
        per_epoch = self.num_samples // self.width * self.width
        if per_epoch == 0:
            raise DataError(
                f"--dataloader-type cyclic: {self.num_samples} samples do not fill one microbatch of "
                f"--micro-batch-size {self.micro_batch_size} x {self.data_parallel_size} data-parallel ranks. "
                "Use --dataloader-type single"
            )
        epoch, offset = divmod(position, per_epoch)
        if self.sharded:
            part = per_epoch // self.data_parallel_size
            at = _permutation(part, epoch)[offset // self.data_parallel_size]
            return self.data_parallel_rank * part + int(at)
        whole_microbatches = self.num_samples // self.micro_batch_size * self.micro_batch_size
        return int(_permutation(whole_microbatches, epoch)[offset])


@lru_cache(maxsize=4)  # an epoch and the next, for training and validation
def _permutation(count: int, epoch: int) -> NDArray[np.int64]:
    order: NDArray[np.int64] = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).numpy()
    return order


class Batches:
    """The microbatches of one split for one data-parallel rank, read ahead by background threads.

    Args:
        order: which samples this rank reads.
        num_microbatches: samples consumed -> the microbatches of the step from there on each rank, which consumes
            b x dp x num_microbatches samples.
        num_workers: threads; 0 reads in the caller. Changes the speed and nothing else.
        pinned: in page-locked memory, from which a GPU copies while the host goes on.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        order: SampleOrder,
        num_microbatches: Callable[[int], int],
        *,
        num_workers: int = 2,
        pinned: bool = False,
    ) -> None:
        self._dataset, self._order = dataset, order
        self._num_microbatches, self._pinned = num_microbatches, pinned
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers else None
        self._ahead: dict[int, list[Future[Microbatch]]] = {}

    def at(self, consumed_samples: int) -> Sequence[Microbatch]:
        """The step that starts at consumed_samples, its microbatches in any order and repeatedly.

        Raises: DataError, here or when a microbatch is indexed, for a sample that does not exist or cannot be read.
        """
        starts = self._starts(consumed_samples)
        if self._pool is None:
            return [self._read(start) for start in starts]
        step = self._ahead.pop(consumed_samples, None) or self._submit(self._pool, starts)
        for futures in self._ahead.values():  # read for a step that was not asked for
            for future in futures:
                future.cancel()
        # One step ahead and no more: samples are read while this step computes, and memory holds two steps of them.
        self._ahead = {starts.stop: self._submit(self._pool, self._starts(starts.stop))}
        return _Step(step)

    def _starts(self, consumed: int) -> range:
        width = self._order.width
        return range(consumed, consumed + self._num_microbatches(consumed) * width, width)

    def _submit(self, pool: ThreadPoolExecutor, starts: range) -> list[Future[Microbatch]]:
        return [pool.submit(self._read, start) for start in starts]

    def _read(self, consumed: int) -> Microbatch:
        read = stack([self._dataset[i] for i in self._order.microbatch(consumed)])
        if not self._pinned:
            return read
        return read.pin_memory() if isinstance(read, Tensor) else {name: x.pin_memory() for name, x in read.items()}


class _Step(Sequence[Microbatch]):
    """Microbatches that may still be on their way; indexing waits for one."""

    def __init__(self, futures: list[Future[Microbatch]]) -> None:
        self._futures = futures

    def __len__(self) -> int:
        return len(self._futures)

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Microbatch]: ...
    def __getitem__(self, index: int | slice) -> Microbatch | list[Microbatch]:
        if isinstance(index, slice):
            return [future.result() for future in self._futures[index]]
        return self._futures[index].result()
