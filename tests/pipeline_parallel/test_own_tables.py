"""Tables whose passes stand in any order train as others do: what is last in a stage is read from its row."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.schedule import Costs, Kind, Pass, Schedule, ScheduleError, build, loop, verify
from megapipe.schedule.families.step.optimizer import with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from megapipe.schedule.passes import Last
from tools.proofs import fuzz_equivalence
from tools.proofs.equivalence_case import Case
from tools.proofs.synchronised import WAYS, too_early
from tools.proofs.tables.drawn import drawn_table


def test_the_last_of_a_stage_is_what_its_row_has_last() -> None:
    rows = [[*(Pass(Kind.F, s, n) for n in range(4)), *(Pass(Kind.BW, s, n) for n in (3, 1, 2, 0))] for s in (0, 1)]
    assert Schedule("lifo", loop(2), 4, tuple(tuple((x,) for x in row) for row in rows)).last[1] == Last(0, 0)
    split = build("zb-h1", 2, 4)
    late = tuple(step for step in split.ranks[0] if step[0] != Pass(Kind.W, 0, 1))
    split = replace(split, ranks=((*late, (Pass(Kind.W, 0, 1),)), split.ranks[1]))
    assert split.last == {0: Last(3, 1), 1: Last(3, 3)}
    assert build("dualpipe", 2, 8).last == {s: Last(n, n) for s, n in enumerate((3, 3, 7, 7))}


@pytest.mark.parametrize(
    ("drawn", "microbatches", "chain"),
    [
        (5, 4, 4),  # backwards of another order than forwards on every stage
        (11, 4, 4),  # a pair, and a W behind those of later backwards
        (67, 5, 3),  # two chains, of 3 and of 2 microbatches
    ],
)
def test_gradients_are_summed_in_buckets_when_the_last_microbatch_of_the_row_is_in(drawn, microbatches, chain):
    """The n-th forward was taken for it: losses and norms went wrong without a word."""
    case = Case("1f1b", 2, microbatches, (2,) * chain, drawn=drawn, dp=2, overlap=True, buckets=9, steps=1)
    case = replace(case, distributed=drawn == 67, attention_dropout=0.0, hidden_dropout=0.0)
    table = drawn_table(drawn, 2, microbatches)
    assert (table.placement.chain, table.placement.num_chains) == (chain, 2 if drawn == 67 else 1)
    forwards = {p.stage: p.microbatch for row in table.ranks for step in row for p in step if p.kind is Kind.F}
    assert all(table.last[stage].weights != last for stage, last in forwards.items())
    assert fuzz_equivalence.run(case) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("table", [*(("zb-v", "v-half", "interleaved-zb", "dualpipe-v", "1f1b")), 11, 67], ids=str)
def test_megatrons_data_parallelism_sums_each_chunk_once_and_whole(table, way):
    """The last backward of one chunk let those of others be summed, until the chunk's last W."""
    made = drawn_table(table, 2, 5) if isinstance(table, int) else build(table, 2, 4)
    assert too_early(made, way) == []


def test_a_head_waits_for_the_weights_of_the_embedding_that_it_borrows():
    """Rank 1 runs the last stage of one chain before the first of the other, and the second step read old weights."""
    case = Case("zb-v", 2, 2, (1, 1), drawn=162519, dp=2, distributed=True, overlap=True, steps=2)
    first = [step[0] for step in drawn_table(162519, 2, 2).ranks[1][:2]]
    assert [(p.kind.value, p.stage) for p in first] == [("F", 1), ("F", 2)]
    assert fuzz_equivalence.run(case) == []


def test_every_transform_of_a_drawn_table_can_be_run():
    """A G waited in its row for passes of a replica that stood behind it there; gathers of two replicas stood
    in two orders; lookups of one chain waited for the forwards of the other."""
    dice = random.Random(0)
    for seed in range(16):
        table = drawn_table(seed, dice.randint(1, 4), dice.randint(1, 7))
        verify(table)
        reduced = with_reduction(table)
        verify(with_optimizer(reduced, barrier=False, gather="ahead"))
        verify(with_optimizer(reduced, gather="after"))
        places = table.placement
        if all(set(places.rank_of[first : first + places.chain]) == set(range(places.num_ranks))
               for first in range(0, places.num_stages, places.chain)):  # fmt: skip
            verify(with_reduction(with_vocabulary(table, Costs(s=0.5, t=0.25))))


def forwards_of_the_last_turned(table: Schedule, kind: Kind, stage: int) -> Schedule:
    """The first two passes of this kind of the stage change places with all that belongs to them."""
    turn = {0: 1, 1: 0}
    rows = [
        [tuple(p._replace(microbatch=turn.get(p.microbatch, p.microbatch)) if p[:2] == (kind, stage) else p for p in s)
         for s in row] for row in table.ranks
    ]  # fmt: skip
    return replace(table, name="turned", ranks=tuple(map(tuple, rows)))


def test_ends_that_read_their_microbatches_in_two_orders_are_refused():
    """A microbatch was trained with the label of another where data comes from plain iterators."""
    gpipe, shared = build("gpipe", 2, 3), with_vocabulary(build("gpipe", 2, 3), Costs(s=0.5, t=0.25))
    for table, kind, stage in ((gpipe, Kind.F, 1), (shared, Kind.E, 0), (shared, Kind.E, 1)):
        with pytest.raises(ScheduleError) as caught:
            verify(forwards_of_the_last_turned(table, kind, stage))
        found = f"{stage}{kind}1: stage 0 reads microbatch 0 at this place, and both ends of a chain read their"
        assert found in str(caught.value)
