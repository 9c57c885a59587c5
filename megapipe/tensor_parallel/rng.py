"""Random numbers that belong to the model and the data, not to a rank.

Initial weights are drawn from a stream named by the parameter, dropout masks from one named by the sample, the layer
and the place in it. Any tensor-parallel, pipeline or data-parallel layout and any recomputation then draws the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import layout_of
from megapipe.distributed.tokens import Documents
from megapipe.tensor_parallel.eager import eager


@dataclass(frozen=True)
class Stream:
    """What layers need to know of a microbatch beside its hidden states.

    Attributes:
        seed, sample: its randomness: the run's seed and the number of its first sample in the whole training.
        documents: where its documents lie, if attention or positions heed them.
        recomputes: what the model computes again in backward it does for this microbatch.
    """

    seed: int
    sample: int
    documents: Documents | None = None
    recomputes: bool = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Layers that run in this context draw from this stream and heed its documents."""
        token = self.activate()
        try:
            yield
        finally:
            _stream.reset(token)

    def activate(self) -> Token[Stream | None]:
        """The same for the rest of the running contextvars context."""
        return _stream.set(self)


_stream: ContextVar[Stream | None] = ContextVar("stream", default=None)


@eager
def current_stream() -> Stream:
    """The stream of the pass that is running."""
    return _stream.get() or Stream(0, 0)


def generator(device: torch.device, *name: object) -> torch.Generator:
    """A generator whose state is a function of its name alone."""
    text = "/".join(map(str, name)).encode()
    high, low = zlib.crc32(text), zlib.adler32(text[::-1])
    return torch.Generator(device).manual_seed((high << 31) ^ low)


@eager
def dropout(x: Tensor, p: float, *site: object, tp: Axis | None = None, dim: int = 1) -> Tensor:
    """Zero each element with probability p and scale the rest by 1/(1-p).

    Args:
        x: any shape; with `tp`, this rank's slice of dimension `dim`.
        site: layer and place in it; with the current stream it names the mask.
    """
    if p == 0.0:
        return x
    shape = list(x.shape)
    if tp is not None:
        shape[dim] *= tp.size
    stream = current_stream()
    draw = torch.rand(shape, device=x.device, generator=generator(x.device, stream.seed, stream.sample, *site))
    if tp is not None:
        draw = draw.chunk(tp.size, dim)[tp.rank]
    return x.masked_fill(draw < p, 0.0).mul_(1.0 / (1.0 - p))  # one byte per element is kept for backward


@torch.no_grad()
def initialize(module: nn.Module, seed: int, tp: Axis) -> None:
    """Fill every parameter that has a layout: the same whole weight for the same seed and name, then this rank's slice.

    Drawn on the CPU in float32 one parameter at a time, so every device and layout starts from the same bits.
    """
    for name, param in module.named_parameters():
        if not hasattr(param, "mesh_layout"):
            continue  # a layer we do not know has initialised itself
        layout = layout_of(param)
        name = layout.tied_to or name
        whole = torch.empty(layout.full, dtype=torch.float32)
        if layout.std:
            whole.normal_(layout.mean, layout.std, generator=generator(whole.device, seed, name))
        else:
            whole.fill_(layout.mean)
        local = whole if layout.dim is None else whole.chunk(tp.size, layout.dim)[tp.rank]
        param.copy_(local.reshape(param.shape))
