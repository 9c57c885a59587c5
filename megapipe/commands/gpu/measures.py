"""Measure times and compare numbers on one device for megapipe gpu-check.

PYTHONPATH=. python megapipe/commands/gpu/measures.py --device cuda --only split

Each measure prints a line. Exit status 1 if one misses its limit. Limits of time hold for a GPU; a
CPU runs tiny sizes, and only the numbers that must be equal are judged there.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile

from megapipe.commands.gpu.cases import LARGE_LAYER, SHAPE, SIZES
from megapipe.commands.gpu.kernels import CheckResult, main
from megapipe.commands.plan.rehearse import prepared
from megapipe.commands.plan.rehearsed_rank import answers_of, rank_alone
from megapipe.config import BatchConfig, Config, ModelConfig, OptimizerConfig, PrecisionConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.device import be_deterministic, graph_pool, synchronize
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ScheduleError
from megapipe.flags.parse import run
from megapipe.models.provider import gpt_provider
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.partition.spans import LayerSpan, partition
from megapipe.pipeline_parallel.graphs.graphed import Graphs
from megapipe.schedule import build
from megapipe.schedule.catalogue import PLAIN, SCHEDULES
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads
from megapipe.training.forward_step import forward_step
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import StepResult, train_step


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its sequences.

    Attributes:
        hidden: channels of a hidden state.
        heads: attention heads.
        seq: tokens of a sequence.
        vocab: rows of the vocabulary.
    """

    hidden: int
    heads: int
    seq: int
    vocab: int


# The layers of a GPT with 1.3B parameters.
GPU = Size(2048, 16, 2048, 50304)
TINY = Size(64, 4, 32, 128)


def ceilings(device: torch.device) -> CheckResult:
    """Measure the rates that bound a step: FLOP/s of bf16 products, and bytes/s of a copy.

    The products are with the weights of qkv, fc1 and fc2.
    """
    h = 64
    rows = 128
    if device.type == "cuda":
        h = 2048
        rows = 4096
    rates = []
    # The product of k x n weights takes 2 k n FLOP for each row.
    for k, n in ((h, 3 * h), (h, 4 * h), (4 * h, h)):
        x = torch.randn(rows, k, device=device).bfloat16()
        w = torch.randn(k, n, device=device).bfloat16()
        rates.append(2 * rows * k * n / seconds(partial(torch.mm, x, w), device) / 1e12)
    # A copy reads and writes each byte. On a GPU it is too large for the cache.
    source = torch.zeros(rows * h * 16, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), device) / 1e9
    products = ", ".join(f"{rate:.3g}" for rate in rates)
    rates_of = f"products of qkv, fc1, fc2 {products} TFLOP/s"
    return CheckResult(f"{rates_of}; copy {copied:.3g} GB/s read and written")


def split(device: torch.device) -> CheckResult:
    """Measure the cost of splitting the backward of two layers in bf16.

    Passes B (gradients of inputs) and W (of weights) are compared with one backward that computes
    both. The check passes if the two are at most 3% slower, and always on a CPU.
    """
    size = GPU if device.type == "cuda" else TINY
    # A stage in the middle of a pipeline.
    span = LayerSpan(0, 2, embedding=False, loss=False)
    module = _stage(_model(size, layers=2), span, device).bfloat16()
    layers: Any = module
    # W adds into these buffers, as in a run.
    for parameter in module.parameters():
        main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        setattr(parameter, "main_grad", main_grad)  # noqa: B010
    owner = WeightGrads()
    stream = MicrobatchContext(1, 0)
    x, grad = (torch.randn(size.seq, 2, size.hidden, device=device).bfloat16() for _ in range(2))

    def forward() -> Tensor:
        with owner.capturing(), stream.active():
            layers.set_input_tensor(x.requires_grad_())
            out: Tensor = layers()
        return out

    def fused() -> None:
        torch.autograd.backward(forward(), grad)

    def separate() -> None:
        out = forward()
        with owner.deferring(0):
            torch.autograd.backward(out, grad)
        owner.run(0)

    # A backward cannot run without its forward, whose time is subtracted.
    first = seconds(forward, device)
    both = seconds(fused, device) - first
    one_by_one = seconds(separate, device) - first
    ratio = one_by_one / both
    figure = f"F {first * 1e3:.3g} ms, B + W {one_by_one * 1e3:.3g} ms"
    figure += f" = {ratio:.3f} x both at once, at most 1.03"
    return CheckResult(figure, ratio <= 1.03 or device.type == "cpu")


