"""The order of samples depends on consumed samples alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megapipe.data.gpt_dataset import Item
from megapipe.data.loader import Batches, SampleOrder, make_batch, stack
from megapipe.errors import DataError


class Counting:
    """Item i is [i, i, i]: a sample that says its own id."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        return np.full(3, sample)


def made(
    data: Counting, b: int, count: int, rank: int = 0, dp: int = 1, *, num_workers=2, pinned=False, **how
) -> Batches:
    """The microbatches of a rank, b samples in each and so many in a step."""
    order = SampleOrder(len(data), b, rank, dp, **how)
    return Batches(data, order, lambda consumed: count, num_workers=num_workers, pinned=pinned)


def ids(batches: Batches, consumed: int) -> list[list[int]]:
    """Sample ids of each microbatch of a step."""
    return [microbatch[:, 0].tolist() for microbatch in batches.at(consumed)]


def test_single_deals_each_microbatch_to_the_ranks_in_turn() -> None:
    ranks = [made(Counting(100), 2, 2, rank, 3) for rank in range(3)]
    assert [ids(b, 12) for b in ranks] == [[[12, 13], [18, 19]], [[14, 15], [20, 21]], [[16, 17], [22, 23]]]


@pytest.mark.parametrize(("micro_batch_size", "data_parallel_size"), [(8, 1), (4, 2), (2, 2), (1, 8), (2, 1)])
def test_a_global_batch_holds_the_same_samples_on_every_layout(micro_batch_size: int, data_parallel_size: int) -> None:
    microbatches = 8 // (micro_batch_size * data_parallel_size)
    for consumed in (0, 8, 40):
        seen = [
            i
            for rank in range(data_parallel_size)
            for microbatch in ids(
                made(Counting(64), micro_batch_size, microbatches, rank, data_parallel_size), consumed
            )
            for i in microbatch
        ]
        assert sorted(seen) == list(range(consumed, consumed + 8))


