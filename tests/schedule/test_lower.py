"""Programs: where messages stand, and that they stand so for every cost."""

from itertools import pairwise

import pytest

from megapipe.schedule import Costs, Exchange, Program, Schedule, build, lower, simulate, verify
from megapipe.schedule.families.step.optimizer import with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from megapipe.schedule.lower import most_in_flight
from megapipe.schedule.passes import repeated
from megapipe.schedule.simulate import run_clock


def text(program: Program) -> str:
    """`[...]` is an exchange."""
    return " ".join(
        f"[{' '.join(map(str, item.messages))}]" if isinstance(item, Exchange) else "&".join(map(str, item))
        for item in program
    )


def test_1f1b_on_two_ranks() -> None:
    first, second = lower(build("1f1b", 2, 2))
    assert text(first) == "0F0 [0F0:0->1] 0F1 [0F1:0->1 1BW0:1->0] 0BW0 [1BW1:1->0] 0BW1"
    assert text(second) == "[0F0:0->1] 1F0 [0F1:0->1] 1BW0 [1BW0:1->0] 1F1 1BW1 [1BW1:1->0]"


def test_a_receive_stands_where_its_sender_is_done() -> None:
    """Rank 0 is slow: its second output is there only after rank 1's backward."""
    _, second = lower(build("1f1b", 2, 2), Costs((9, 1), (1, 1), (1, 1)))
    assert text(second) == "[0F0:0->1] 1F0 1BW0 [1BW0:1->0 0F1:0->1] 1F1 1BW1 [1BW1:1->0]"


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "interleaved-zb", "shared"])
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e9])
def test_a_receive_stands_behind_the_steps_that_begin_before_it_is_there(name: str, unit: float) -> None:
    costs = Costs(10 * unit, 14 * unit, 7 * unit, s=3 * unit, t=2 * unit, e=unit, comm=unit / 3)
    table = with_vocabulary(build("1f1b", 4, 6), costs) if name == "shared" else build(name, 4, 8)
    time, slack = simulate(table, costs), unit / 100
    for rank, program in enumerate(lower(table, costs)):
        begun = [(at, time.start[item[0]]) for at, item in enumerate(program) if not isinstance(item, Exchange)]
        received = [
            (at, time.end[m.made_by])
            for at, item in enumerate(program) if isinstance(item, Exchange) for m in item.messages if m.dst == rank
        ]  # fmt: skip
        assert received
        for at, there in received:
            assert all((i < at) == (start < there - slack) for i, start in begun)


def test_what_is_made_before_v_is_received_before_v_in_every_step() -> None:
    """Rank 0's second forward is there at 18; rank 1, which has no work for it, could have validated at 10."""
    table = with_optimizer(with_reduction(build("1f1b", 2, 2)), barrier=False, gather="ahead")
    first, second = map(text, lower(repeated(table, 2), Costs((9, 1), (1, 1), (1, 1))))
    assert first == (
        "0A0 0F0 [0F0:0->1] 0F1 [0F1:0->1] 0V0 [1BW0:1->0] 0BW0 [1BW1:1->0] 0BW1 0G0 0U0 "
        "0A1 0F2 [0F2:0->1] 0F3 [0F3:0->1] 0V1 [1BW2:1->0] 0BW2 [1BW3:1->0] 0BW3 0G1 0U1"
    )
    assert second == (
        "1A0 [0F0:0->1] 1F0 [0F1:0->1] 1V0 1BW0 [1BW0:1->0] 1F1 1BW1 [1BW1:1->0] 1G0 1U0 "
        "1A1 [0F2:0->1] 1F2 [0F3:0->1] 1V1 1BW2 [1BW2:1->0] 1F3 1BW3 [1BW3:1->0] 1G1 1U1"
    )


def test_the_turn_of_a_v_needs_no_message() -> None:
    for rank, program in enumerate(lower(build("zb-v", 2, 1))):
        exchanged = [str(m) for item in program if isinstance(item, Exchange) for m in item.messages]
        assert exchanged == ["0F0:0->1", "2F0:1->0", "3B0:0->1", "1B0:1->0"], rank


def test_every_message_is_sent_right_behind_its_pass() -> None:
    for name in ("zb-h1", "zb-v", "dualpipe", "interleaved", "v-min"):
        for rank, program in enumerate(lower(build(name, 4, 8), Costs(10, 14, 7, comm=1))):
            for before, item in pairwise(program):
                if isinstance(item, Exchange):
                    assert not isinstance(before, Exchange)
                    sent = [m.made_by for m in item.messages if m.src == rank]
                    assert all(made in before for made in sent)


def test_passes_that_take_no_time_still_have_an_order() -> None:
    for name in ("1f1b", "zb-h2", "zb-v", "dualpipe", "dualpipe-v", "interleaved-zb"):
        for costs in (Costs(0, 0, 0), Costs(1, 0, 1), Costs(0, 1, 0), Costs(1 / 3, 0.1, 0.2)):
            verify(build(name, 4, 8), costs=costs)


def test_messages_under_way_are_those_made_and_not_yet_taken() -> None:
    def of(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
        return most_in_flight(schedule, run_clock(schedule, costs))

    assert of(build("gpipe", 2, 8), Costs(1, 1, 1)) == (1, 1)
    # Rank 1 takes 3 per forward: at 8 rank 0 has made 8, and rank 1 has taken those of 1, 4 and 7.
    assert of(build("gpipe", 2, 8), Costs((1, 3), (1, 3), (1, 3))) == (5, 1)
