"""A stage of the model by itself: what it differentiates, keeps, owes and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel import engine
from megapipe.pipeline_parallel.again import Rewinding
from megapipe.pipeline_parallel.attributes import attribute_of, config_of
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import ScheduleError, build
from megapipe.schedule.passes import Last
from megapipe.tensor_parallel.rng import Stream
from megapipe.tensor_parallel.weight_grad import WeightGrads, current_weight_grads


class Square(nn.Module):
    """x -> w x^2, in the middle of a model; its input is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0))
        self.seen: list[Tensor | None] = []

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.seen.append(x)

    def forward(self) -> Tensor:
        x = self.seen[-1]
        return self.w * (torch.full((2, 1, 1), 5.0) if x is None else x.square())


def stage(module: nn.Module, forward_step: Any = lambda _, model: (model(), None), **given: Any) -> PipelineStage:
    usual = {"holds_loss": False, "loss_divisor": 2, "per_token": False, "collect_non_loss_data": False}
    return PipelineStage(module, forward_step, given.pop("data", None), stream=lambda n: Stream(0, n), **usual | given)


X = torch.tensor([[[2.0]], [[-1.0]]])
GRAD = torch.tensor([[[1.0]], [[10.0]]])


def test_a_backward_is_autograds() -> None:
    """d(w x^2): 2 w x times the gradient for x, the sum of x^2 times it for w."""
    own = stage(module := Square())
    out = own.forward(0, X)
    assert out is not None
    assert not out.requires_grad
    torch.testing.assert_close(out, 3 * X.square())
    torch.testing.assert_close(own.backward(0, GRAD, weights=True), 6 * X * GRAD)
    torch.testing.assert_close(module.w.grad, torch.tensor(4.0 + 10.0))
    own.finish()


def test_an_output_that_does_not_depend_on_the_input_gives_it_zeros() -> None:
    own = stage(Square(), lambda _, model: (model.w * torch.ones(2, 1, 1), None))
    own.forward(0, X)
    torch.testing.assert_close(own.backward(0, GRAD, weights=True), torch.zeros(2, 1, 1))
    frozen = Square()
    frozen.w.requires_grad_(False)
    first = stage(frozen)  # nothing before it is trained, so its output has no graph
    first.forward(0, None)
    assert first.backward(0, GRAD, weights=True) is None


def test_an_evaluation_keeps_nothing_and_takes_no_gradient() -> None:
    own = stage(module := Square())
    with torch.no_grad():
        own.forward(0, X)
    assert module.seen[-1] is not None
    assert not module.seen[-1].requires_grad
    own.finish()


def test_a_step_that_leaves_a_microbatch_half_done_is_a_mistake_of_ours() -> None:
    own = stage(Square())
    own.forward(3, X)
    with pytest.raises(AssertionError, match=r"microbatches without backward: \[3\]"):
        own.finish()
    own.backward(3, GRAD, weights=False)
    with pytest.raises(AssertionError, match=r"microbatches without weight pass: \(3,\)"):
        own.finish()
    inner = stage(Square())
    inner.forward(1, X)
    with pytest.raises(AssertionError, match="no gradient for microbatch 1"):
        inner.backward(1, None, weights=True)