def permuted(count: int, epoch: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()  # type: ignore[no-any-return]


def megatron_cyclic(
    total: int, consumed: int, b: int, rank: int, dp: int, count: int, data_sharding: bool
) -> list[list[int]]:
    """Microbatches by the rule of MegatronPretrainingRandomSampler (data_samplers.py), epoch by epoch.

    With data sharding rank r has a bucket of (total // (b dp)) b samples that begins at r times its size, and shuffles
    that; without, all whole microbatches are shuffled and it takes every dp-th sample of what is left of the epoch.
    """
    out: list[list[int]] = []
    active = total - total % (b * dp)
    epoch, offset = consumed // active, consumed % active
    while len(out) < count:
        if data_sharding:
            bucket = total // (b * dp) * b
            mine = [rank * bucket + x for x in permuted(bucket, epoch)[offset // dp :]]
        else:
            mine = permuted(total // b * b, epoch)[offset:][rank::dp]
        out += [mine[i : i + b] for i in range(0, (active - offset) // dp, b)]
        epoch, offset = epoch + 1, 0
    return out[:count]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("total", [12, 23])
def test_cyclic_shuffles_each_epoch_as_megatron_does(total: int, dp: int, sharded: bool) -> None:
    for rank in range(dp):
        batches = made(Counting(total), 2, 4, rank, dp, kind="cyclic", sharded=sharded)
        for step in range(8):
            consumed = step * 8 * dp
            assert ids(batches, consumed) == megatron_cyclic(total, consumed, 2, rank, dp, 4, sharded)


@pytest.mark.parametrize("sharded", [True, False])
def test_an_epoch_of_cyclic_reads_every_sample_once(sharded: bool) -> None:
    """--dataloader-type cyclic, and --no-data-sharding: 20 samples, b 2, dp 2: five microbatches on each rank."""
    ranks = [made(Counting(20), 2, 5, rank, 2, kind="cyclic", sharded=sharded) for rank in range(2)]
    parts = [[i for microbatch in ids(b, 0) for i in microbatch] for b in ranks]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    if sharded:  # Megatron's default, written out: randperm(10) of seed 0, and the same above 10
        assert parts == [[4, 1, 7, 5, 3, 9, 0, 8, 6, 2], [14, 11, 17, 15, 13, 19, 10, 18, 16, 12]]


def test_an_evaluation_goes_on_at_the_first_sample_when_it_has_come_to_the_end() -> None:
    ranks = [made(Counting(10), 2, 2, rank, 2, wraps=True) for rank in range(2)]
    assert [ids(b, 4) for b in ranks] == [[[4, 5], [8, 9]], [[6, 7], [0, 1]]]
    assert ids(ranks[0], 40) == [[0, 1], [4, 5]]
    assert ids(made(Counting(1), 2, 2, wraps=True), 0) == [[0, 0], [0, 0]]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_run_resumed_anywhere_reads_the_tail_of_the_unbroken_one(kind: str, workers: int) -> None:
    def run(first: int) -> list[list[list[int]]]:
        batches = made(Counting(50), 2, 3, 1, 2, kind=kind, num_workers=workers)  # type: ignore[arg-type]
        return [ids(batches, consumed) for consumed in range(first, 48, 12)]

    unbroken = run(0)
    assert [run(consumed) for consumed in (12, 24, 36)] == [unbroken[1:], unbroken[2:], unbroken[3:]]


def test_reading_ahead_survives_jumps_and_any_order_of_microbatches() -> None:
    ahead, plain = made(Counting(400), 2, 4, num_workers=2), made(Counting(400), 2, 4, num_workers=0)
    for consumed in (0, 8, 16, 8, 80, 88, 0, 0):
        step = ahead.at(consumed)
        for i in (3, 1, 0, 2, 1):
            assert torch.equal(step[i], plain.at(consumed)[i])
        assert torch.equal(torch.stack(step[:]), torch.stack(list(plain.at(consumed))))
        assert step[0].shape == (2, 3)
        assert step[0].dtype == torch.int64


def test_past_the_end_is_an_error_and_reading_ahead_of_it_is_not() -> None:
    batches = made(Counting(16), 2, 4)
    assert ids(batches, 8) == [[8, 9], [10, 11], [12, 13], [14, 15]]
    with pytest.raises(DataError, match="The dataset ends at sample 16, the run wants 16 to 17"):
        ids(batches, 16)


def test_cyclic_refuses_a_dataset_smaller_than_a_microbatch_of_all_ranks() -> None:
    with pytest.raises(DataError, match="7 samples do not fill one microbatch of --micro-batch-size 4 x 2"):
        SampleOrder(7, 4, 0, 2, "cyclic").microbatch(0)


def test_labels_are_the_next_tokens_and_eod_inputs_carry_no_loss() -> None:
    rows = torch.tensor([[5, 0, 6, 0, 7], [1, 2, 3, 4, 0]])
    batch = make_batch(rows, eod=0, eod_mask_loss=True)
    assert batch.tokens.tolist() == [[5, 0, 6, 0], [1, 2, 3, 4]]
    assert batch.labels.tolist() == [[0, 6, 0, 7], [2, 3, 4, 0]]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 0], [1, 1, 1, 1]]  # the eod label itself is learned
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.loss_mask.dtype == torch.float32
    assert make_batch(rows).loss_mask.min() == 1


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int16, np.int32, np.uint32, np.int64])
def test_token_ids_of_any_whole_type_become_int64(kind: type) -> None:
    """int32 labels had the gradient of others, uint16 and int16 ended in torch's own errors in the first step."""
    tokens = stack([np.array([3, 1, 2], kind), np.array([0, 4, 5], kind)])
    assert isinstance(tokens, torch.Tensor)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [[3, 1, 2], [0, 4, 5]]


def test_named_fields_are_stacked_each_in_its_type() -> None:
    fields = stack([{"tokens": np.arange(3) + i, "weight": np.float32([i]), "domain": np.asarray(i)} for i in (4, 5)])
    assert isinstance(fields, dict)
    assert {name: (x.tolist(), x.dtype) for name, x in fields.items()} == {
        "tokens": ([[4, 5, 6], [5, 6, 7]], torch.int64),
        "weight": ([[4.0], [5.0]], torch.float32),
        "domain": ([4, 5], torch.int64),
    }


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        (
            [np.zeros(3), np.zeros(4)],
            r"gives {'tokens': \(3,\)} and {'tokens': \(4,\)}; one microbatch needs one",
        ),
        ([{"tokens": np.zeros(3), "a": np.zeros(1)}, np.zeros(3)], r"'a': \(1,\)} and {'tokens': \(3,\)}; one"),
        ([{"ids": np.zeros(3), "a": np.zeros(1)}], "gives ids, a, and no field `tokens` of s \\+ 1 token ids"),
        ([np.zeros(3)], "the field tokens of the data set is of float64, and token ids are whole numbers"),
        ([{"tokens": np.arange(3), "a": np.array(["x"])}], "field a of the data set is of <U1, which no tensor holds"),
    ],
)
def test_fields_that_make_no_microbatch_are_named(items: list[Item], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        stack(items)


@pytest.mark.parametrize("workers", [0, 2])
def test_for_a_gpu_each_microbatch_is_read_into_pinned_memory(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    pinned: list[torch.Tensor] = []  # there is no such memory without a GPU: the call stands for it

    def pin(x: torch.Tensor) -> torch.Tensor:
        pinned.append(x.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    read = made(Counting(16), 2, 3, num_workers=workers, pinned=True).at(0)
    assert all(any(x is made for made in pinned) for x in read)
    assert ids(made(Counting(16), 2, 3, num_workers=workers), 0) == [sorted(x[:, 0].tolist()) for x in read]


def test_a_depth_reads_so_many_tokens_further_with_zeros_at_the_end() -> None:
    """Megatron-LM's roll of tokens, labels, mask and positions; eod is 9."""
    tokens = torch.tensor([[1, 2, 9, 3, 4, 5, 6]])
    batch = make_batch(tokens, 9, eod_mask_loss=True)
    ahead = batch.ahead(2)
    assert ahead.tokens.tolist() == [[9, 3, 4, 5, 0, 0]]
    assert ahead.labels.tolist() == [[3, 4, 5, 6, 0, 0]]
    assert ahead.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0]]
    assert ahead.position_ids.tolist() == [[2, 3, 4, 5, 0, 0]]
    assert batch.ahead(2, weighs=True).loss_mask.sum().item() == pytest.approx(batch.loss_mask.sum().item(), rel=1e-15)
    assert batch.ahead(9).loss_mask.sum() == 0


@pytest.mark.parametrize(("depth", "mask"), [(0, [1] * 6), (1, [1, 0, 0, 1, 1, 0]), (2, [0, 0, 0, 1, 0, 0])])
def test_between_a_token_and_what_a_depth_learns_from_it_no_document_ends(depth: int, mask: list[int]) -> None:
    batch = make_batch(torch.tensor([[1, 2, 9, 3, 4, 5, 6]]), 9)
    assert batch.ahead(depth, ends=9).loss_mask.tolist() == [mask]
    assert batch.ahead(depth).loss_mask.sum() == 6 - depth, "as Megatron-LM: all that there is"
