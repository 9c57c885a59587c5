"""Times of embedding, layers and head on this device, where FLOPs mislead: look-ups, softmax, small layers."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from megapipe.config import Config, ModelConfig
from megapipe.config.layers import layer_config
from megapipe.distributed.axis import Axis
from megapipe.distributed.device import CopyLane, synchronize
from megapipe.errors import ConfigError
from megapipe.models.provider import StageProvider
from megapipe.optim.buffers import FlatBuffers
from megapipe.partition.spans import LayerSpan
from megapipe.plan import Pieces, Work
from megapipe.tensor_parallel.rng import initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads


def measure(config: Config, counted: Pieces, provider: StageProvider, device: torch.device, repeats: int = 5) -> Pieces:
    """The pieces with times in seconds, medians of `repeats`; bytes and parameters as counted.

    Each piece is built, run and dropped alone; layers that are alike are timed once.
    Raises: ConfigError with tensor or context parallelism, whose ranks one process has not.
    """
    par = config.parallel
    sizes = {
        "--tensor-model-parallel-size": par.tensor_model_parallel_size,
        "--context-parallel-size": par.context_parallel_size,
    }
    problems = [
        f"times are measured in one process, not {flag} {size}. Leave it out."
        for flag, size in sizes.items()
        if size > 1
    ]
    if problems:
        raise ConfigError(problems)
    model, train = config.model, config.train
    shape = (train.micro_batch, train.sequence)
    tokens = torch.randint(model.padded_vocab_size or 1, shape, device=device)
    dtype = torch.bfloat16 if train.bf16 else torch.float16 if train.half else torch.float32
    x = torch.randn(shape[1], shape[0], model.hidden, device=device, dtype=dtype)

    def timed(piece: Work, span: LayerSpan) -> Work:
        module = provider(model, span, Axis(device=device)).to(device)
        initialize(module, train.seed, Axis(device=device))
        labels, given = tokens if span.loss or span.depth else None, None if span.embedding else x
        f, b, w = _times(module.to(dtype), given, tokens, labels, repeats)
        return replace(piece, f=f, b=b, w=w)

    alike: dict[ModelConfig, Work] = {}
    layers = []
    for layer, piece in enumerate(counted.layers):
        own = layer_config(model, layer)
        if own not in alike:
            alike[own] = timed(piece, LayerSpan(layer, 1, False, False))
        layers.append(alike[own])
    embedding = timed(counted.embedding, LayerSpan(0, 0, True, False))
    head = timed(counted.head, LayerSpan(model.layers, 0, False, True))
    depths = [
        timed(piece, LayerSpan(model.layers + n, 1, False, False, depth=n + 1))
        for n, piece in enumerate(counted.depths)
    ]
    counted = replace(counted, layers=tuple(layers), depths=tuple(depths), overhead=0.0)
    return replace(
        counted,
        embedding=embedding,
        head=head,
        copied_byte=_copied_byte(int(max(x.held for x in layers)), device, repeats),
    )


def _copied_byte(size: int, device: torch.device, repeats: int) -> float:
    """Seconds of a byte on its way to the host, or back, among so many."""
    lane, own = CopyLane(device), torch.zeros(size, dtype=torch.uint8, device=device)
    host, took = lane.buffer(size), list[float]()
    for _ in range(repeats + 2):
        begin = _now(device)
        lane.wait(lane.begin([(own, host)], [lane.begin([(host, own)], ())]))
        took.append(_now(device) - begin)
    return statistics.median(took[2:]) / 2 / size


def _times(
    module: nn.Module, x: Tensor | None, tokens: Tensor, labels: Tensor | None, repeats: int
) -> tuple[float, ...]:
    """Seconds of F, B and W."""
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    buffers = FlatBuffers(trained)  # gradients are added where a run adds them
    grads, rows = WeightGrads(), []
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    for _ in range(repeats + 2):
        buffers.zero_grad()
        leaf = None if x is None else x.detach().requires_grad_()
        clock = [_now(tokens.device)]
        module.set_input_tensor(leaf)  # type: ignore[operator]
        with grads.capturing():
            out = module(tokens, positions, labels=labels)
        clock.append(_now(tokens.device))
        with grads.deferring(0):
            torch.autograd.backward(out, torch.ones_like(out))
        clock.append(_now(tokens.device))
        with torch.no_grad():
            grads.run(0)
        clock.append(_now(tokens.device))
        rows.append([end - start for start, end in pairwise(clock)])
    return tuple(statistics.median(column) for column in zip(*rows[2:], strict=True))  # the first two warm up


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
