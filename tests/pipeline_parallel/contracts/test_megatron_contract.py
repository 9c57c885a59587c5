"""What Megatron-LM's schedules take and give (megatron/core/pipeline_parallel/schedules.py), asked of ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.process_groups import ProcessGroupCollection, group_of
from megapipe.errors import ConfigError
from megapipe.models.moe.router import Router
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.contracts.p2p import P2PCommunicator, axis_of
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.rng import initialize

HIDDEN = {"hidden_size": 4, "sequence_parallel": False}


class Part(nn.Module):
    def __init__(self, log: list[tuple[int, int]] | None = None, chunk: int = 0) -> None:
        super().__init__()
        self.layer, self.log, self.chunk, self.calls = nn.Linear(4, 4), log, chunk, 0

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = x

    def forward(self, length: int = 2) -> Tensor:
        if self.log is not None:
            self.log.append((self.chunk, self.calls))
            self.calls += 1
        x = torch.ones(length, 1, 4) if self.x is None else self.x
        return self.layer(x.to(self.layer.weight.dtype)).float()


def summed(out: Tensor):
    return out.sum(), {"sum": out.sum().item()}


def step(
    model=None, *, loss=summed, config=None, num_microbatches=4, seq_length=2, micro_batch_size=1, run=None, **more
):
    run = run or get_forward_backward_func(config=SimpleNamespace(**(HIDDEN if config is None else config)))
    forward = more.pop("forward", lambda data, model: (model(), loss))
    return run(
        forward_step_func=forward,
        data_iterator=more.pop("data", None),
        model=Part() if model is None else model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        **more,
    )


def alone(**more):
    return run_threads(lambda mesh: step(**more))[0]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_one_pipeline_rank_reads_no_size_of_messages(training):
    assert len(alone(config={}, seq_length=None, micro_batch_size=None, forward_only=not training)) == 4


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"seq_length": None}, "seq_length is"),
        ({"seq_length": None, "config": {}}, "seq_length and config.hidden_size are"),
        ({"micro_batch_size": None}, "micro_batch_size is"),
    ],
)
def test_several_pipeline_ranks_name_the_missing_sizes(given, missing):
    with pytest.raises(ConfigError, match=rf"config\.hidden_size\], and {missing} None or absent\. Give a number"):
        run_threads(lambda mesh: step(**given), pp=2)


@pytest.mark.parametrize("data", [range(100), (1, 2, 3), "abc", iter([1])], ids=lambda data: type(data).__name__)
def test_only_a_list_is_one_iterator_per_chunk(data):
    seen = []
    alone(data=data, forward=lambda it, model: seen.append(it) or (model(), summed))
    alone(data=[data], forward=lambda it, model: seen.append(it) or (model(), summed))
    assert all(it is data for it in seen)
    assert len(seen) == 8


def test_pipeline_dtype_says_the_type_of_messages_between_parameters_of_several():
    def body(mesh: ProcessMesh):
        model = Part().to(torch.float64 if mesh.pp.rank else torch.bfloat16)
        model.norm = nn.LayerNorm(4)
        return step(model, config=HIDDEN | {"pipeline_dtype": torch.float32})

    assert [len(losses) for losses in run_threads(body, pp=2)] == [0, 4]


def test_one_pipeline_rank_takes_parameters_of_several_types():
    model = Part()
    model.norm = nn.LayerNorm(4).double()
    assert len(alone(model=model)) == 4


@pytest.mark.parametrize("number", [3, 2.5])
def test_an_evaluations_loss_may_be_a_number(number):
    assert alone(loss=lambda out: (number, {"n": number}), forward_only=True) == [{"n": number}] * 4
    with pytest.raises(ConfigError, match="must be one floating-point number in a tensor"):
        alone(loss=lambda out: (number, {"n": number}))


def test_an_evaluation_without_loss_func_gives_the_outputs():
    first, last = run_threads(lambda mesh: step(loss=None, forward_only=True), pp=2)
    assert first == []
    assert [tuple(out.shape) for out in last] == [(2, 1, 4)] * 4
    with pytest.raises(ConfigError, match="must return \\(output, loss_func\\) on the stage with the loss, got None"):
        alone(loss=None)


def test_finalize_model_grads_func_is_given_groups():
    def body(mesh: ProcessMesh):
        given = []
        finalize = lambda model, tokens, pg_collection, force_all_reduce: given.append(pg_collection)  # noqa: E731
        step(config=HIDDEN | {"finalize_model_grads_func": finalize})
        mine = ProcessGroupCollection.of(mesh)
        p2p = P2PCommunicator(mesh.pp, SimpleNamespace(batch_p2p_comm=False))
        more = {"p2p_communicator": p2p, "pg_collection": mine}
        step(config=HIDDEN | {"finalize_model_grads_func": finalize}, **more)
        sizes = [(c.pp.size(), c.tp.size(), c.dp_cp.size(), c.pp.rank(), c.embd is not None) for c in given]
        return sizes, given[0].pos_embd is not None, given[1] is mine

    first, middle, last = run_threads(body, pp=3)
    for rank, (sizes, positions, same) in enumerate((first, middle, last)):
        assert sizes == [(3, 1, 1, rank, rank != 1)] * 2
        assert (positions, same) == (rank == 0, True)


def test_a_collection_has_the_groups_asked_for_and_names_them_as_megatron_does():
    def body(mesh: ProcessMesh):
        mesh.activate()
        use = ProcessGroupCollection.use_mpu_process_groups
        some = use(["tp", "pp"])
        with pytest.raises(ValueError, match="Invalid process groups requested: dpp"):
            use(["dpp"])
        return some.dp, repr(some), use().dp is not None

    assert run_threads(body, pp=2) == [(None, "ProcessGroupCollection(tp(1), pp(2))", True)] * 2
    assert repr(ProcessGroupCollection()) == "ProcessGroupCollection(empty)"


def orders(**config):
    """(chunk, microbatch) of each forward on the first of two ranks."""

    def body(mesh: ProcessMesh):
        log: list[tuple[int, int]] = []
        step([Part(log, chunk) for chunk in (0, 1)], config=HIDDEN | config, num_microbatches=6)
        return log

    return run_threads(body, pp=2)[0]


def test_groups_of_microbatches_pass_a_chunk_as_the_configuration_says():
    """Megatron's get_schedule_table: a group of N microbatches passes a chunk, then the next chunk."""
    for size in (2, 3, 6):
        groups = [range(first, first + size) for first in range(0, 6, size)]
        table = [(chunk, microbatch) for group in groups for chunk in (0, 1) for microbatch in group]
        assert orders(microbatch_group_size_per_vp_stage=size) == table
    assert orders() == orders(microbatch_group_size_per_vp_stage=2)


