"""A stage of the model by itself: what it differentiates, keeps, owes and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.again import Rewinding
from megapipe.pipeline_parallel.attributes import attribute_of, config_of
from megapipe.pipeline_parallel.families.family import Setting
from megapipe.pipeline_parallel.families.offload.activations import Activations
from megapipe.pipeline_parallel.families.offload.host import Host, Sizes
from megapipe.pipeline_parallel.families.step.layers import Reporting, stages_of
from megapipe.pipeline_parallel.passes.begin import Ends, Weights
from megapipe.pipeline_parallel.request import Request
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.schedule import build
from megapipe.schedule.passes import Last
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
    """A stage of a step of two microbatches. given: fields of a Request, or of the stage."""
    data, own = given.pop("data", None), {field.name for field in fields(PipelineStage)}
    asked = {name: given.pop(name) for name in given.keys() - own}
    usual = {"num_microbatches": 2, "seq_length": None, "micro_batch_size": None}
    step = Request(forward_step_func=forward_step, data_iterator=data, model=module, **usual | asked)
    return PipelineStage(step, module, data, mesh=ProcessMesh.single(), **given)


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


def test_forwards_that_come_again_hold_the_inputs_of_none() -> None:
    """What a forgotten forward had begun from stayed counted for the rest of the step."""
    module = Square()
    moves = Activations(module, Host(CPU), [Sizes()], 1.0, out=frozenset(), again=frozenset({4, 6}))
    own = stage(module, own={"offload": moves})
    for n in (4, 6):
        own.forward(n, X)
    assert moves.held.bytes == 2 * X.nbytes
    own.forget()
    assert moves.held.bytes == 0


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
            ends=Ends(holds_loss=True),
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
    torch.testing.assert_close(train(calculate_per_token_loss=True)[1], torch.tensor(5.0 * 8))


def test_other_data_than_a_loss_is_collected_as_it_is() -> None:
    def loss_func(out: Tensor, non_loss_data: bool = False) -> Any:
        assert non_loss_data
        return {"largest": out.max().item()}

    given = {"ends": Ends(holds_loss=True), "collect_non_loss_data": True}
    own = stage(Square(), lambda _, model: (model(), loss_func), **given)
    with torch.no_grad():
        assert own.forward(1, X) is None
    assert own.results == {1: {"largest": 12.0}}
    assert own.losses == {}


def test_a_last_stage_without_a_loss_is_told_what_to_return() -> None:
    with pytest.raises(ConfigError) as caught:
        stage(Square(), ends=Ends(holds_loss=True)).forward(0, X)
    assert str(caught.value) == "forward_step must return (output, loss_func) on the stage with the loss, got None."


class Three(nn.Module):
    """x -> a b c x, cut before each layer."""

    cut: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.full((1,), float(n)) for n in (2, 3, 5))

    def set_input_tensor(self, x: Tensor) -> None:
        self.x = x

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


ASKS = Weights(lambda: print, lambda: print, layer_done=lambda layer, layers: None)
ASKS_NOT = Weights(lambda: print, lambda: print)


@pytest.mark.parametrize(
    ("kind", "weights", "forward_only", "reports"),
    [
        (Three, ASKS, False, True),
        (Three, ASKS_NOT, False, False),
        (Square, ASKS, False, False),
        (Three, ASKS, True, False),
    ],
)
def test_layers_report_in_training_if_the_trainer_asks_and_the_module_can(
    kind: type[nn.Module], weights: Weights, forward_only: bool, reports: bool
) -> None:
    module = kind()
    step = stage(module, forward_only=forward_only).request
    setting = Setting(build("1f1b", 1, 2), {0: (module, None)}, replace(step, weights=[weights]), None)
    assert (0 in stages_of(setting)) == reports


@pytest.mark.parametrize("last", [Last(0, 1), Last(1, 0), None])
def test_layers_report_when_their_gradients_have_the_last_microbatch_from_the_last_layer_on(last: Last | None) -> None:
    seen: list[Any] = []
    weights = Weights(lambda: print, lambda: print, layer_done=lambda layer, layers: seen.append((layer, layers)))
    families = {} if last is None else {"step": Reporting(weights.layer_done, last.weights)}
    own = stage(module := Three(), last=last, weights=weights, own=families)
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