def schedules(device: torch.device) -> CheckResult:
    """Train two steps in bf16 under each schedule that one rank can run.

    The check passes if all are bitwise equal to 1F1B.
    """
    be_deterministic()
    size = TINY
    layers = 4
    if device.type == "cuda":
        size = Size(256, 4, 256, 1024)
        layers = 8
    names = [name for name in SCHEDULES if _runs_alone(name)]
    # False sorts before True: 1F1B, the reference, comes first.
    names.sort(key=lambda name: name != PLAIN)
    found = {}
    for name in names:
        step = training(name, size, layers, device)
        found[name] = [_numbers(step()) for _ in range(2)]
    other = [name for name in names if found[name] != found[PLAIN]]
    verdict = f"not bitwise equal to 1f1b: {other}" if other else "bitwise equal to 1f1b"
    return CheckResult(f"{len(names)} schedules, {verdict}", not other)


def _numbers(result: StepResult) -> tuple[float, float]:
    """Return (loss, gradient norm) of a step, which are compared bit by bit."""
    return result.losses["lm loss"], result.grad_norm


def graphs(device: torch.device) -> CheckResult:
    """Train eight small layers without and with CUDA graphs, and measure the step times.

    The graphs are captured after the first step. The check passes if the two trainings give bitwise
    equal results and the graphs print no warning. On a CPU it passes without training.
    """
    if device.type == "cpu":
        return CheckResult("CUDA graphs need a GPU")
    be_deterministic()
    size = Size(512, 8, 256, 1024)
    said: list[str] = []
    by_graphs = Graphs(partial(graph_pool, device), 1, said.append)
    # Two equal models: one launches each kernel, the other one replays graphs.
    launches = training("zb-h1", size, 8, device)
    replays = training("zb-h1", size, 8, device, by_graphs)
    expected = [_numbers(launches()) for _ in range(4)]
    equal = [_numbers(replays()) for _ in range(4)] == expected
    launched = seconds(launches, device) * 1e3
    replayed = seconds(replays, device) * 1e3
    figure = "bitwise equal" if equal else "NOT bitwise equal"
    figure += f"; a step {launched:.3g} ms launched, {replayed:.3g} by graphs; {'; '.join(said)}"
    return CheckResult(figure, equal and "WARNING" not in str(said))


def host(device: torch.device) -> CheckResult:
    """Measure the fraction of a step in which the device waits for its host.

    The check passes with at most 2% on a GPU. The second of four pipeline ranks is trained alone,
    without waiting for messages. This rank has one layer and neither embedding nor loss: the least
    work for a GPU per Python call. The times come from torch's profiler.
    """
    is_cpu = device.type == "cpu"
    sizes = LARGE_LAYER
    backend = "auto"
    if is_cpu:
        sizes = SIZES["cpu"]
        backend = "gloo"
    flags = f"{SHAPE} {sizes} --num-layers 4 --pipeline-model-parallel-size 4 "
    flags += "--pipeline-schedule zb-h1 --bf16 "
    flags += f"--global-batch-size 16 --distributed-backend {backend}"
    config, plan = prepared(flags.split(), 4)
    training = rank_alone(config, plan, 1, answers_of(config, plan, range(4)))
    # The first steps allocate and compile.
    for _ in range(3):
        training.driver.whole()
    synchronize(device)
    with profile() as recorded:
        training.driver.whole()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    # A trace has microseconds: the start of an event and its duration.
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _OF_DEVICE)
    # A CPU has no kernels. On a GPU an empty trace is a failure.
    if not kernels:
        return CheckResult(f"{len(events)} events, no kernels", is_cpu)
    idle = idle_share(kernels)
    figure = f"{len(kernels)} kernels, the device waits {idle:.1%} of the step, at most 2%"
    return CheckResult(figure, idle <= 0.02)


