"""A step piece by piece: what begins when, what is left alone, and what ranks that began otherwise agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_step import StepInfo, take_step

from megapipe.config import OptimizerConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.optim.census import Census
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.reduction import Reduction
from megapipe.optim.rule import Rates, multiply
from megapipe.optim.ties import Ties
from megapipe.pipeline_parallel.threads import run_threads

from .test_optimizer import sparse
from .unsplit import EMBEDDING, HEAD, MODEL, TRAIN, Bag, full, reference, split, stages_of

SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)


def one(flags: OptimizerConfig = SGD, **given: Any) -> tuple[nn.Parameter, Optimizer]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return weight, Optimizer([Bag({"w": weight})], flags, ProcessMesh.single(), **given)


@pytest.mark.parametrize(
    ("clip", "norm", "factor"),
    [(0.5, 2.0, 0.5 / 2.000001), (0.5, 0.4, 1.0), (0.5, 0.0, 1.0), (2.0, 8.0, 2 / 8.000001), (0.0, 2.0, 1.0)],
)
def test_gradients_are_clipped_as_torch_does(clip: float, norm: float, factor: float) -> None:
    weight, optimizer = one(OptimizerConfig(clip_grad=clip))
    assert optimizer.shrink(norm) == pytest.approx(factor, rel=1e-12)
    weight.main_grad.copy_(torch.tensor([norm, 0, 0, 0]))
    left = optimizer.update(optimizer.reduce(1.0), Rates(0.0), optimizer.shrink(norm))  # in whose sweep it is done
    assert weight.main_grad.tolist() == pytest.approx([norm * factor, 0, 0, 0])
    assert left.scale == 1.0


def test_a_step_takes_the_gradient_as_it_is_and_says_its_norm() -> None:
    weight, optimizer = one()
    weight.main_grad.copy_(torch.tensor([3.0, 0.0, 0.0, 4.0]))
    assert take_step(optimizer, 0.5) == StepInfo(5.0, skipped=False, num_zeros=None)
    assert weight.tolist() == [-0.5, 2, 3, 2]
    assert optimizer.steps == 1
    assert take_step(optimizer, 0.5, count_zeros=True).num_zeros == 2
    assert optimizer.reduce().norm() == 5.0
    assert optimizer.reduce(torch.tensor(2.0)).norm() == 10.0
    assert optimizer.reduce(2.0).norm() == 10.0, "the one before scaled nothing"
    optimizer.zero_grad()
    assert weight.main_grad.tolist() == [0, 0, 0, 0]
    bad = take_step(optimizer, 0.5, grad_scale=float("nan"))
    assert bad.skipped
    assert optimizer.steps == 2


class Descent:
    """weight -= lr gradient, which says that it scales by itself."""

    elementwise, state, sweeps = False, (), True

    def update(self, parts: Any, steps: int) -> None:
        for part in parts:
            multiply(part.grad, part.factors)
            part.value.sub_(part.grad, alpha=part.lr)
            part.round_value()


def test_a_rule_that_sweeps_whole_parameters_has_its_gradients_scaled_and_weights_rounded() -> None:
    """It was given neither factors nor the weights of 16 bits, and the optimizer did nothing in its place."""
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = Optimizer([Bag({"w": weight})], SGD, ProcessMesh.single())
    optimizer.rule, optimizer.moments = Descent(), {}
    weight.main_grad.fill_(8.0)
    take_step(optimizer, 0.5, grad_scale=0.125)
    assert weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_model_of_which_nothing_is_trained_is_refused_unless_that_is_meant() -> None:
    frozen = Bag({"w": nn.Parameter(torch.ones(2), requires_grad=False)})
    with pytest.raises(ConfigError, match="--freeze-all-layers"):
        Optimizer([frozen], SGD, ProcessMesh.single())
    optimizer = Optimizer([frozen], OptimizerConfig(freeze_all_layers=True), ProcessMesh.single())
    assert optimizer.params_norm() == pytest.approx(2**0.5)


def test_frozen_experts_of_all_ranks_count_in_the_norm_and_a_dense_weight_once() -> None:

    def body(mesh: ProcessMesh) -> float:
        dense = set_layout(nn.Parameter(torch.ones(2), requires_grad=False), Layout((2,), None))
        expert = nn.Parameter(torch.full((1, 2), 2.0 + mesh.ep.rank), requires_grad=False)
        set_layout(expert, Layout((2, 2), 0, experts=True))
        stage = Bag({"dense": dense, "experts": expert})
        return Optimizer([stage], OptimizerConfig(freeze_all_layers=True), mesh).params_norm()

    norms = run_threads(body, dp=2, ep=2)
    assert norms == pytest.approx([(2 * 1 + 2 * 4 + 2 * 9) ** 0.5] * 2)


def test_ends_that_begin_otherwise_train_the_owners_weight() -> None:
    """The main parameters were made before the weight arrived: a step would have brought the other back."""

    def body(mesh: ProcessMesh) -> tuple[Tensor, Tensor]:
        (stage,) = stages_of(mesh, torch.bfloat16)
        if mesh.pp.rank == 1:
            stage._parameters[HEAD].data.fill_(7)
        optimizer = Optimizer([stage], SGD, mesh)
        weight = stage._parameters[EMBEDDING if mesh.pp.rank == 0 else HEAD]
        before = weight.detach().clone()
        take_step(optimizer, 0.5)
        return before, weight.detach()

    (want, first), (got, last) = run_threads(body, pp=2)
    assert all(torch.equal(x, want) for x in (first, got, last))


def test_replicas_that_begin_otherwise_take_the_owners_weights() -> None:
    """DualPipe's: what is of the first chain on a rank is the owner."""

    def body(mesh: ProcessMesh) -> dict[str, Tensor]:
        names = ["a", "b"] if mesh.pp.rank == 0 else ["b", "a"]
        value = 1.0 + mesh.pp.rank
        stages = [Bag({name: nn.Parameter(torch.full((3,), value))}) for name in names]
        optimizer = Optimizer(stages, SGD, mesh)
        take_step(optimizer, 0.5)
        return {name: p.detach() for name, p in optimizer.params.items()}

    for found in run_threads(body, pp=2):
        assert {name: x.tolist() for name, x in found.items()} == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_of_weights_that_two_ranks_update_together_each_sends_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """DualPipe's replicas under ZeRO-1: what the other data-parallel rank has updated comes with its own."""
    sent: list[int] = []
    real = Axis.broadcast
    monkeypatch.setattr(Axis, "broadcast", lambda self, x, source: sent.append(x.numel()) or real(self, x, source))

    def body(mesh: ProcessMesh) -> int:
        names = ["a", "b"] if mesh.pp.rank == 0 else ["b", "a"]
        stages = [Bag({name: nn.Parameter(torch.ones(4096))}) for name in names]
        optimizer = Optimizer(stages, SGD, mesh, distributed=True)
        mesh.world.barrier()
        sent.clear()
        mesh.world.barrier()
        take_step(optimizer, 0.5)
        return sum(b.model.numel() for b in optimizer.buffers)

    weights = run_threads(body, pp=2, dp=2)
    assert sum(sent) == sum(weights) / 2


