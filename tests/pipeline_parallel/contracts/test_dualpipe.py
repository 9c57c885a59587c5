"""DeepSeek's DualPipe and DualPipeV by their names: losses, outputs and gradients of the unsplit model, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.process_groups import group_of
from megapipe.errors import ConfigError, ScheduleError
from megapipe.pipeline_parallel.contracts.deepseek import DeferredWeightGrads, PairedStage
from megapipe.pipeline_parallel.contracts.dualpipe import (
    DualPipe,
    DualPipeV,
    WeightGradStore,
    set_p2p_tensor_dtype,
    set_p2p_tensor_shapes,
)
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.weight_grad import WeightGrads

WIDTH, ROWS, CHUNKS = 5, 3, 8
deferred: list[int] = []


class Product(torch.autograd.Function):
    """x W, whose weight gradient waits as DeepSeek's example has it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors

        def add() -> None:
            product = x.flatten(0, -2).T @ grad.flatten(0, -2)
            weight.grad = product if weight.grad is None else weight.grad + product

        if WeightGradStore.enabled:
            deferred.append(1)
            WeightGradStore.put(add)
        else:
            add()
        return grad @ weight.T, None


class Slice(nn.Module):
    """One block of the model, of one tensor or two."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = x + gelu(Product.apply(x, self.weight))
        return (x, *(y * 2 + x.sum() for y in more)) if more else x

    @classmethod
    def overlapped_forward_backward(cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, grads1):
        outputs0 = module0(*inputs0)
        outputs0 = [outputs0] if isinstance(outputs0, Tensor) else list(outputs0)
        if loss1 is None:
            torch.autograd.backward(outputs1, grads1)
        else:
            assert (outputs1, grads1) == ([], [])
            loss1.backward()
        return outputs0, None if criterion0 is None else criterion0(*outputs0, *labels0)


def criterion(*given: Tensor) -> Tensor:
    *outputs, label = given
    return sum(mse_loss(x, label) if x.shape == label.shape else x.square().sum() for x in outputs)


def data(batch_dim: int, second: bool) -> tuple[list[Tensor], Tensor]:
    """Inputs and label of a whole batch, [ROWS x CHUNKS, 2, WIDTH] or with the first two dimensions changed."""
    draw = torch.Generator().manual_seed(0)
    x, label = torch.randn(2, ROWS * CHUNKS, 2, WIDTH, generator=draw, dtype=torch.float64).transpose(1, batch_dim + 1)
    other = [torch.randn(ROWS * CHUNKS, 2, generator=draw, dtype=torch.float64).transpose(0, batch_dim)]
    return [x, *(other if second else [])], label


def whole(slices: int, inputs: list[Tensor], label: Tensor, chunks: int, batch_dim: int):
    """Losses, outputs and gradients of one process, microbatch by microbatch."""
    model = [Slice(n) for n in range(slices)]
    losses, outputs = [], []
    for parts in zip(*(x.chunk(chunks, batch_dim) for x in (*inputs, label)), strict=True):
        *given, target = parts
        for module in model:
            made = module(*given)
            given = [x.contiguous() for x in ([made] if isinstance(made, Tensor) else made)]  # as messages are
        losses.append(criterion(*given, target))
        losses[-1].backward()
        outputs.append(given)
    joined = [torch.cat(part, batch_dim).detach() for part in zip(*outputs, strict=True)]
    return torch.stack(losses).detach(), joined, [module.weight.grad for module in model]


def same(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run(mesh: ProcessMesh, kind, *, batch_dim=0, second=False, mapping=None):
    """Of one rank: what a training step and an inference return, and the gradients of its two slices."""
    p = mesh.pp.size
    shapes = [(ROWS, 2, WIDTH), (ROWS, 2)][: 1 + second]
    set_p2p_tensor_shapes([(shape[1], shape[0], *shape[2:]) if batch_dim else shape for shape in shapes])
    set_p2p_tensor_dtype(torch.float64)
    rank = mesh.pp.rank if mapping is None else mapping[mesh.pp.rank]
    far = (p if kind is DualPipe else 2 * p) - 1 - rank
    pipe = kind([Slice(rank), Slice(far)], batch_dim, group_of(mesh, mesh.pp), mapping)
    inputs, label = data(batch_dim, second)
    if kind is DualPipe:  # the last rank's labels are those of the first rank's inputs
        halves = [[x.chunk(2, batch_dim)[n] for x in (*inputs, label)] for n in (0, 1)]
        mine = {0: (halves[0][:-1], halves[1][-1]), p - 1: (halves[1][:-1], halves[0][-1])}.get(rank)
    else:
        mine = (inputs, label) if rank == 0 else None
    inputs, label = mine or ([None] * len(inputs), None)
    trained = pipe.step(*inputs, num_chunks=CHUNKS, criterion=criterion, labels=(label,))
    grads = [module.weight.grad for module in pipe.module]
    pipe.zero_grad()
    with torch.no_grad():
        inferred = pipe.step(*inputs, num_chunks=CHUNKS, criterion=criterion, labels=(label,), return_outputs=True)
        outputs = pipe.step(*inputs, num_chunks=CHUNKS, return_outputs=True)
    assert all(param.grad is None for param in pipe.parameters())
    return rank, trained, inferred, outputs, grads


CASES = [{}, {"batch_dim": 1}, {"second": True}, {"mapping": [1, 0]}, {"mapping": [2, 0, 3, 1]}]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", [DualPipe, DualPipeV])
def test_a_step_has_the_unsplit_models_losses_outputs_and_gradients(kind, case):
    p, batch_dim = len(case.get("mapping", "12")), case.get("batch_dim", 0)
    deferred.clear()
    ranks = run_threads(lambda mesh: run(mesh, kind, **case), pp=p)
    assert deferred, "no weight gradient waited for a W pass"
    inputs, label = data(batch_dim, case.get("second", False))
    if kind is DualPipe:
        parts = [[x.chunk(2, batch_dim)[n] for x in (*inputs, label)] for n in (0, 1)]
        known = [whole(p, part[:-1], part[-1], CHUNKS // 2, batch_dim) for part in parts]
        ends = {p - 1: known[0], 0: known[1]}
        expected = {r: [known[0][2][r], known[1][2][p - 1 - r]] for r in range(p)}
    else:
        ends = {0: whole(2 * p, inputs, label, CHUNKS, batch_dim)}
        expected = {r: [ends[0][2][r], ends[0][2][2 * p - 1 - r]] for r in range(p)}
    for rank, (loss, nothing), (again, made), (no_loss, made_too), grads in ranks:
        losses, outputs = ends.get(rank, (None, None, None))[:2]
        assert nothing is no_loss is None
        if losses is None:
            assert loss is again is made is made_too is None
        else:
            same([loss, again], [losses, losses])
            for found in (made, made_too):
                same([found] if isinstance(found, Tensor) else list(found), outputs)
        same(grads, expected[rank])


def test_a_v_of_one_rank_is_the_whole_model():
    [(_, (loss, _), _, (outputs, *_), grads)] = run_threads(lambda mesh: run(mesh, DualPipeV), pp=1)
    losses, _, expected = whole(2, *data(0, False), CHUNKS, 0)
    same([loss, grads], [losses, expected])
    assert outputs is None


def test_pairs_run_as_one_only_where_both_modules_are_of_one_class(monkeypatch):
    class Other(Slice):
        pass

    calls = []
    pair = Slice.overlapped_forward_backward
    monkeypatch.setattr(Slice, "overlapped_forward_backward", lambda *given: calls.append(1) or pair(*given))

    def body(mesh: ProcessMesh, classes) -> None:
        set_p2p_tensor_shapes([(ROWS, 2, WIDTH)])
        set_p2p_tensor_dtype(torch.float64)
        modules = [kind(n) for n, kind in enumerate(classes)]
        (x,), label = data(0, False)
        DualPipeV(modules, process_group=mesh.pp.group).step(x, num_chunks=CHUNKS, criterion=criterion, labels=label)

    run_threads(lambda mesh: body(mesh, (Slice, Other)), pp=2)
    assert not calls
    run_threads(lambda mesh: body(mesh, (Slice, Slice)), pp=2)
    assert calls


def refusal(kind, *, modules=2, mapping=None, shapes=True, chunks=CHUNKS, loss=criterion, ranks=2):
    def body(mesh: ProcessMesh) -> None:
        if shapes:
            set_p2p_tensor_shapes([(ROWS, 2, WIDTH)])
            set_p2p_tensor_dtype(torch.float64)
        pipe = kind([Slice(n) for n in range(modules)], 0, mesh.pp.group, mapping)
        pipe.step(torch.ones(ROWS * CHUNKS, 2, WIDTH), num_chunks=chunks, criterion=loss, labels=(torch.ones(4, 2, 5),))

    with pytest.raises((ConfigError, ScheduleError)) as caught:
        run_threads(body, pp=ranks, timeout_s=5)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"modules": 3}, "DualPipe takes 2 modules of a rank, got 3"),
        ({"mapping": [0, 0]}, "rank_mapping must have each of 0 to 1 once, got [0, 0]"),
        ({"shapes": False}, "call set_p2p_tensor_shapes and set_p2p_tensor_dtype before a step"),
        ({"chunks": 5}, "dualpipe on 2 ranks needs an even number of at least 4 microbatches, got 5"),
        ({"ranks": 3}, "dualpipe needs an even number of ranks, got 3"),
        ({"loss": None}, "DualPipe.step trains by a criterion, on each rank with a last stage"),
    ],
)
def test_what_does_not_fit_is_one_sentence(wrong, text):
    assert text in refusal(DualPipe, **wrong)


def test_without_a_group_the_world_must_be_initialised():
    with pytest.raises(ConfigError, match=r"DualPipeV needs torch\.distributed\.init_process_group before it"):
        DualPipeV([Slice(0), Slice(1)])


def test_weight_gradients_wait_only_in_a_backward_whose_w_pass_comes():
    store, owner, done = DeferredWeightGrads(), WeightGrads(), []
    assert not store.enabled
    store.put(lambda: done.append("alone"))
    with store.backward(owner, 0, weights=True):
        assert not store.enabled
    with store.backward(owner, 1, weights=False):
        assert store.enabled
        store.put(lambda: done.append("deferred"))
    assert done == ["alone"]
    owner.run(1)
    assert done == ["alone", "deferred"]


def test_two_forwards_of_one_stage_may_run_together():
    """The second ended in "cannot enter context", as both ran in the context of the stage."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            if x[0] == 0:
                inner.append(stage.forward(1, None))
            return self.weight * x

    inner: list[Tensor | None] = []
    stage = PairedStage(Nested(), [[torch.zeros(2)], [torch.ones(2)]], shapes=[(2,)], is_last=False)
    assert torch.equal(stage.forward(0, None), torch.zeros(2))
    assert torch.equal(inner[0], torch.ones(2))
