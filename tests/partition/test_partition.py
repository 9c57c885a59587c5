"""Who holds which layers by Megatron's flags: its own numbers, the layers its users lost, none lost for any input."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.partition.spans import _nearest, nearly_even, partition, spans
from megapipe.schedule import Placement, loop, mirror, vee

PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 8), st.integers(1, 4)),
    st.builds(vee, st.integers(1, 8)),
    st.builds(mirror, st.integers(1, 8)),
)
MAYBE = st.none() | st.integers(1, 40)


def by_rank(num_layers: int, placement: Placement, **how) -> list[list[list[int]]]:
    """Layers of each chunk of each rank."""
    held = partition(num_layers, placement, **how)
    return [[list(held[stage].layers) for stage in placement.stages_on(rank)] for rank in range(placement.num_ranks)]


def sizes(num_layers: int, placement: Placement, **how) -> list[int]:
    return [span.count for span in partition(num_layers, placement, **how)]


def refusal(num_layers: int, placement: Placement, **how) -> str:
    with pytest.raises(ConfigError) as caught:
        partition(num_layers, placement, **how)
    (only,) = caught.value.problems
    return only


@given(layers=st.integers(1, 24), placement=PLACEMENTS, first=MAYBE, last=MAYBE)
@settings(max_examples=200, deadline=None)
def test_the_numbers_that_a_refusal_proposes_are_the_closest_of_all_that_work(layers, placement, first, last):
    def works(f, n):
        try:
            return bool(partition(layers, placement, first=f, last=n))
        except ConfigError:
            return False

    if first is None and last is None:
        return
    firsts, lasts = ([None] if x is None else range(1, layers + 1) for x in (first, last))
    fitting = [(f, n) for f in firsts for n in lasts if works(f, n)]
    away = [((f or 0) - (first or 0)) ** 2 + ((n or 0) - (last or 0)) ** 2 for f, n in fitting]
    found = _nearest(layers, placement, first, last)
    assert (found is None) == (not fitting)
    assert found is None or away[fitting.index(found)] == min(away)


def test_a_refusal_of_many_layers_takes_no_time():
    """It tried every pair of numbers: 7 seconds for 1001 layers, most of a day for 100,000."""
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match="does not fill 64 stages"):
        partition(100_001, loop(64))
    assert time.perf_counter() - begin < 5


def test_eight_layers_on_two_stages_are_dealt_as_megatron_deals_them():
    assert by_rank(8, loop(2, 4)) == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert by_rank(8, loop(2, 2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_thirty_layers_with_embedding_and_loss_counted_fill_four_stages_twice():
    both = {"account_for_embedding": True, "account_for_loss": True}
    assert sizes(30, loop(4, 2), **both) == [3, 4, 4, 4, 4, 4, 4, 3]
    assert sizes(30, loop(4), **both) == [7, 8, 8, 7]
    assert sizes(31, loop(4), account_for_loss=True) == [8, 8, 8, 7]


def test_first_five_and_last_three_of_24_leave_eight_each():
    assert sizes(24, loop(4), first=5, last=3) == [5, 8, 8, 3]
    assert sizes(26, loop(4), first=2) == [2, 8, 8, 8]


def test_the_ends_of_interleaved_ranks_are_dealt_to_their_chunks():
    assert sizes(24, loop(4, 2), first=4, last=4) == [2, 4, 4, 2] * 2


def test_under_a_v_the_first_rank_holds_both_ends_of_the_model():
    assert sizes(24, vee(4), first=6) == [3] * 8
    assert sizes(22, vee(4), first=4) == [2, 3, 3, 3, 3, 3, 3, 2]
    assert sizes(24, mirror(4), first=6, last=4) == [6, 7, 7, 4] * 2


@pytest.mark.parametrize(
    ("layers", "placement", "flags", "sentence"),
    [
        (30, loop(4), {}, "--num-layers 30 does not fill 4 stages: 30 = 4 x 7 + 2.\n      Use --num-layers 28 or 32,"),
        (80, loop(16, 2), {}, "80 = 32 x 2 + 16.\n      Use --num-layers 64 or 96,"),
        (
            48,
            loop(2),
            {"first": 11, "last": 13},
            "--decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 13 of --num-layers 48: that "
            "leaves 24 layers, and no rank is left for them.\n"
            "      Use --decoder-first-pipeline-num-layers 23 --decoder-last-pipeline-num-layers 25,",
        ),
        (
            20,
            loop(1),
            {"last": 1},
            "--decoder-last-pipeline-num-layers 1 of --num-layers 20: the one rank holds all 20.\n"
            "      Use --decoder-last-pipeline-num-layers 20, or leave it out.",
        ),
    ],
    ids=["issue 1304", "issue 468", "issue 2718", "issue 1778"],
)
def test_layers_that_vanished_in_megatron_are_refused_with_numbers_that_work(layers, placement, flags, sentence):
    assert sentence in refusal(layers, placement, **flags)


def test_the_ends_may_take_no_more_than_there_is():
    text = refusal(24, loop(4), first=20, last=10)
    assert "that is 6 more than there are" in text
    assert "that leaves 19 layers for 3 other stages: 19 = 3 x 6 + 1." in refusal(24, loop(4), first=5)
    assert "5 layers are not divisible by the 2 stages of rank 3" in refusal(24, loop(4, 2), first=6, last=5)


@settings(deadline=None)
@given(PLACEMENTS, st.integers(1, 100), st.booleans(), st.booleans(), MAYBE, MAYBE)
def test_every_layer_is_on_one_stage_of_each_chain_in_order(placement, layers, embedding, loss, first, last):
    try:
        held = partition(
            layers, placement, account_for_embedding=embedding, account_for_loss=loss, first=first, last=last
        )
    except ConfigError:
        return
    complete(held, layers, placement)


@given(PLACEMENTS, st.data())
def test_any_counts_make_the_whole_model(placement, data):
    counts = data.draw(st.lists(st.integers(0, 9), min_size=placement.chain, max_size=placement.chain))
    complete(spans(counts, placement), sum(counts), placement)


@given(st.integers(0, 100), st.integers(1, 40))
def test_a_nearly_even_split_differs_by_one_at_most(layers, chain):
    counts = nearly_even(layers, chain)
    assert sum(counts) == layers
    assert len(counts) == chain
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(st.builds(loop, st.integers(2, 8), st.integers(1, 3)), st.integers(1, 60), MAYBE, MAYBE)
def test_the_numbers_a_refusal_names_do_work(placement, layers, first, last):
    try:
        partition(layers, placement, first=first, last=last)
    except ConfigError as error:
        remedy = str(error).split("Use ")[1].replace(",", "").replace(".", "").split()
        values = {flag: remedy[i + 1] for i, flag in enumerate(remedy) if flag.startswith("--decoder")}
        if values:
            numbers = [values.get(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
            pair = [None if n is None else int(n) for n in numbers]
            complete(partition(layers, placement, first=pair[0], last=pair[1]), layers, placement)


def complete(held, layers: int, placement: Placement) -> None:
    """Each chain holds each layer once, in order, begins with E and ends with L."""
    for chain in range(placement.num_chains):
        own = held[chain * placement.chain : (chain + 1) * placement.chain]
        assert [layer for span in own for layer in span.layers] == list(range(layers))
        assert [span.embedding for span in own] == [True] + [False] * (placement.chain - 1)
        assert [span.loss for span in own] == [False] * (placement.chain - 1) + [True]
