"""Read microbatches as a pure function of consumed samples, so that a run resumes exactly.

It resumes in the same way on another layout of ranks. Only token ids are read ahead; labels, mask
and positions are computed on the stages that need them.
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
"""A microbatch as it is read: token ids [b, s + 1], or tensors [b, ...] by name with `tokens`."""


@dataclass(frozen=True)
class Batch:
    """One microbatch in the form the model takes. `ahead` shifts it, and `cut` selects tokens.

    Attributes:
        tokens: [b, s] int64, the inputs.
        labels: [b, s] int64, the token after each input.
        loss_mask: [b, s] float32, the weight of each label's loss.
        position_ids: [b, s] int64.
        more: [b, ...], further fields of the dataset by name.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def ahead(self, depth: int, *, weighs: bool = False, ends: int | None = None) -> Batch:
        """Return the microbatch for multi-token prediction module `depth`, shifted left by `depth`.

        All fields but `more` are shifted, with zeros at the end (DeepSeek-V3, section 2.2).

        Args:
            depth: number of tokens to shift; 0 returns this microbatch.
            weighs: scale the shifted loss mask, as float64, to the sum of the unshifted mask. A
                loss divided by the step's number of tokens then weighs as much as the main model's.
            ends: end-of-document id. A label is masked if a document ends between it and the input.
                None masks no such label.
        """
        if not depth:
            return self
        mask = ahead(self.loss_mask, depth)
        if ends is not None:
            for between in range(depth + 1):
                end = self.tokens[:, between:].eq(ends)
                mask = mask * F.pad(~end, (0, min(between, mask.shape[1])))
        if weighs:
            # In float64, so that context-parallel ranks, each with a part of the sequence, add up
            # to the same number.
            mask = mask.double()
            mask *= self.loss_mask.double().sum() / mask.sum().clamp(min=1)
        return replace(
            self,
            tokens=ahead(self.tokens, depth),
            labels=ahead(self.labels, depth),
            loss_mask=mask,
            position_ids=ahead(self.position_ids, depth),
        )

    def cut(self, cut: Cut) -> Batch:
        """Return the microbatch with only the tokens of each sequence that this rank has.

        A field of `more` is cut too if its second dimension is s.

        Args:
            cut: which tokens of a sequence the rank has.
        """
        if cut.size == 1 and cut.piece is None:
            return self
        s = self.tokens.shape[1]
        more = dict(self.more)
        for name, x in self.more.items():
            if x.ndim > 1 and x.shape[1] == s:
                more[name] = cut.take(x, 1)
        return Batch(
            cut.take(self.tokens, 1),
            cut.take(self.labels, 1),
            cut.take(self.loss_mask, 1),
            cut.take(self.position_ids, 1),
            more,
        )


def tokens_of(microbatch: Microbatch) -> Tensor:
    """Return the token ids of a microbatch, [b, s + 1]."""
    return microbatch if isinstance(microbatch, Tensor) else microbatch["tokens"]


def stack(items: Sequence[Item]) -> Microbatch:
    """Stack items of a dataset to one microbatch.

    Arrays become one tensor, mappings become tensors by name.

    Token ids of any integer type become int64: the lookups of torch take no narrower type.

    Raises: DataError for items that differ in names or shapes, for missing `tokens`, for ids that
    are not integers, or for a type without a tensor.
    """
    # A plain array is treated as a mapping with tokens alone.
    named = [item if isinstance(item, Mapping) else {"tokens": item} for item in items]
    shapes = []
    for item in named:
        shapes.append({name: np.shape(array) for name, array in item.items()})
    for other in shapes:
        if other != shapes[0]:
            raise DataError(
                f"the data set gives {shapes[0]} and {other}; one microbatch needs one shape of "
                "each field"
            )
    if "tokens" not in shapes[0]:
        raise DataError(
            f"the data set gives {', '.join(shapes[0])}, and no field `tokens` of s + 1 token ids"
        )
    fields = {}
    for name in shapes[0]:
        array = np.stack([item[name] for item in named])
        if name == "tokens":
            if array.dtype.kind not in "iu":
                raise DataError(
                    f"the field tokens of the data set is of {array.dtype}, and token ids are "
                    "whole numbers. Give integers of any size, such as int64."
                )
            array = array.astype(np.int64, copy=False)
        try:
            fields[name] = torch.from_numpy(array)
        except TypeError:
            raise DataError(
                f"field {name} of the data set is of {array.dtype}, which no tensor holds"
            ) from None
    return fields if isinstance(items[0], Mapping) else fields["tokens"]


