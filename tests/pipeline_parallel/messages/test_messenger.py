"""What is posted between two ranks, and when: receives ahead of their turn, shapes first, sends that are let go."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.messages.messenger import Messenger, _tag, receive_ahead
from megapipe.pipeline_parallel.messages.transport import Ahead
from megapipe.schedule import Costs, Exchange, Kind, Message, Pass, Program, build, lower
from megapipe.schedule.families.step.optimizer import with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.families.vocabulary.shares import with_vocabulary

from ..relay import Done, Void

TWO = Axis(0, 2, (0, 1))


def text(program: Program) -> str:
    return " ".join(
        f"[{' '.join(map(str, item.messages))}]" if isinstance(item, Exchange) else "&".join(map(str, item))
        for item in program
    )


def test_receives_are_posted_places_ahead_and_sends_stay() -> None:
    _, second = lower(build("1f1b", 2, 3))
    assert text(second) == (
        "[0F0:0->1] 1F0 [0F1:0->1] 1BW0 [1BW0:1->0] 1F1 1BW1 [1BW1:1->0 0F2:0->1] 1F2 1BW2 [1BW2:1->0]"
    )
    one = "[0F0:0->1] [0F1:0->1] 1F0 [0F2:0->1] 1BW0 [1BW0:1->0] 1F1 1BW1 [1BW1:1->0] 1F2 1BW2 [1BW2:1->0]"
    assert text(receive_ahead(second, 1, Ahead(1, frozenset({0})))) == one
    many = "[0F0:0->1 0F1:0->1 0F2:0->1] 1F0 1BW0 [1BW0:1->0] 1F1 1BW1 [1BW1:1->0] 1F2 1BW2 [1BW2:1->0]"
    assert text(receive_ahead(second, 1, Ahead(4, frozenset({0})))) == many
    assert text(receive_ahead(second, 1, Ahead(4, frozenset({2})))) == text(second), "rank 2 sends nothing"
    for rank, program in enumerate(lower(build("dualpipe-v", 4, 8), Costs(3, 1, 2))):
        assert receive_ahead(program, rank, Ahead(0, frozenset(range(4)))) == program


def test_no_receive_is_posted_before_v_that_stood_behind_it() -> None:
    """A run that is taken back at V begins its row again, and would post a second receive for one message."""
    table = with_optimizer(with_reduction(build("1f1b", 2, 4)), barrier=False)
    second = receive_ahead(lower(table)[1], 1, Ahead(4, frozenset({0})))
    assert text(second).startswith("[0F0:0->1 0F1:0->1] 1F0 1V0 [0F2:0->1 0F3:0->1] 1BW0 [1BW0:1->0] 1F1 ")


def test_what_has_no_size_yet_cannot_be_received_ahead() -> None:
    known = Messenger(TWO, (2, 1, 3), torch.float32, transport=Void(TWO))
    assert known.receives_ahead.places > 0
    varied = Messenger(TWO, (2, 1, 3), torch.float32, transport=Void(TWO), variable_seq_lengths=True)
    assert varied.receives_ahead == Ahead(0, frozenset())


def test_every_message_of_a_step_has_a_number_of_its_own() -> None:
    """Gloo pairs by it: a lost message stops the ranks where it is missing. It must fit in 32 bits with a sign."""
    comm, ops = Messenger(TWO, (1,), torch.float32, transport=(void := Void(TWO))), 0
    for kind, stage, microbatch in product((Kind.F, Kind.B, Kind.E, Kind.S, Kind.C), range(40), (0, 1, 2, 500)):
        comm.exchange((Message(Pass(kind, stage, microbatch), 0, 1),), lambda _: torch.zeros(1))
        ops += 1
    tags = {op.tag for op in void.posted}
    assert len(tags) == ops
    assert all(0 <= tag < 2**31 for tag in tags)


@dataclass(frozen=True)
class Waiting(Axis):
    """Writes down that it was waited for."""

    log: list[str] = field(default_factory=list)

    def barrier(self) -> None:
        self.log.append("barrier")


@pytest.mark.parametrize("shared", [False, True])
def test_links_are_opened_when_all_ranks_are_there_between_all_who_will_talk(shared: bool) -> None:
    """Where the vocabulary is shared, the ends talk with every rank, neighbours or not."""
    table = build("1f1b", 4, 4)
    table = with_vocabulary(table) if shared else table
    talk = {
        tuple(sorted((m.src, m.dst)))
        for row in lower(table)
        for x in row
        if isinstance(x, Exchange)
        for m in x.messages
    }
    for rank in range(4):
        axis = Waiting(rank, 4, (0, 1, 2, 3))
        void = Void(axis)
        void.post = lambda ops, post=void.post, axis=axis: axis.log.append("post") or post(ops)  # type: ignore[method-assign]
        Messenger(axis, (1,), torch.float32, transport=void).open_links(table.placement)
        pairs = [pair for pair in sorted(talk) if rank in pair]
        assert axis.log == ["barrier", *["post"] * (2 * len(pairs))]
        ways = [(low, high, sends == (rank == low)) for low, high in pairs for sends in (rank == low, rank != low)]
        assert [(op.sends, op.peer) for op in void.posted] == [
            (rank == (low if there else high), high if rank == low else low) for low, high, there in ways
        ]


@pytest.mark.parametrize("variable", [False, True])
def test_what_does_not_fit_the_receivers_buffer_is_refused_where_it_was_made(variable: bool) -> None:
    comm = Messenger(TWO, (2, 1, 3), torch.float32, transport=Void(TWO), variable_seq_lengths=variable)
    message = (Message(Pass(Kind.F, 0, 0), 0, 1),)
    for wrong in (torch.zeros(2, 1, 3, dtype=torch.float64), torch.zeros(2, 3)):
        with pytest.raises(ConfigError, match=r"stage 0 of the model gives .* in pass 0F0, and stages pass on"):
            comm.exchange(message, lambda _, wrong=wrong: wrong)
    longer = torch.zeros(4, 1, 3)
    if variable:
        comm.exchange(message, lambda _: longer)
    else:
        with pytest.raises(ConfigError, match=r"gives \[4, 1, 3\] of float32"):
            comm.exchange(message, lambda _: longer)


def test_a_shape_travels_before_its_tensor_and_both_live_until_they_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Done, "is_completed", lambda self: False)
    comm = Messenger(TWO, (9, 1, 3), torch.float32, transport=(void := Void(TWO)), variable_seq_lengths=True)
    received = comm.exchange((Message(Pass(Kind.F, 0, 7), 0, 1),), lambda _: torch.zeros(4, 1, 3).transpose(0, 2))
    assert received == {}
    shape, tensor = void.posted
    assert shape.tensor.tolist() == [3, 1, 4] == list(tensor.tensor.shape)
    assert tensor.tensor.is_contiguous(), "gloo and NCCL send memory as it lies"
    assert shape.tag == tensor.tag
    assert len(comm.sends) == 2
    comm.finish()
    assert not comm.sends


def test_another_shape_than_that_of_hidden_states_is_that_of_its_pass() -> None:
    shapes = {Kind.S: (5, 2)}
    comm = Messenger(
        Axis(1, 2, (0, 1)), (2, 1, 3), torch.float32, transport=Void(Axis(1, 2, (0, 1))),
        shape_of=lambda made_by: shapes.get(made_by.kind),
    )  # fmt: skip
    given = comm.exchange((Message(Pass(Kind.S, 0, 0), 0, 1), Message(Pass(Kind.F, 0, 0), 0, 1)), torch.zeros)
    assert [tuple(x.tensor.shape) for x in given.values()] == [(5, 2), (2, 1, 3)]


@pytest.mark.parametrize("piece", [None, 3])
def test_a_message_of_any_microbatch_has_a_tag_that_is_an_int32(piece: int | None) -> None:
    """From the 32,768th microbatch on its number was too large, and the message a TypeError of torch's."""
    tags = {_tag(Pass(Kind.F, 5, number, piece)) for number in range(500_000, 500_400)}
    assert len(tags) == 400
    assert max(tags) < 2**31