@pytest.mark.parametrize("schedule", ["zb-v", "breadth-first"])
def test_a_schedule_without_groups_refuses_their_size_by_name(schedule):
    config = SimpleNamespace(microbatch_group_size_per_vp_stage=3, **HIDDEN)
    with pytest.raises(ConfigError, match=rf"per_vp_stage is 3, and the schedule {schedule} has no groups"):
        run_threads(
            lambda mesh: step([Part(), Part()], run=get_forward_backward_func(schedule=schedule, config=config)), pp=2
        )


def test_several_chunks_do_not_read_decoder_seq_length_and_one_does():
    """Megatron's interleaving takes seq_length, its other schedule decoder_seq_length where it is given."""
    run_threads(lambda mesh: step([Part(), Part()], decoder_seq_length=1), pp=2)
    shorter = lambda data, model: (model(1), summed)  # noqa: E731
    run_threads(lambda mesh: step(forward=shorter, decoder_seq_length=1), pp=2)
    with pytest.raises(ConfigError, match=r"\[1, 1, 4\] of float32"):
        run_threads(lambda mesh: step([Part(), Part()], forward=shorter, decoder_seq_length=1), pp=2)


@pytest.mark.parametrize(
    "name", ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
)
def test_a_size_of_1_is_megatrons_default_and_any_other_must_be_the_meshs(name):
    run_threads(lambda mesh: step(config=HIDDEN | {name: 1}), tp=2, pp=2)
    with pytest.raises(ConfigError, match=rf"config\.{name} is 3, and the mesh has"):
        run_threads(lambda mesh: step(config=HIDDEN | {name: 3}), tp=2, pp=2)


def test_one_pipeline_rank_takes_a_collection_alone_or_with_a_communicator():
    def body(mesh: ProcessMesh):
        groups = SimpleNamespace(tp=group_of(mesh, mesh.tp), cp=group_of(mesh, mesh.cp))  # all that Megatron asks for
        whole = SimpleNamespace(pp=group_of(mesh, mesh.pp), **vars(groups))
        return [len(step(pg_collection=each)) for each in (groups, whole)]

    assert run_threads(body, tp=2) == [[4, 4], [4, 4]]


def test_several_pipeline_ranks_take_both_or_neither():
    def body(mesh: ProcessMesh):
        step(pg_collection=ProcessGroupCollection.of(mesh))

    with pytest.raises(ConfigError, match="give both p2p_communicator and pg_collection, or neither"):
        run_threads(body, pp=2)