def make_batch(
    tokens_plus_one: Tensor,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    reset_position_ids: bool = False,
) -> Batch:
    """Make a batch with all tokens but the last as inputs, and all but the first as labels.

    Args:
        tokens_plus_one: [b, s + 1] int64; the result is on its device.
        eod: end-of-document id, needed for the two flags below; else None.
        eod_mask_loss: mask the loss where the input is eod. The label eod is still learned.
        reset_position_ids: start positions at 0 after each eod.
    """
    tokens = tokens_plus_one[:, :-1].contiguous()
    labels = tokens_plus_one[:, 1:].contiguous()
    loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    assert eod is not None or not (eod_mask_loss or reset_position_ids)
    # No token has the id -1.
    ends = tokens == (-1 if eod is None else eod)
    if eod_mask_loss:
        loss_mask.masked_fill_(ends, 0.0)
    position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if reset_position_ids:
        # Each token subtracts the position at which its document begins. The running maximum
        # carries that position on to all tokens of the document, without a loop over documents.
        begins = torch.zeros_like(tokens)
        begins[:, 1:] = torch.where(ends[:, :-1], position_ids[:, 1:], 0)
        position_ids = position_ids - begins.cummax(dim=1).values
    return Batch(tokens, labels, loss_mask, position_ids)


