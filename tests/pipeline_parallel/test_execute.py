"""What the engine itself promises: pairs, labels, memory, nothing left in hand, errors that say where."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from megapipe.distributed.axis import Axis
from megapipe.distributed.meeting.position import Position
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.engine import SLACK
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.pipeline_parallel.request import Request
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Exchange, Kind, Message, Pass, Schedule, Step, build, forward_only, lower, unpaired
from megapipe.schedule.families.step.optimizer import with_gather, with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction

from .relay import Done, Void


class Stage:
    """Writes down what it is asked for."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        self.log.append(f"{self.number}F{microbatch}")
        return torch.zeros(1)

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        self.log.append(f"{self.number}{'BW' if weights else 'B'}{microbatch}")
        return torch.zeros(1)

    def weight(self, microbatch: int) -> None:
        self.log.append(f"{self.number}W{microbatch}")


class PairStage(Stage):
    def overlapped_forward_backward(
        self,
        microbatch: int,
        x: Tensor | None,
        backward_stage: Stage,
        backward_microbatch: int,
        grad: Tensor | None,
        *,
        weights: bool,
    ) -> tuple[Tensor, Tensor]:
        back = f"{backward_stage.number}{'BW' if weights else 'B'}{backward_microbatch}"
        self.log.append(f"{self.number}F{microbatch}&{back}")
        return torch.zeros(1), torch.zeros(1)


def run(schedule: Schedule, rank: int, kind: type[Stage] = Stage, **options: Any) -> list[str]:
    """The calls that one rank's stages see; messages of others come out of the void."""
    p, log = len(schedule.ranks), []
    axis = Axis(rank, p, tuple(range(p)))
    comm = Messenger(axis, (1,), torch.float32, transport=Void(axis))
    stages = {s: kind(s, log) for s in schedule.placement.stages_on(rank)}
    execute(lower(schedule)[rank], schedule.placement, stages, comm, **options)
    return log


def steps_of(schedule: Schedule, rank: int) -> list[Step]:
    return [tuple(map(str, step)) for step in schedule.ranks[rank]]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_passes_run_in_the_order_of_the_table(name):
    schedule = unpaired(build(name, 4, 8))
    for rank in range(4):
        assert run(schedule, rank) == [p for step in steps_of(schedule, rank) for p in step]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_a_stage_that_can_runs_the_pairs_as_one(name):
    schedule = build(name, 4, 8)
    assert any(len(step) == 2 for step in schedule.ranks[1])
    assert run(schedule, 1, PairStage) == ["&".join(step) for step in steps_of(schedule, 1)]


def test_where_nothing_overlaps_the_f_of_a_pair_leaves_before_b():
    schedule = unpaired(build("dualpipe-v", 4, 8))
    f, b = next(pair for pair in steps_of(build("dualpipe-v", 4, 8), 1) if len(pair) == 2)
    program = [[m.made_by for m in x.messages] if isinstance(x, Exchange) else x[0] for x in lower(schedule)[1]]
    texts = [str(x) if isinstance(x, Pass) else list(map(str, x)) for x in program]
    between = texts[texts.index(f) + 1 : texts.index(b)]
    assert any(f in exchange for exchange in between)
    assert run(schedule, 1) == [p for step in steps_of(build("dualpipe-v", 4, 8), 1) for p in step]


