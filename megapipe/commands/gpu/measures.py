"""Measures of megapipe gpu-check on one device beside its trainings, each in a process of its own.

PYTHONPATH=. python megapipe/commands/gpu/measures.py --device cuda --only split

A line for each, of what was found; exit status 1 if one falls short of its bar. Bars hold on a GPU; a CPU only shows
that the tool works, at tiny sizes, except for numbers that must be equal.
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
from megapipe.commands.gpu.kernels import Found, main
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
from megapipe.tensor_parallel.rng import Stream, initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads
from megapipe.training.forward_step import forward_step
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import StepResult, train_step


@dataclass(frozen=True)
class Size:
    """Sizes of a model and its microbatch: the layers of a 1.3B GPT on a GPU."""

    hidden: int
    heads: int
    seq: int
    vocab: int


GPU, TINY = Size(2048, 16, 2048, 50304), Size(64, 4, 32, 128)


def ceilings(device: torch.device) -> Found:
    """Rates that the device reaches in a layer's products of 4,096 tokens (bf16) and in copying: no step is faster."""
    h, rows = (2048, 4096) if device.type == "cuda" else (64, 128)
    rates = []
    for k, n in ((h, 3 * h), (h, 4 * h), (4 * h, h)):
        x, w = torch.randn(rows, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
        rates.append(2 * rows * k * n / seconds(partial(torch.mm, x, w), device) / 1e12)
    source = torch.zeros(rows * h * 16, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), device) / 1e9
    products = ", ".join(f"{rate:.3g}" for rate in rates)
    return Found(f"products of qkv, fc1, fc2 {products} TFLOP/s; copy {copied:.3g} GB/s read and written")


def split(device: torch.device) -> Found:
    """Input and weight gradients apart (B, then W) against both at once, two layers in bf16: at most 3% more."""
    size = GPU if device.type == "cuda" else TINY
    module = _stage(_model(size, layers=2), LayerSpan(0, 2, embedding=False, loss=False), device).bfloat16()
    layers: Any = module
    for parameter in module.parameters():
        setattr(parameter, "main_grad", torch.zeros_like(parameter, dtype=torch.float32))  # noqa: B010
    owner, stream = WeightGrads(), Stream(1, 0)
    x, grad = (torch.randn(size.seq, 2, size.hidden, device=device).bfloat16() for _ in range(2))

    def forward() -> Tensor:
        with owner.capturing(), stream.active():
            layers.set_input_tensor(x.requires_grad_())
            out: Tensor = layers()
        return out

    def fused() -> None:
        torch.autograd.backward(forward(), grad)

    def apart() -> None:
        out = forward()
        with owner.deferring(0):
            torch.autograd.backward(out, grad)
        owner.run(0)

    first = seconds(forward, device)
    both, one_by_one = (seconds(f, device) - first for f in (fused, apart))
    ratio = one_by_one / both
    figure = f"F {first * 1e3:.3g} ms, B + W {one_by_one * 1e3:.3g} ms = {ratio:.3f} x both at once, at most 1.03"
    return Found(figure, ratio <= 1.03 or device.type == "cpu")


def schedules(device: torch.device) -> Found:
    """Two steps under every schedule that runs on one rank, in bf16: losses and norms are 1F1B's to the bit."""
    be_deterministic()
    size = Size(256, 4, 256, 1024) if device.type == "cuda" else TINY
    names = [name for name in SCHEDULES if _runs_alone(name)]
    names.sort(key=lambda name: name != PLAIN)
    found = {}
    for name in names:
        step = training(name, size, 8 if device.type == "cuda" else 4, device)
        found[name] = [(r.losses["lm loss"], r.grad_norm) for r in (step(), step())]
    other = [name for name in names if found[name] != found[PLAIN]]
    figure = f"{len(names)} schedules, {f'not the bits of 1f1b: {other}' if other else 'the bits of 1f1b'}"
    return Found(figure, not other)


