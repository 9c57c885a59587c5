"""CUDA graphs of a stage's passes, on a CPU: what a replay reads is what its graph was captured with.

`captured.Pool` runs the noted operations again and fills with NaN what a graph leaves undefined; how fast a GPU is, its
streams and its allocator are not seen (megapipe gpu-check compares captured and launched passes there).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megapipe.config import BatchConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse
from megapipe.models.layer import TransformerLayer
from megapipe.pipeline_parallel.graphs import slot as slots
from megapipe.pipeline_parallel.graphs.graphed import Graphed, Graphs
from megapipe.plan import make_plan
from megapipe.plan.graphs import graphs_line
from megapipe.schedule import build
from megapipe.schedule.memory.slots import in_flight
from megapipe.tensor_parallel.weight_grad import WeightGrads
from tools.proofs.equivalence import Training, differing_bits, train
from tools.proofs.equivalence_case import table
from tools.proofs.gpu.captured import Pool
from tools.proofs.gpu.graphs import case_of, passes, with_graphs, without

ALONE = replace(case_of("1f1b", 1), layers=(2,), microbatches=4)


def alone(change=lambda training: None, graphs: bool = True, case=ALONE):
    """One process's outcome, and what it was told of graphs."""
    said: list[str] = []

    def ready(training: Training) -> None:
        change(training)
        if graphs:
            training.pipeline.engine.wrap = Graphs(Pool, 1, said.append)

    return [train(ProcessMesh.single(), case, ready)], said


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zb", "dualpipe-v"])
def test_passes_by_graphs_have_the_bits_of_passes_launched_one_by_one(schedule):
    """All schedules on 2 and 4 ranks: python -m tools.proofs.gpu.graphs."""
    case = replace(case_of(schedule, 2), steps=2)
    ranks, replays = with_graphs(case, [])
    assert replays == passes(case)
    assert differing_bits(ranks, without(case)) == []


def test_the_last_microbatch_reports_its_layers_and_is_launched():
    how = {"overlap": True, "buckets": 2, "distributed": True, "recompute": "full", "tied": False}
    case = replace(case_of("zb-h1", 2, steps=2, dp=2, **how), layers=(2, 2))
    ranks, replays = with_graphs(case, [])
    assert replays == 2 * passes(replace(case, microbatches=3))
    assert differing_bits(ranks, without(case)) == []


def test_two_microbatches_in_one_slot_are_seen(monkeypatch):
    class Endless(list):
        def pop(self):
            return self[0]

    begin = Graphed.begin

    def begin_with_one(self, number, pool, *, splits):
        made = begin(self, number, pool, splits=splits)
        self._free = Endless(self._free)
        return made

    monkeypatch.setattr(Graphed, "begin", begin_with_one)
    case = replace(case_of("gpipe", 1), layers=(1,), microbatches=2, steps=2)
    shared, launched = alone(case=case)[0], alone(case=case, graphs=False)[0]
    assert differing_bits(shared, launched)


def test_a_gradient_on_its_way_is_no_buffer_of_a_slot(monkeypatch):
    """The stage before would be sent what the next backward in the slot makes."""
    sent: list[tuple[Tensor, Tensor]] = []
    backward = slots._Replayed.backward

    def noting(ctx, grad):
        made, *rest = backward(ctx, grad)
        if made is not None:
            sent.append((made, ctx.slot.grad_x))
        return made, *rest

    monkeypatch.setattr(slots._Replayed, "backward", staticmethod(noting))
    with_graphs(replace(case_of("1f1b", 2), steps=2), [])
    assert sent
    assert all(a.data_ptr() != b.data_ptr() for a, b in sent)


def test_an_expanded_argument_is_copied_to_a_graph():
    """Position ids of two sequences are. Every run with graphs and two sequences a microbatch failed on GPUs."""
    ids = torch.arange(3).expand(2, 3)
    form, leaves = slots.Form.of(None, ((ids,), {}))
    (buffer,) = [slots._buffer(leaf) for leaf in form.leaves]
    assert buffer.copy_(leaves[0]).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_what_a_loss_reports_is_not_overwritten_by_the_next_microbatch():
    def views(training: Training) -> None:
        step = training.pipeline._forward_step

        def reporting(data, model):
            output, loss_func = step(data, model)
            return output, lambda losses: (*loss_func(losses)[:2], {"lm loss": losses[0, :2]})

        training.pipeline._forward_step = reporting

    assert differing_bits(alone(views)[0], alone(views, graphs=False)[0]) == []