def test_what_is_done_to_a_stage_begins_in_its_place_and_is_waited_for_where_it_is_needed():
    log: list[str] = []

    class Logging(Stage):
        def __init__(self, number: int, _: list[str]) -> None:
            super().__init__(number, log)
            self.weights = Weights(lambda: self.begin("G"), lambda: self.begin("A"))

        def begin(self, kind: str) -> Callable[[], None]:
            log.append(f"{kind}{self.number} begins")
            return lambda: log.append(f"{kind}{self.number} is there")

    schedule = with_gather(with_reduction(build("zb-v", 4, 8)))
    run(schedule, 2, Logging)
    assert log[:3] == ["A2 begins", "A5 begins", "A2 is there"], "a forward waits for its own stage's weights"
    for stage in schedule.placement.stages_on(2):
        first = next(i for i, entry in enumerate(log) if entry.startswith(f"{stage}F"))
        assert log[first - 1] == f"A{stage} is there"
        at = log.index(f"G{stage} begins")
        assert log[at - 1].startswith(f"{stage}W")
        assert not any(entry.startswith(str(stage)) for entry in log[at:])
    assert log[-2:] == ["G5 is there", "G2 is there"], "the end of the program waits for all"


def test_a_step_that_v_takes_back_begins_again_with_nothing_in_hand(monkeypatch):
    """Rank 1 of ZB-H2 has begun three microbatches at V, and the input of the fourth is on its way."""

    class Again(Stage):
        weights = Weights(lambda: lambda: None, lambda: lambda: None, lambda: None, lambda: next(validated))

        def forget(self) -> None:
            self.log.append("forget")

    class Counted(Done):
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    works: list[Counted] = []
    monkeypatch.setattr(Void, "one", lambda self, op: works.append(Counted()) or works[-1])
    schedule = with_optimizer(with_reduction(build("zb-h2", 3, 6)), barrier=False)
    validated = iter([True, True, False])
    watch = Stopwatch(torch.device("cpu"))
    log = run(schedule, 1, Again, watch=watch)
    whole = [x for (x,) in steps_of(build("zb-h2", 3, 6), 1)]
    begun = ["1F0", "1F1", "1F2"]
    assert log == [*begun, "forget", *begun, "forget", *whole]
    assert len(watch.times()) == len(whole) + len("VU"), "only those that count are timed"
    assert [work.waits for work in works] == [1] * len(works), "gloo would wait for a second message"


def test_a_rank_says_where_it_is():
    """What `watch` prints of a rank that hangs; here after each pass, and behind the last."""
    schedule, position = build("1f1b", 2, 2), Position()

    class Telling(Stage):
        def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
            item, since = position.at
            self.log.append(f"{item[0].item} {0 <= time.monotonic() - since < 60}")
            return super().backward(microbatch, grad, weights=weights)

    log = run(schedule, 0, Telling, position=position)
    assert log == ["0F0", "0F1", "0BW0 True", "0BW0", "0BW1 True", "0BW1"]
    assert position.at[0] == "the end of the passes"
    assert (position.hand, len(position.plan)) == ({}, len(lower(schedule)[0]))
    assert isinstance(position.comm, Messenger)


def test_both_passes_of_a_pair_are_timed():
    schedule, watch = build("dualpipe-v", 4, 8), Stopwatch(torch.device("cpu"))
    run(schedule, 1, PairStage, watch=watch)
    assert len(watch.times()) == sum(len(step) for step in schedule.ranks[1])


def test_a_tensor_that_nobody_uses_is_named():
    schedule, rank = build("1f1b", 2, 2), 1
    axis = Axis(rank, 2, (0, 1))
    comm = Messenger(axis, (1,), torch.float32, transport=Void(axis))
    program = tuple(item for item in lower(schedule)[rank] if isinstance(item, Exchange) or item[0].kind is not Kind.F)
    with pytest.raises(AssertionError, match="never used: 0F0, 0F1"):
        execute(program, schedule.placement, {1: Stage(1, [])}, comm)


def test_an_error_says_in_which_pass_of_which_rank():
    class Failing(Stage):
        def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
            raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite") as caught:
        run(build("zb-h1", 4, 4), 2, Failing)
    assert caught.value.__notes__ == ["in pass 2B0 of pipeline rank 2"]


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v"])
def test_every_pass_and_message_is_labelled_while_a_profiler_records(tmp_path, name):
    schedule, rank = build(name, 2, 4), 0
    with profile() as recorded:
        run(schedule, rank, PairStage)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))  # recorded.events() demangles 2F0 to F0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    labels = sorted(event["name"] for event in events if event.get("cat") == "user_annotation")
    messages = [m for item in lower(schedule)[rank] if isinstance(item, Exchange) for m in item.messages]
    expected = [p for step in steps_of(schedule, rank) for p in step]
    expected += [f"send {m.made_by} ->{m.dst}" if m.src == rank else f"recv {m.made_by} <-{m.src}" for m in messages]
    assert labels == sorted(expected)