def test_a_collection_may_leave_the_pipeline_to_the_communicator():
    def body(mesh: ProcessMesh):
        p2p = P2PCommunicator(mesh.pp.group, SimpleNamespace(batch_p2p_comm=False))
        return len(step(p2p_communicator=p2p, pg_collection=SimpleNamespace(tp=group_of(mesh, mesh.tp))))

    assert run_threads(body, pp=2) == [0, 4]


def test_each_step_runs_over_the_groups_that_it_is_given():
    """Megatron's function keeps nothing; ours had gone on over the groups of its first call."""

    def body(mesh: ProcessMesh):
        run, whole = get_forward_backward_func(config=SimpleNamespace(**HIDDEN)), len(step())
        one = SimpleNamespace(tp=group_of(mesh, mesh.tp))
        return whole, len(step(run=run)), len(step(run=run, pg_collection=one)), len(step(run=run))

    assert run_threads(body, pp=2) == [(0, 0, 4, 0), (4, 4, 4, 4)]


def test_a_gloo_groups_tensors_live_on_the_cpu():
    """Gloo's groups say that they take tensors of GPUs too, on machines without any."""
    group = group_of(ProcessMesh.single(), ProcessMesh.single().tp)
    assert {device.type for device in group._device_types} == {"cpu", "cuda"}
    assert axis_of(group).device == CPU


class Scaled(nn.Module):
    """w x for this rank's part x of the tokens."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.weight, self.x = nn.Parameter(torch.ones((), dtype=torch.float64)), x

    def set_input_tensor(self, x: Tensor | None) -> None:
        assert x is None

    def forward(self) -> Tensor:
        return self.weight * self.x


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_averaged_over_context_parallel_ranks_gradients_are_megatrons(ranks, with_tokens):
    """Its forward_step_calc_loss divides a sum by this rank's own tokens, and multiplies a mean by the number of
    ranks; its DistributedDataParallel averages over them. Ours were divided by that number once and twice more.
    """
    tokens = torch.arange(1.0, 9.0, dtype=torch.float64)

    def loss_func(out: Tensor):
        if with_tokens:
            return out.sum(), torch.tensor(out.numel()), {"lm loss": (out.sum().item(), out.numel())}
        return out.mean(), {"lm loss": out.mean().item()}

    def body(mesh):
        model = Scaled(tokens.chunk(ranks)[mesh.cp.rank])
        run = get_forward_backward_func(mesh=mesh, config=SimpleNamespace(**HIDDEN))
        step(model, loss=loss_func, run=run)
        assert model.weight.grad is not None
        return model.weight.grad

    averaged = torch.stack(run_threads(body, cp=ranks)).mean()
    assert averaged == tokens.mean() * (1 if with_tokens else ranks)


def test_losses_of_routers_averaged_over_context_parallel_ranks_are_those_of_one_rank():
    """What a router's loss adds to its weight's gradient was divided by the number of ranks once more."""
    model = ModelConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, num_experts=2, moe_ffn_hidden_size=4, moe_router_topk=1,
        moe_router_pre_softmax=True, moe_aux_loss_coeff=(1.0,), moe_z_loss_coeff=1.0,
    )  # fmt: skip
    x = torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    class Routed(Scaled):
        def __init__(self, x: Tensor) -> None:
            super().__init__(x)
            self.router = Router(model, Axis(), 0).double()
            initialize(self.router, 1, Axis())

        def forward(self) -> Tensor:
            return self.weight * self.router(self.x).weights

    def body(mesh):
        stage = Routed(x.chunk(mesh.cp.size)[mesh.cp.rank])
        run = get_forward_backward_func(mesh=mesh, config=SimpleNamespace(**HIDDEN))
        step(stage, loss=lambda out: (out.sum(), out.numel(), {}), run=run)
        return stage.router.weight.grad

    (whole,) = run_threads(body)
    averaged = torch.stack(run_threads(body, cp=2)).mean(0)
    torch.testing.assert_close(averaged, whole, rtol=1e-12, atol=1e-15)


def test_a_collection_may_hold_axes_as_a_communicator_may():
    """It was an AttributeError: 'Axis' object has no attribute '_device_types'."""

    def body(mesh: ProcessMesh):
        p2p = P2PCommunicator(mesh.pp, SimpleNamespace(batch_p2p_comm=False))
        return len(step(p2p_communicator=p2p, pg_collection=SimpleNamespace(tp=mesh.tp, pp=mesh.pp, cp=mesh.cp)))

    assert run_threads(body, pp=2) == [0, 4]