# The categories of a trace's events that run on the device.
_OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Return the fraction of the time from the first start to the last end in which nothing runs.

    Args:
        spans: (start, end) of each event, sorted by start.
    """
    busy = 0.0
    until = spans[0][0]
    # Kernels of several streams overlap; their common time counts once.
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


MEASURES: dict[str, Callable[[torch.device], CheckResult]] = {
    f.__name__: f for f in (ceilings, split, schedules, graphs, host)
}


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: the median of five measurements of ten calls each."""
    # The first call compiles and allocates. Ten in a row keep the queue of a GPU full.
    run()
    times = []
    for _ in range(5):
        with _timed(device) as taken:
            for _ in range(10):
                run()
        times.append(taken[0] / 10)
    return statistics.median(times)


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Measure how long the block of a `with` statement takes.

    Yields: an empty list. When the block has ended, the list has its seconds.
    """
    taken: list[float] = []
    # A GPU works on after the host has returned, so its own events are the clock.
    if device.type == "cuda":
        event = partial(torch.cuda.Event, enable_timing=True)
        begin = event()
        end = event()
        begin.record()
        yield taken
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    else:
        start = time.perf_counter()
        yield taken
        taken.append(time.perf_counter() - start)


def training(
    schedule: str, size: Size, layers: int, device: torch.device, by: Graphs | None = None
) -> Callable[[], StepResult]:
    """Build a model in bf16 on one rank. Return a function that trains it for one step.

    A step has four microbatches of two random sequences.

    Args:
        schedule: the schedule's name, such as zb-v.
        size: the sizes of model and sequences.
        layers: the number of layers.
        by: captures passes as CUDA graphs and replays them; None launches each kernel.
    Returns: a function without arguments; it returns the step's result, such as its loss.
    """
    model = _model(size, layers)
    microbatches = 4
    config = Config(
        model=model,
        batch=BatchConfig(
            micro_batch_size=2,
            global_batch_size=2 * microbatches,
            seq_length=size.seq,
            train_iters=1,
        ),
        optimizer=OptimizerConfig(lr=1e-4),
        precision=PrecisionConfig(bf16=True),
    )
    mesh = ProcessMesh.create(config.parallel, device)
    table = build(schedule, 1, microbatches)
    # On one rank all stages of the schedule stand next to each other.
    spans = partition(layers, table.placement)
    stages = table.placement.stages_on(0)
    modules: list[nn.Module] = [_stage(model, spans[s], device).bfloat16() for s in stages]
    pipeline = Stages(config, table, modules, forward_step, mesh, 0)
    optimizer = Optimizer(modules, config.optimizer, mesh)
    if by is not None:
        pipeline.engine.wrap = by
    # Every call trains on the same tokens, so equal models have equal losses.
    draw = torch.Generator().manual_seed(1)
    data = torch.randint(0, size.vocab, (microbatches, 2, size.seq + 1), generator=draw)
    return lambda: train_step(pipeline, optimizer, [*data], 0, Rates(1e-4))


def _runs_alone(name: str) -> bool:
    """Return whether a built-in schedule has a table for a single rank."""
    try:
        build(name, 1, 4)
    except ScheduleError:
        return False
    return True


def _model(size: Size, layers: int) -> ModelConfig:
    """Return the configuration of a GPT of these sizes without dropout.

    Args:
        size: the sizes.
        layers: the number of layers.
    """
    return ModelConfig(
        num_layers=layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        max_position_embeddings=size.seq,
        padded_vocab_size=size.vocab,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        cross_entropy_loss_fusion=True,
    )


def _stage(model: ModelConfig, span: LayerSpan, device: torch.device) -> nn.Module:
    """Return the module of a range of layers, with initial weights, on the device.

    Args:
        span: the layers, and whether embedding and loss belong to them.
    """
    module = gpt_provider(model, span, Axis(device=device)).to(device)
    initialize(module, 1, Axis(device=device))
    return module


if __name__ == "__main__":
    run(partial(main, checks=MEASURES))