def graphs(device: torch.device) -> Found:
    """Steps of eight small layers by CUDA graphs from the second on: the bits of launched ones, in less time."""
    if device.type == "cpu":
        return Found("CUDA graphs need a GPU")
    be_deterministic()
    size, said = Size(512, 8, 256, 1024), list[str]()
    ways = [
        training("zb-h1", size, 8, device, by) for by in (None, Graphs(partial(graph_pool, device), 1, said.append))
    ]
    bits = [[(r.losses["lm loss"], r.grad_norm) for r in (step() for _ in range(4))] for step in ways]
    launched, replayed = (seconds(step, device) * 1e3 for step in ways)
    figure = (
        f"{'the same' if bits[0] == bits[1] else 'OTHER'} bits; a step {launched:.3g} ms launched, {replayed:.3g} by "
    )
    return Found(f"{figure}graphs; {'; '.join(said)}", bits[0] == bits[1] and "WARNING" not in str(said))


def host(device: torch.device) -> Found:
    """The time that the device waits for its host in a step, in torch's trace of it: at most 2% on a GPU.

    The second of four ranks of one layer each, which has the least work per call, alone: messages are there at once.
    """
    sizes = SIZES[device.type] if device.type == "cpu" else LARGE_LAYER
    backend = "gloo" if device.type == "cpu" else "auto"
    flags = f"{SHAPE} {sizes} --num-layers 4 --pipeline-model-parallel-size 4 --pipeline-schedule zb-h1 --bf16 "
    flags += f"--global-batch-size 16 --distributed-backend {backend}"
    config, plan = prepared(flags.split(), 4)
    training = rank_alone(config, plan, 1, answers_of(config, plan, range(4)))
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
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _OF_DEVICE)
    if not kernels:
        return Found(f"{len(events)} events, no kernels", device.type == "cpu")
    idle = idle_share(kernels)
    return Found(f"{len(kernels)} kernels, the device waits {idle:.1%} of the step, at most 2%", idle <= 0.02)


_OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end in which nothing runs; spans by their start."""
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


MEASURES: dict[str, Callable[[torch.device], Found]] = {
    f.__name__: f for f in (ceilings, split, schedules, graphs, host)
}


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of five, each of ten calls in a row, so that a GPU's queue is full."""
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
    """Fills the list with the seconds that the block took: on a GPU by its own clock."""
    taken: list[float] = []
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
    """Steps of a whole model in bf16 on one rank under a schedule, on data of its own: four microbatches of two."""
    model, microbatches = _model(size, layers), 4
    config = Config(
        model=model,
        batch=BatchConfig(micro_batch_size=2, global_batch_size=2 * microbatches, seq_length=size.seq, train_iters=1),
        optimizer=OptimizerConfig(lr=1e-4),
        precision=PrecisionConfig(bf16=True),
    )
    mesh, table = ProcessMesh.create(config.parallel, device), build(schedule, 1, microbatches)
    spans = partition(layers, table.placement)
    modules: list[nn.Module] = [_stage(model, spans[s], device).bfloat16() for s in table.placement.stages_on(0)]
    pipeline = Stages(config, table, modules, forward_step, mesh, 0)
    optimizer = Optimizer(modules, config.optimizer, mesh)
    if by is not None:
        pipeline.engine.graphs = by
    draw = torch.Generator().manual_seed(1)
    data = torch.randint(0, size.vocab, (microbatches, 2, size.seq + 1), generator=draw)
    return lambda: train_step(pipeline, optimizer, [*data], 0, Rates(1e-4))


def _runs_alone(name: str) -> bool:
    try:
        build(name, 1, 4)
    except ScheduleError:
        return False
    return True


def _model(size: Size, layers: int) -> ModelConfig:
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
    module = gpt_provider(model, span, Axis(device=device)).to(device)
    initialize(module, 1, Axis(device=device))
    return module


if __name__ == "__main__":
    run(partial(main, checks=MEASURES))