def test_a_tie_across_whose_ends_have_other_shares_takes_torchs_step() -> None:
    """Under ZeRO-1 each end sums all of it over data parallel first: what one end owns, the other has not reduced."""
    want, _ = reference(steps=1, dp=2)

    def body(mesh: ProcessMesh) -> dict[str, Tensor]:
        (stage,) = stages_of(mesh)
        optimizer = Optimizer([stage], TRAIN, mesh, distributed=True)
        for name, param in stage.named_parameters():
            param.main_grad.add_(split(full(name, 1, torch.float64), name, mesh.tp) * (mesh.dp.rank + 1))
        take_step(optimizer, 1e-2, grad_scale=0.5)
        return {name: p.detach() for name, p in stage.named_parameters()}

    for found in run_threads(body, pp=2, dp=2):
        for name, param in found.items():
            torch.testing.assert_close(param, want[name].view_as(param), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("distributed", [False, True])
def test_zeros_of_shares_are_counted_together_and_of_copies_once(distributed: bool) -> None:
    def body(mesh: ProcessMesh) -> int | None:
        (stage,) = stages_of(mesh)
        optimizer = Optimizer([stage], TRAIN, mesh, distributed=distributed)
        for name, param in stage.named_parameters():
            param.main_grad.add_(split(sparse(name, 1, torch.float64), name, mesh.tp))
        return take_step(optimizer, 0.0, count_zeros=True).num_zeros

    assert run_threads(body, dp=2) == [3 * (len(MODEL) - 1)] * 2


@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_that_travel_as_bf16_are_rounded_to_it(distributed: bool) -> None:
    """1 + 2^-10 is no bfloat16: each rank sends 1, and the sum of two is 2."""

    def body(mesh: ProcessMesh, reduced: bool) -> float:
        weight = nn.Parameter(torch.zeros(64))
        flags = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
        optimizer = Optimizer([Bag({"w": weight})], flags, mesh, distributed=distributed, reduces_in_bf16=reduced)
        weight.main_grad.fill_(1 + 2**-10)
        take_step(optimizer, 1.0)
        return -weight[0].item()

    for reduced, total in ((False, 2 + 2**-9), (True, 2.0)):
        assert run_threads(lambda mesh: body(mesh, reduced), dp=2) == [total] * 2  # noqa: B023


def test_weights_that_are_gathered_later_are_old_until_then() -> None:
    def body(mesh: ProcessMesh) -> list[list[float]]:
        weight = nn.Parameter(torch.zeros(4096))
        optimizer = Optimizer([Bag({"w": weight})], SGD, mesh, distributed=True, gathers_later=True)
        seen = []
        for act in (
            lambda: take_step(optimizer, 1.0),
            lambda: optimizer.gathers.start(0)(),
            lambda: optimizer.gathers.start(0)(),
        ):
            weight.main_grad.fill_(1)
            act()
            seen.append([weight[0].item(), weight[-1].item()])
        begun = []
        for b in optimizer.buffers:
            b.start_gather = lambda real=b.start_gather: begun.append(1) or real()
        optimizer.gathers.start(0)()
        assert begun == [], "they are there"
        take_step(optimizer, 1.0)
        optimizer.gathers.settle()
        assert begun == [1]
        return [*seen, [weight[0].item(), weight[-1].item()]]

    first, second = run_threads(body, dp=2)
    assert first == [[-2, 0], [-2, -2], [-2, -2], [-4, -4]], "its own half, then all"
    assert second == [[0, -2], *first[1:]]


def test_a_state_goes_into_another_optimizer_and_back() -> None:
    """What `saved` gives, filled by a load, is taken by `keep`: shares of it under ZeRO-1."""

    def body(mesh: ProcessMesh, distributed: bool) -> tuple[set[str], list[float]]:
        (stage,) = stages_of(mesh, torch.bfloat16)
        optimizer = Optimizer([stage], TRAIN, mesh, distributed=distributed)
        saved = optimizer.saved()
        for shard in saved.shards:
            shard.allocate()
        for n, values in enumerate(saved.state.values(), 1):
            for x in values.values():
                x.fill_(n)
        for shard in saved.shards:
            shard.keep()
        again = optimizer.state()
        return set(again), [x.unique().item() for values in again.values() for x in values.values()]

    for distributed in (False, True):
        for kinds, found in run_threads(lambda mesh: body(mesh, distributed), dp=2):  # noqa: B023
            assert kinds == {"exp_avg", "exp_avg_sq", "master"}
            assert found == [n for n in (1.0, 2.0, 3.0) for _ in range(len(MODEL) - 1)]


NO_TIES = Ties(Census({}, {}), {}, ProcessMesh.single())


class Bucket:
    """Writes down when its sums begin and are waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.shares, self.own = name, log, SimpleNamespace(size=1), ()
        self.replicas = ALONE

    def sum_over_tp(self, tp: Any) -> None:
        self.log.append(f"tp {self.name}")

    def start_reduce(self, dtype: Any) -> Any:
        self.log.append(f"begin {self.name}")
        return lambda: self.log.append(f"end {self.name}")


def begun(log: list[str]) -> list[str]:
    found = [entry.split()[1] for entry in log if entry.startswith("begin")]
    log.clear()
    return found


def test_buckets_begin_when_their_layers_are_done_each_once_and_the_last_with_its_stage() -> None:
    """Six layers in buckets from 4, 2 and 0 on; the second stage has two layers in buckets from 1 and 0 on."""
    log: list[str] = []
    chunks: Any = [[Bucket(name, log) for name in names] for names in (("a4", "a2", "a0"), ("b1", "b0"))]
    ready = [[(4, 6), (2, 6), (0, 6)], [(1, 2), (0, 2)]]
    for _ in range(2):
        reduction = Reduction(chunks, ready, [], NO_TIES)
        for layer, names in ((5, []), (4, ["a4"]), (3, []), (4, []), (2, ["a2"]), (0, [])):
            reduction.start_early(0, layer, 6)
            assert begun(log) == names, layer
        reduction.start_early(1, 0, 3)  # a stage is told of another number of layers than its buckets were made of
        assert begun(log) == []
        reduction.start_early(1, 1, 2)
        assert begun(log) == ["b1"]
        finish = reduction.start(0)
        assert log == ["tp a0", "begin a0"]
        log.clear()
        finish()
        assert log == ["end a4", "end a2", "end a0"]
        log.clear()
        reduction.finish()
        assert log == ["tp b0", "begin b0", "end b1", "end b0"], "the rest, and what has begun is waited for"
        log.clear()


def test_a_later_layer_alone_begins_all_buckets_behind_it() -> None:
    log: list[str] = []
    reduction = Reduction([[Bucket(name, log) for name in "abc"]], [[(4, 6), (2, 6), (0, 6)]], [], NO_TIES)  # type: ignore[list-item]
    reduction.start_early(0, 1, 6)
    assert begun(log) == ["a", "b"]