@dataclass(frozen=True)
class SampleOrder:
    """The order in which one data-parallel rank reads samples; equal to Megatron's two samplers.

    With kind "single", samples are read in order. For b = 2 and dp = 2, rank 0 reads 0 and 1, then
    4 and 5. Rank 1 reads 2 and 3, then 6 and 7. The samples of a global batch thus depend neither
    on b nor on dp.

    With kind "cyclic", each epoch has its own random permutation, seeded with the epoch's number. A
    remainder smaller than b x dp is dropped.

    `microbatch` returns the sample ids of the next microbatch. `width` is b x dp.

    Attributes:
        num_samples: length of the dataset.
        micro_batch_size: b.
        data_parallel_rank: r.
        data_parallel_size: dp.
        kind: "single" (samples in order) or "cyclic" (a new permutation in each epoch).
        sharded: for "cyclic", rank r permutes the r-th of dp equal parts of the dataset. Otherwise
            all samples are permuted together, and rank r reads every dp-th of them.
        wraps: for "single", start again at sample 0 after the last sample.
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
        """The number of samples of one microbatch on all data-parallel ranks together, b x dp."""
        return self.micro_batch_size * self.data_parallel_size

    def microbatch(self, consumed: int) -> list[int]:
        """Return the sample ids of this rank's next microbatch.

        Args:
            consumed: samples that all data-parallel ranks together have consumed before it.
        Raises: DataError past the end of the dataset (single), or if the dataset is smaller than
        b x dp (cyclic).
        """
        if self.kind == "single":
            # The position depends on the number of consumed samples alone, so that a run resumes
            # where it stopped on any layout.
            first = consumed + self.data_parallel_rank * self.micro_batch_size
            if self.wraps:
                return [i % self.num_samples for i in range(first, first + self.micro_batch_size)]
            if consumed + self.width > self.num_samples:
                raise DataError(
                    f"The dataset ends at sample {self.num_samples}, the run wants {consumed} to "
                    f"{consumed + self.width - 1}. --train-iters or --train-samples must cover the "
                    "whole run."
                )
            return list(range(first, first + self.micro_batch_size))
        first = consumed + self.data_parallel_rank
        positions = range(first, consumed + self.width, self.data_parallel_size)
        return [self._cyclic(p) for p in positions]

    def _cyclic(self, position: int) -> int:
        """Return the sample id at a position in the endless sequence of shuffled epochs.

        Args:
            position: number of samples of all data-parallel ranks before this sample.
        """
        # Megatron-LM drops the remainder that does not fill one microbatch of all ranks.
        per_epoch = self.num_samples // self.width * self.width
        if per_epoch == 0:
            raise DataError(
                f"--dataloader-type cyclic: {self.num_samples} samples do not fill one microbatch "
                f"of --micro-batch-size {self.micro_batch_size} x {self.data_parallel_size} "
                "data-parallel ranks. Use --dataloader-type single"
            )
        epoch, offset = divmod(position, per_epoch)
        # Each rank counts through its own part, so dp positions share one offset in it.
        if self.sharded:
            part = per_epoch // self.data_parallel_size
            at = _permutation(part, epoch)[offset // self.data_parallel_size]
            return self.data_parallel_rank * part + int(at)
        whole_microbatches = self.num_samples // self.micro_batch_size * self.micro_batch_size
        return int(_permutation(whole_microbatches, epoch)[offset])


# Four: the current epoch and the next one, for training and for validation.
@lru_cache(maxsize=4)
def _permutation(count: int, epoch: int) -> NDArray[np.int64]:
    """Return [count], the permutation of an epoch, the same one on every machine."""
    generator = torch.Generator().manual_seed(epoch)
    order: NDArray[np.int64] = torch.randperm(count, generator=generator).numpy()
    return order


class Batches:
    """The microbatches of one dataset for one data-parallel rank, read ahead by threads.

    Args:
        dataset: where samples are read; used by several threads at once.
        order: the samples that this rank reads.
        num_microbatches: a function from consumed samples to the number of microbatches of the
            step that starts there. The step consumes b x dp samples per microbatch.
        num_workers: number of threads; 0 to read in the calling thread. The number affects speed
            alone.
        pinned: put microbatches in page-locked memory, from which a GPU copies asynchronously.
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
        self._dataset = dataset
        self._order = order
        self._num_microbatches = num_microbatches
        self._pinned = pinned
        self._pool: ThreadPoolExecutor | None = None
        if num_workers:
            self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data")
        # Steps that are being read, by the number of samples consumed before each.
        self._ahead: dict[int, list[Future[Microbatch]]] = {}

    def at(self, consumed_samples: int) -> Sequence[Microbatch]:
        """Return the microbatches of the step that starts at `consumed_samples`.

        The microbatches can be indexed in any order and repeatedly. Indexing waits until the
        microbatch is read.

        Raises: DataError, here or on indexing, for a sample that does not exist or cannot be read.
        """
        starts = self._starts(consumed_samples)
        if self._pool is None:
            return [self._read(start) for start in starts]
        # Already on its way, unless this is the first step or the run has jumped to another one.
        step = self._ahead.pop(consumed_samples, None)
        if not step:
            step = self._submit(self._pool, starts)
        # Anything else was read ahead for a step that did not follow, as after a rollback.
        for futures in self._ahead.values():
            for future in futures:
                future.cancel()
        # Reading one step ahead hides it in the computation of this step. More would only take more
        # memory.
        self._ahead = {starts.stop: self._submit(self._pool, self._starts(starts.stop))}
        return _Step(step)

    def _starts(self, consumed: int) -> range:
        """Return, for each microbatch of a step, the number of samples consumed before it: a range.

        The range's `stop` is the number of samples consumed before the next step.
        """
        width = self._order.width
        return range(consumed, consumed + self._num_microbatches(consumed) * width, width)

    def _submit(self, pool: ThreadPoolExecutor, starts: range) -> list[Future[Microbatch]]:
        """Let the threads read a step's microbatches, and return a future for each.

        Args:
            pool: the threads.
            starts: the samples consumed before each microbatch.
        """
        return [pool.submit(self._read, start) for start in starts]

    def _read(self, consumed: int) -> Microbatch:
        """Read the microbatch that starts after `consumed` samples."""
        read = stack([self._dataset[i] for i in self._order.microbatch(consumed)])
        if not self._pinned:
            return read
        if isinstance(read, Tensor):
            return read.pin_memory()
        return {name: x.pin_memory() for name, x in read.items()}


class _Step(Sequence[Microbatch]):
    """Microbatches that may still be read by threads; indexing waits for a microbatch."""

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