def test_forwards_that_come_again_begin_with_the_first_microbatch() -> None:
    data = Rewinding(lambda i: torch.tensor(float(i)), [4, 6, 5])
    own = stage(Square(), lambda batches, model: (model() + next(batches), None), data=data)
    first = [own.forward(n, X) for n in (4, 6)]
    own.forget()
    again = [own.forward(n, X) for n in (4, 6)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    own.forget()
    own.finish()
    assert all(own.forward(n, X) is not None for n in (4, 6))
    assert next(data) == 5
    with pytest.raises(StopIteration):
        next(data)
    for n in (4, 6):
        own.backward(n, GRAD, weights=True)
    own.finish()
    stage(Square()).forget()  # without data to read again


def test_layers_find_where_their_weight_gradients_wait() -> None:
    """Without it a B would do the work of its W, and no bit would tell."""

    class Asking(Square):
        def forward(self) -> Tensor:
            owners.append(current_weight_grads())
            return super().forward()

    owners: list[WeightGrads | None] = []
    one, other = stage(Asking()), stage(Asking())
    for own in (one, other, one):
        own.forward(0, X)
    assert owners == [one.weight_grads, other.weight_grads, one.weight_grads]
    assert current_weight_grads() is None


def test_what_a_model_wraps_is_found_through_every_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    inner = Square()
    inner.config = SimpleNamespace(hidden_size=1)
    assert attribute_of(Wrapper(Wrapper(inner)), "seen") is inner.seen
    assert config_of(Wrapper(inner)) is inner.config
    outer = Wrapper(inner)
    outer.config = SimpleNamespace(hidden_size=2)
    assert config_of(outer) is outer.config
    with pytest.raises(AttributeError):
        attribute_of(Wrapper(inner), "absent")


def test_the_last_stage_divides_its_loss_by_microbatches_and_tokens_and_reports_it_whole() -> None:
    """The mean of two microbatches, of 4 tokens each, times the scale of fp16."""

    def train(**given: Any) -> tuple[PipelineStage, Tensor]:
        own = stage(
            module := Square(),
            lambda _, model: (model(), lambda out: (out.sum(), 4, {"sum": out.sum().detach()})),
            holds_loss=True,
            loss_scale=lambda: 8.0,
            **given,
        )
        assert own.forward(0, X) is None
        own.backward(0, None, weights=True)
        return own, module.w.grad

    own, grad = train()
    torch.testing.assert_close(grad, torch.tensor(5.0 * 8 / 2 / 4))
    assert own.losses[0].reported == {"sum": 15.0}
    assert not own.losses[0].value.requires_grad
    torch.testing.assert_close(train(per_token=True)[1], torch.tensor(5.0 * 8))


def test_other_data_than_a_loss_is_collected_as_it_is() -> None:
    def loss_func(out: Tensor, non_loss_data: bool = False) -> Any:
        assert non_loss_data
        return {"largest": out.max().item()}

    given = {"holds_loss": True, "collect_non_loss_data": True}
    own = stage(Square(), lambda _, model: (model(), loss_func), **given)
    with torch.no_grad():
        assert own.forward(1, X) is None
    assert own.results == {1: {"largest": 12.0}}
    assert own.losses == {}


def test_a_last_stage_without_a_loss_is_told_what_to_return() -> None:
    with pytest.raises(ConfigError) as caught:
        stage(Square(), holds_loss=True).forward(0, X)
    assert str(caught.value) == "forward_step must return (output, loss_func) on the stage with the loss, got None."


class Told(nn.Module):
    """One stage with all; of the engine's `Request` it writes down the randomness of each microbatch."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.config = SimpleNamespace(hidden_size=1, sequence_parallel=False, **config)

    def set_input_tensor(self, x: Tensor | None) -> None:
        assert x is None

    def forward(self) -> Tensor:
        return self.w * torch.ones(1, 1, 1)


@pytest.mark.parametrize(
    ("config", "kept"), [({}, []), ({"num_microbatches_with_partial_activation_checkpoints": 1}, [0, 1, 2])]
)
def test_microbatches_are_computed_again_but_those_that_the_config_keeps(
    config: dict[str, int], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1F1B on one rank has one microbatch in flight at a time: each is the first of its window."""
    seen: list[Stream] = []
    monkeypatch.setattr(Stream, "activate", lambda self: seen.append(self))
    asked: list[PipelineStage] = []
    monkeypatch.setattr(PipelineStage, "finish", lambda self: asked.append(self))
    reported = get_forward_backward_func(mesh=ProcessMesh.single(), schedule="1f1b")(
        forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {"n": len(seen)})),
        data_iterator=None,
        model=Told(**config),
        num_microbatches=3,
        seq_length=1,
        micro_batch_size=1,
    )
    assert [one["n"] for one in reported] == [1, 2, 3]
    assert len(asked) == 1, "a step ends by asking its stages whether anything is left"
    assert [one.sample for one in seen] == [0, 1, 2]
    assert [n for n, one in enumerate(seen) if not one.recomputes] == kept


class Layers(Told):
    """It may be cut between its layers, of which it has none."""

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = torch.ones(1, 1, 1) if x is None else x

    def forward(self) -> Tensor:
        return self.w * self.x

    def between_layers(self, cut: Any) -> AbstractContextManager[None]:
        return nullcontext()


class Three(Layers):
    """x -> a b c x, cut before each layer."""

    cut: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.full((1,), float(n)) for n in (2, 3, 5))

    def forward(self) -> Tensor:
        x = self.x
        for weight in self.layers:
            x = (self.cut(x) if self.cut else x) * weight
        return x

    @contextmanager
    def between_layers(self, cut: Any) -> Iterator[None]:
        self.cut = cut
        yield
        self.cut = None


@pytest.mark.parametrize("last", [Last(0, 1), Last(1, 0), None])
def test_layers_report_when_their_gradients_have_the_last_microbatch_from_the_last_layer_on(last: Last | None) -> None:
    seen: list[Any] = []
    own = stage(module := Three(), last=last, on_layer_done=lambda layer, layers: seen.append((layer, layers)))
    for n in (0, 1):
        own.forward(n, X)
    for n in (0, 1):
        own.backward(n, GRAD, weights=True)
        seen.append(f"backward {n}")
    whole = [(2, 3), (1, 3), (0, 3)]
    expected = [x for n in (0, 1) for x in (*(whole if last and last.weights == n else ()), f"backward {n}")]
    assert seen == expected
    torch.testing.assert_close(module.layers[2].grad, torch.full((1,), 2 * 6 * float((X * GRAD).sum())))
    with torch.no_grad():
        own.forward(1, X)
        own.forward(0, X)