class Linear(nn.Module):
    """Keeps its input for backward, not its output, of which `alive` counts those that still have memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.storages, self.alive = nn.Linear(4, 4), [], []

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = torch.ones(2, 1, 4) if x is None else x

    def forward(self) -> Tensor:
        self.alive.append(sum(storage() is not None for storage in self.storages))
        out: Tensor = self.layer(self.x)
        self.storages.append(weakref.ref(out.untyped_storage()))
        return out


def test_an_output_is_gone_once_it_is_sent_while_its_graph_stays(monkeypatch):
    """GPipe's rank 0 sends 8 outputs before its first backward; kept, they would all be alive at the last forward."""
    schedule, module = build("gpipe", 2, 8), Linear()
    axis = Axis(0, 2, (0, 1))
    comm = Messenger(axis, (2, 1, 4), torch.float32, transport=Void(axis), sends_in_flight=0)
    asked = Request(
        forward_step_func=lambda _, model: (model(), None),
        data_iterator=None,
        model=module,
        num_microbatches=8,
        seq_length=None,
        micro_batch_size=None,
    )
    stage = PipelineStage(asked, module, None, mesh=ProcessMesh.single())
    monkeypatch.setattr(Void, "one", lambda self, op: Done())  # keeps no operation
    monkeypatch.setattr(torch, "empty", torch.ones)  # what the void delivers: gradients of ones
    execute(lower(schedule)[0], schedule.placement, {0: stage}, comm)
    assert module.alive == [0] * 8
    torch.testing.assert_close(module.layer.bias.grad, torch.full((4,), 16.0))  # 8 microbatches of 2 ones


def test_outputs_that_have_left_are_let_go_though_gloo_does_not_say_so():
    """16 stayed until 16 more had been sent, however long ago the other rank had them (rank 1 here is the faster)."""

    def body(mesh):
        module = Linear()
        module.config = SimpleNamespace(hidden_size=4, sequence_parallel=False)
        if mesh.pp.rank == 0:
            module.register_forward_pre_hook(lambda *_: time.sleep(0.002))
        get_forward_backward_func(mesh=mesh, schedule="gpipe")(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            data_iterator=None,
            model=module,
            num_microbatches=24,
            seq_length=2,
            micro_batch_size=1,
        )
        return module.alive

    first, _ = run_threads(body, pp=2)
    assert max(first) == 1 + SLACK  # GPipe has one message under way


class Slow:
    """Over when told so, as NCCL says it."""

    over = False

    def wait(self):
        assert self.over

    def is_completed(self):
        return self.over


def test_a_send_that_says_it_is_over_is_let_go_at_the_next(monkeypatch):
    axis, works = Axis(0, 2, (0, 1)), []
    monkeypatch.setattr(Void, "one", lambda self, op: works.append(Slow()) or works[-1])
    comm = Messenger(axis, (1,), torch.float32, transport=Void(axis))
    for n in range(6):
        comm.exchange((Message(Pass(Kind.F, 0, n), 0, 1),), lambda _: torch.zeros(1))
        works[n].over = n < 3
    assert [message.made_by.microbatch for message, _ in comm.sends] == [3, 4, 5]


def test_evaluation_runs_the_forwards_of_the_same_table():
    forwards = [p for step in steps_of(build("zb-v", 4, 8), 3) for p in step if "F" in p]
    assert run(forward_only(build("zb-v", 4, 8)), 3) == forwards