def test_gradients_that_moved_are_captured_again():
    def moving(training: Training) -> None:
        step, buffers = training.step, training.optimizer.owned[0]

        def move_and_step(number):
            if number == 2:
                buffers.grads = buffers.grads.clone()
                for name, param in training.optimizer.params.items():
                    param.main_grad = buffers.view(buffers.grads, name)
            return step(number)

        training.step = move_and_step

    ranks, said = alone(moving)
    assert said == ["CUDA graphs: F and B of 1 microbatch(es) in flight on stage 0"] * 2
    assert differing_bits(ranks, alone(graphs=False)[0]) == []


def test_a_batch_that_grows_captures_what_more_is_in_flight():
    def growing(training: Training) -> None:
        step = training.step

        def grow_and_step(number):
            if number == 2:
                training.case = replace(training.case, microbatches=4)
                training.config = training.case.config
                training.pipeline.take(training.config, table(training.case))
            return step(number)

        training.step = grow_and_step

    case = replace(case_of("gpipe", 1), microbatches=2)
    ranks, said = alone(growing, case=case)
    assert said == [f"CUDA graphs: F and B of {n} microbatch(es) in flight on stage 0" for n in (2, 4)]
    assert differing_bits(ranks, alone(growing, graphs=False, case=case)[0]) == []


@pytest.mark.parametrize(
    ("in_forward", "why"),
    [
        (lambda x: x * x.detach().sum().item(), "aten._local_scalar_dense.default"),
        (lambda x: x * torch.tensor(1.5), "aten.lift_fresh.default"),
        (lambda x: x + x.detach()[x.detach() > 9].sum(), "aten.index.Tensor"),
        (lambda x: torch.dropout(x, 0.5, True), "aten.bernoulli_.float"),
    ],
)
def test_what_a_capture_refuses_runs_launched_and_says_why(monkeypatch, in_forward, why):
    forward = TransformerLayer.forward
    monkeypatch.setattr(TransformerLayer, "forward", lambda self, x: in_forward(forward(self, x)))
    torch.manual_seed(0)
    ranks, said = alone()
    torch.manual_seed(0)
    assert differing_bits(ranks, alone(graphs=False)[0]) == []
    refused = "operation not permitted when stream is capturing"
    assert said == [f"WARNING: kernels of stage 0 are launched one by one: {refused}: {why}"]


def test_microbatches_of_two_lengths_run_launched_and_say_why():
    case = replace(ALONE, variable=True)
    ranks, said = alone(case=case)
    assert said == ["WARNING: kernels of stage 0 are launched one by one: its microbatches differ in form"]
    assert differing_bits(ranks, alone(case=case, graphs=False)[0]) == []


def test_a_hook_is_called_in_every_pass():
    called = []

    def hook(training: Training) -> None:
        training.stages[0].decoder.register_forward_hook(lambda *given: called.append(1))

    said = alone(hook)[1]
    why = "its modules have hooks, which a graph would not call"
    assert said == [f"WARNING: kernels of stage 0 are launched one by one: {why}"]
    assert len(called) == (ALONE.steps + 1) * ALONE.microbatches  # and of an evaluation


def test_1f1b_has_p_minus_i_microbatches_in_flight_and_gpipe_all():
    assert [in_flight(build("1f1b", 4, 8), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(build("gpipe", 2, 5), stage) for stage in range(2)] == [5, 5]


def test_the_plan_counts_a_pool_for_every_microbatch_in_flight():
    """Stages of one layer alike, but for the ends: 1F1B's first rank holds four slots, its last one one."""
    config = Config(
        ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=4, padded_vocab_size=32, **NO_DROPOUT),
        ParallelConfig(pipeline_model_parallel_size=4, cuda_graph_impl="local"),
        BatchConfig(micro_batch_size=2, global_batch_size=16, seq_length=8),
        precision=PrecisionConfig(bf16=True),
        world_size=4,
    )
    plan = make_plan(config)
    mem_b, hidden = plan.costs.memory(plan.schedule.placement)[0], 2 * 8 * 16 * 2
    held = [peak - state for peak, state in zip(plan.peak_bytes, plan.state_bytes, strict=True)]
    assert held == [slots * (mem_b[rank] + 4 * hidden) for rank, slots in enumerate((4, 3, 2, 1))]


NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_FLAGS = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --global-batch-size 8 "
_FLAGS += "--micro-batch-size 1 --pipeline-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--freeze-all-layers", "nothing is trained"),
        ("--num-experts 2", "the host waits for the number of rows of each expert (--num-experts)"),
        ("--bf16 --fp8-format e4m3", "quantised weights and largest values outlive a pass (--fp8-format)"),
        ("--hidden-dropout 0.1", "each microbatch has dropout masks of its own"),
        ("--transformer-impl transformer_engine", "layers of Transformer Engine keep state in Python"),
        ("--tensor-model-parallel-size 2", "no GPU has shown yet that collectives within passes can be captured"),
        ("--reset-attention-mask", "documents differ from microbatch to microbatch"),
        (
            "--recompute-granularity full --num-microbatches-with-partial-activation-checkpoints 1",
            "microbatches recompute differently",
        ),
        ("--pipeline-slices 2", "slices of a microbatch differ"),
        ("--vocab-parallel-pipeline", "passes hand over more than hidden states"),
        ("--mtp-num-layers 1", "passes hand over more than hidden states"),
        ("--cpu-offload --offload-time 0.1 --global-batch-size 32", "1f1b moves activations (O, L, R)"),
        ("--enable-optimizer-post-validation", "forwards may run again"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "weights or gradients move"),
    ],
)
def test_a_run_without_graphs_says_why(flags, why):
    config = parse(Config, f"{_FLAGS} {flags} --cuda-graph-impl local".split())
    config = replace(config, world_size=8, model=replace(config.model, padded_vocab_size=32))
    line = graphs_line(config, make_plan(config).schedule, "cuda")
    assert line.startswith(f"--cuda-graph-impl local: nothing is captured: {why}")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", ""),
        ("--enable-cuda-graph", "--cuda-graph-impl local: after 3 step(s) a stage's forward is one CUDA graph"),
        ("--external-cuda-graph --cuda-graph-warmup-steps 2", "--cuda-graph-impl transformer_engine: after 2 step(s)"),
    ],
)
def test_megatrons_names_ask_for_the_same_graphs(flags, line):
    config = parse(Config, f"{_FLAGS} {flags}".split())
    assert graphs_line(config, build("1f1b", 2, 8), "cuda").startswith(line)
    cpu = f"--cuda-graph-impl {config.parallel.cuda_graph_impl}: nothing is captured: CUDA graphs need a GPU"
    assert graphs_line(config, build("1f1b", 2, 8), "cpu") == (cpu if flags else "")


def test_microbatches_of_many_lengths_leave_two_forms():
    """Each new length stayed in a list that every later forward looked through."""
    graphed = Graphed(Echo(), lasts=False)
    for length in range(1, 9):
        graphed.set_input_tensor(torch.ones(length, requires_grad=True))
        with WeightGrads().capturing():
            graphed()
    assert len(graphed.forms) == 2


def test_slots_dropped_for_a_new_hook_do_not_count_as_captured():
    """The count was negative, and the run announced graphs of 0 microbatches."""
    module = Echo()
    module.weight.main_grad = torch.zeros(())
    graphed = Graphed(module, lasts=False)
    graphed.set_input_tensor(torch.ones(3))
    with WeightGrads().capturing():
        graphed()
    assert graphed.begin(2, lambda: run_at_once, splits=False) == 2
    module.register_forward_hook(lambda *_: None)
    assert graphed.begin(2, lambda: run_at_once, splits=False) == 0


def run_at_once(kernels):
    return kernels(), lambda: None


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = x

    def forward(self) -> Tensor:
        return self.weight * self.x