def test_links_are_opened_before_the_first_step_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(engine.Messenger, "open_links", lambda self, placement: opened.append(placement.num_stages))
    run = get_forward_backward_func(mesh=ProcessMesh.single(), schedule="1f1b", config=SimpleNamespace(hidden_size=1))
    for microbatches in (2, 2, 4):
        run(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            data_iterator=None,
            model=Layers(),
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
        )
    assert opened == [1]


def test_microbatches_of_several_lengths_are_refused_only_where_the_vocabulary_is_shared() -> None:
    config = SimpleNamespace(hidden_size=1, variable_seq_lengths=True)

    def body(mesh: ProcessMesh) -> int:
        reported = get_forward_backward_func(mesh=mesh, schedule="1f1b", config=config)(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            data_iterator=None,
            model=Layers(),
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
        )
        return len(reported)

    assert run_threads(body, pp=2) == [0, 2]


def test_an_engine_that_is_told_no_more_trains_with_seed_0(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Stream] = []
    monkeypatch.setattr(Stream, "activate", lambda self: seen.append(self))
    model = Layers()
    engine.ForwardBackward(ProcessMesh.single(), "1f1b", config=SimpleNamespace(hidden_size=1))(
        forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
        data_iterator=None,
        model=model,
        num_microbatches=2,
        seq_length=1,
        micro_batch_size=1,
    )
    assert [(one.seed, one.sample) for one in seen] == [(0, 0), (0, 1)]
    assert model.w.grad.item() == 1, "the mean of two losses, unscaled"


@pytest.mark.parametrize(("per_token", "weight"), [(False, 6 / 2), (True, 6 * 7)])
def test_a_layers_own_loss_of_seven_tokens_weighs_as_they_do(
    per_token: bool, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Stream] = []
    monkeypatch.setattr(Stream, "activate", lambda self: seen.append(self))
    engine.ForwardBackward(ProcessMesh.single(), "1f1b", config=SimpleNamespace(hidden_size=1))(
        forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), torch.tensor(7), {})),
        data_iterator=None,
        model=Layers(),
        num_microbatches=2,
        seq_length=1,
        micro_batch_size=1,
        calculate_per_token_loss=per_token,
        loss_scale=lambda: 6.0,
    )
    assert [one.weigh(7) for one in seen] == [weight] * 2


def test_an_engine_that_is_told_no_more_sends_no_shapes() -> None:
    def body(mesh: ProcessMesh) -> object:
        run = engine.ForwardBackward(mesh, "1f1b", config=SimpleNamespace(hidden_size=1))
        return run(
            forward_step_func=lambda _, model: (model().expand(5, 1, 1), lambda out: (out.sum(), {})),
            data_iterator=None,
            model=Layers(),
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
        )

    with pytest.raises(ConfigError, match=r"gives \[5, 1, 1\] .* and stages pass on \[s, b, h\] = \[1, 1, 1\]"):
        run_threads(body, pp=2)


def test_a_table_of_ones_own_is_verified_before_its_first_step() -> None:
    table = build("1f1b", 1, 2)
    wrong = replace(table, name="mine", ranks=(table.ranks[0][:-1],))
    with pytest.raises(ScheduleError, match=r"mine is not valid:\n  rank 0: 0BW1 is missing"):
        get_forward_backward_func(mesh=ProcessMesh.single(), schedule=wrong, config=SimpleNamespace(hidden_size=1))(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            data_iterator=None,
            model=Layers(),
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
        )


def test_a_config_that_says_nothing_of_sequence_parallel_has_whole_sequences() -> None:
    def body(mesh: ProcessMesh) -> int:
        reported = get_forward_backward_func(mesh=mesh, schedule="1f1b", config=SimpleNamespace(hidden_size=1))(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {"n": len(out)})),
            data_iterator=None,
            model=Layers(),
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
        )
        return len(reported)

    assert run_threads(body, pp=2, tp=2) == [0, 0, 2, 2]


@pytest.mark.parametrize(("tp", "paired"), [(1, False), (2, True)])
def test_pairs_stay_pairs_where_passes_have_something_to_hide(tp: int, paired: bool) -> None:
    def body(mesh: ProcessMesh) -> bool:
        watch, run = (
            Stopwatch(mesh.device),
            engine.ForwardBackward(mesh, "dualpipe", config=SimpleNamespace(hidden_size=1)),
        )
        run(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            data_iterator=[None] * 2,
            model=[Layers(), Layers()],
            num_microbatches=4,
            seq_length=1,
            micro_batch_size=1,
            stopwatch=watch,
        )
        return any(number == 2 for *_, number in watch.passes)

    assert run_threads(body, pp=2, tp=tp) == [paired] * 2 * tp
