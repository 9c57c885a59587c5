"""A step equals torch's AdamW on the unsplit model, and its bits do not depend on the pipeline."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from whole_step import take_step

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.threads import run_threads

from .unsplit import EMBEDDING, HEAD, MODEL, TRAIN, Bag, full, reference, split, stages_of, train


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"pp": 3}, {"tp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}])
def test_a_split_step_is_torchs_adamw_on_the_whole_model(sizes):
    want, norms = reference(dp=sizes.get("dp", 1))
    whole = math.sqrt(sum(float(p.square().sum()) for n, p in want.items() if n != HEAD))

    def body(mesh):
        return mesh, *train(mesh)

    for mesh, params, infos, params_norm in run_threads(body, **sizes):
        for name, param in params.items():
            torch.testing.assert_close(param, split(want[name], name, mesh.tp), rtol=1e-12, atol=1e-14)
        assert [i.grad_norm for i in infos] == pytest.approx(norms, rel=1e-13)
        assert params_norm == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"tp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}])
def test_word_embeddings_and_head_may_have_a_rate_of_their_own(sizes):
    params = {name: nn.Parameter(full(name, 0, torch.float64)) for name in MODEL if name != HEAD}
    groups = [
        {"params": [params[EMBEDDING]], "lr": 5e-2, "weight_decay": 0.1},
        {"params": [p for n, p in params.items() if p.ndim > 1 and n != EMBEDDING], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2)
    scale = sizes.get("dp", 1)
    for name, param in params.items():
        param.grad = full(name, 1, torch.float64) * (0.5 * scale * (scale + 1) / 2)
    params[EMBEDDING].grad += full(HEAD, 1, torch.float64) * (0.5 * scale * (scale + 1) / 2)
    nn.utils.clip_grad_norm_(params.values(), 0.5)
    adam.step()

    def body(mesh):
        (stage,) = stages_of(mesh, torch.float64)
        for name, param in stage.named_parameters():
            param.is_embedding_or_output_parameter = name in (EMBEDDING, HEAD)
        optimizer = Optimizer([stage], TRAIN, mesh, distributed=True)
        for name, param in stage.named_parameters():
            param.main_grad.add_(split(full(name, 1, torch.float64), name, mesh.tp) * (mesh.dp.rank + 1))
        take_step(optimizer, 1e-2, grad_scale=0.5, ends_lr=5e-2)
        return mesh, {n: p.detach() for n, p in stage.named_parameters()}

    for mesh, got in run_threads(body, **sizes):
        for name, param in got.items():
            want = params[EMBEDDING if name == HEAD else name].detach()
            torch.testing.assert_close(param, split(want, name, mesh.tp), rtol=1e-12, atol=1e-14)


def train_mirrored(mesh, dtype=torch.float64, steps=4):
    """`train` with each stage twice, on mirrored ranks, as under DualPipe; each replica has half the gradient."""
    names = [name for name in MODEL if name.startswith("layers")]
    halves = [[EMBEDDING, *names[:12]], [*names[12:], "final.weight", HEAD]]
    stages = []
    for half in halves if mesh.pp.rank == 0 else halves[::-1]:
        layouts = {name: Layout(*MODEL[name], tied_to=EMBEDDING if name == HEAD else None) for name in half}
        stages.append(Bag({n: set_layout(nn.Parameter(full(n, 0, dtype)), layout) for n, layout in layouts.items()}))
    optimizer = Optimizer(stages, TRAIN, mesh)
    infos = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for name, param in optimizer.params.items():
            param.main_grad.add_(full(name, step, torch.float64).view_as(param).to(param.main_grad.dtype) * 0.5)
        infos.append(take_step(optimizer, 1e-2 * step, grad_scale=0.5, count_zeros=True))
    return {n: p.detach() for n, p in optimizer.params.items()}, infos, optimizer


def test_mirrored_replicas_take_torchs_step_and_stay_equal():
    want, norms = reference()
    for params, infos, _ in run_threads(train_mirrored, pp=2):
        assert set(params) == set(MODEL)
        for name, param in params.items():
            torch.testing.assert_close(param, want[name].view_as(param), rtol=1e-12, atol=1e-14)
        assert [i.grad_norm for i in infos] == pytest.approx(norms, rel=1e-13)
        assert infos[0].num_zeros == 0


def test_of_mirrored_replicas_one_has_the_state():
    def body(mesh):
        return train_mirrored(mesh, torch.bfloat16)

    (first, _, lower), (second, _, upper) = run_threads(body, pp=2)
    assert all(torch.equal(first[name], second[name]) for name in MODEL)
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        ours, theirs = lower.state()[kind], upper.state()[kind]
        assert not set(ours) & set(theirs)
        # the tied head is the embedding wherever both are
        assert set(ours) | set(theirs) == set(MODEL) - {HEAD}
    assert lower.owned == [lower.buffers[0]]
    assert lower.buffers[1].main is lower.buffers[1].model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pp", [2, 3])
def test_the_pipeline_does_not_change_a_bit(dtype, pp):
    want, infos, params_norm = train(ProcessMesh.single(), dtype=dtype)
    for got, same_infos, same_norm in run_threads(lambda mesh: train(mesh, dtype=dtype), pp=pp):
        assert all(torch.equal(got[name], want[name]) for name in got)
        assert (same_infos, same_norm) == (infos, params_norm)


def test_a_tied_head_is_the_embedding():
    params, _, _ = train(ProcessMesh.single())
    assert params[HEAD].data_ptr() == params[EMBEDDING].data_ptr()
    first, last = run_threads(train, pp=2)
    assert torch.equal(first[0][EMBEDDING], last[0][HEAD])


def test_a_head_that_starts_otherwise_takes_the_embeddings_weight():
    def body(mesh):
        (stage,) = stages_of(mesh)
        if mesh.pp.rank == 1:
            stage._parameters["final.weight"].data.fill_(7)
            stage._parameters[HEAD].data.fill_(7)
        Optimizer([stage], TRAIN, mesh)
        return dict(stage.named_parameters())

    first, last = run_threads(body, pp=2)
    assert torch.equal(first[EMBEDDING], last[HEAD])
    assert (last["final.weight"] == 7).all()


def sparse(name, step, dtype):
    """Three zeros in each parameter."""
    x = full(name, step, dtype)
    x.view(-1)[:3] = 0
    return x


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}])
def test_zeros_are_counted_once(sizes):
    # The zeros of embedding and head are in the same places, and count as one parameter's.
    for _, infos, _ in run_threads(lambda mesh: train(mesh, steps=1, grad=sparse), **sizes):
        assert infos[0].num_zeros == 3 * (len(MODEL) - 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(bad):
    def grad(name, step, dtype):
        x = full(name, step, dtype)
        if step == 2 and name == "layers.7.fc.bias":
            x[0] = bad
        return x

    want, _, _ = train(ProcessMesh.single(), steps=1)
    for got, infos, _ in run_threads(lambda mesh: train(mesh, steps=2, grad=grad), pp=2):
        assert [i.skipped for i in infos] == [False, True]
        assert not math.isfinite(infos[1].grad_norm)
        assert all(torch.equal(got[name], want[name]) for name in got)


def problems_of(stages, mesh):
    with pytest.raises(ConfigError) as caught:
        Optimizer(stages, TRAIN, mesh)
    return caught.value.problems


@pytest.mark.parametrize("pp", [1, 2])
def test_parameters_of_two_types_are_told_in_one_sentence(pp):
    """It was an assertion about the dtype of a stage."""

    def body(mesh):
        types = [torch.float32, torch.float64][mesh.pp.rank :][: 3 - pp]
        return problems_of([Bag({f"w{t.itemsize}": nn.Parameter(torch.ones(2, dtype=t)) for t in types})], mesh)

    (problems,) = set(run_threads(body, pp=pp))
    assert problems == (
        "the parameters of a model must have one type, and w4 is float32, w8 is float64. "
        "Make them so in the model provider, or give --bf16 or --fp16, which convert all of them",
    )


def test_names_must_be_global():
    def body(mesh):
        return problems_of([Bag({"layers.0.w": nn.Parameter(torch.ones(2))})], mesh)

    text = (
        "parameter layers.0.w exists on pipeline ranks 0 and 1; "
        "a stage must name its layers by their number in the whole model"
    )
    assert run_threads(body, pp=2) == [(text,), (text,)]


def test_a_tie_needs_an_owner_of_the_same_shape():
    def tied(shape, to):
        return set_layout(nn.Parameter(torch.ones(shape)), Layout(shape, tied_to=to))

    bag = Bag({"a": nn.Parameter(torch.ones(2, 3)), "b": tied((2, 3), "nowhere"), "c": tied((3, 3), "a")})
    assert problems_of([bag], ProcessMesh.single()) == (
        "parameter b is tied to nowhere, which no stage owns",
        "parameter c [3, 3] is tied to a [2, 3]: the shapes differ",
    )


def test_a_tie_across_must_join_the_ends_of_the_pipeline():
    def body(mesh):
        w = nn.Parameter(torch.ones(2))
        if mesh.pp.rank == 2:
            set_layout(w, Layout((2,), tied_to="w1"))
        return problems_of([Bag({f"w{mesh.pp.rank}": w})], mesh)

    assert run_threads(body, pp=3)[0] == (
        "parameter w2 on pipeline rank 2 is tied to w1 on rank 1; "
        "they must share a rank or be on the first and the last, 0 and 2",
    )


def test_a_tie_across_ranks_that_the_plan_does_not_know_is_refused():
    """Else the mesh has no group for it, and the two ends would train apart."""

    def body(mesh):
        with pytest.raises(ConfigError) as caught:
            Optimizer(stages_of(mesh), TRAIN, replace(mesh, ends=Axis()))
        return str(caught.value)

    (problem,) = set(run_threads(body, pp=2))
    assert problem == (
        f"parameter {HEAD} is tied to {EMBEDDING} on another pipeline rank, and "
        "--untie-embeddings-and-output-weights says that none is. Leave the flag out, or the tie"
    )
