"""Random numbers that belong to the model and the data, not to a rank.

Initial weights are drawn from a stream named by the parameter, dropout masks from one named by the sample, the layer
and the place in it. Any tensor-parallel, pipeline or data-parallel layout and any recomputation then draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, shake_256
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import cores
from megapipe.distributed.layout import Layout, layout_of, whole_name
from megapipe.distributed.tokens import WHOLE, Cut, Documents, share_of
from megapipe.errors import ConfigError
from megapipe.tensor_parallel.eager import eager

_WORDS, _HEAD = 624, 24  # of a Mersenne Twister's state, in the bytes of torch.Generator.get_state
_BLOCKS, _BLOCK_ELEMENTS = 8, 2**18  # a mask is drawn in at most so many blocks, of at least so many elements


@dataclass(frozen=True)
class Stream:
    """A microbatch as layers need to know it beside its hidden states.

    Attributes:
        seed, sample: its randomness: the run's seed and the number of its first sample in the whole training.
        documents: where its documents lie, if attention or positions heed them.
        recomputes: what the model computes again in backward it does for this microbatch.
        cp: the ranks that have its sequences among them; `cut` says which tokens are here.
        dp: the ranks that have other microbatches under way at the same place of the same order.
        weigh: number of tokens -> what the mean of something over so many tokens of this microbatch counts in the loss
            that the step differentiates. For losses of layers. Of a slice; with 1.0 as well, of all of the microbatch.
        kept: what layers remember of a forward for the one that recomputes it, by a name of theirs.
        piece, length: the slice of the microbatch's sequences, of this length, that the pass is of; None: all of them.
        prefix: what layers keep of slices for those behind them, by a name of theirs, the same for all slices.
        keep: called with keys and values that they keep there, and with what says whether a slice that begins at some
            token sees any of them; a function that gives them, wherever they are meanwhile.
    """

    seed: int
    sample: int
    documents: Documents | None = None
    recomputes: bool = True
    cp: Axis = Axis()
    dp: Axis = Axis()
    weigh: Callable[..., float] = field(default=lambda tokens, part=1.0: part, compare=False)
    kept: dict[object, Any] = field(default_factory=dict, compare=False)
    piece: range | None = None
    length: int = 0
    prefix: dict[object, Any] = field(default_factory=dict, compare=False)
    keep: Callable[[Tensor, Callable[[int], bool]], Callable[[], Tensor]] = field(
        default=lambda keys, sees: lambda: keys, compare=False
    )

    @property
    def cut(self) -> Cut:
        return Cut(self.cp.rank, self.cp.size, self.piece, self.length)

    @property
    def share(self) -> float:
        """The part of its microbatch that the pass is of."""
        return 1.0 if self.piece is None else len(self.piece) / self.length

    @property
    def begin(self) -> int:
        """The first token of its slice in the whole sequences."""
        return 0 if self.piece is None else self.piece.start

    @contextmanager
    def active(self) -> Iterator[None]:
        """Layers that run in this context draw from this stream and heed its documents."""
        token = self.activate()
        try:
            yield
        finally:
            _stream.reset(token)

    def activate(self) -> Token[Stream | None]:
        """Make it the stream of the rest of the running contextvars context."""
        return _stream.set(self)


_stream: ContextVar[Stream | None] = ContextVar("stream", default=None)


@eager
def current_stream() -> Stream:
    """The stream of the pass that is running."""
    return _stream.get() or Stream(0, 0)


def stream_key(*name: object) -> int:
    """The 64 bits that a name of numbers and texts stands for: its BLAKE2b (RFC 7693)."""
    return int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little")


def generator(device: torch.device, *name: object) -> torch.Generator:
    """A generator whose state is a function of its name alone; names of another `stream_key` have another state.

    Philox on a GPU takes the key as it is. Of a seed the CPU's Mersenne Twister would read 32 bits, which makes 116
    pairs of equal streams among 10^6; so its whole state is drawn from the key, by SHAKE-256.
    """
    key = stream_key(*name)
    if device.type != "cpu":
        return torch.Generator(device).manual_seed(key)
    words = torch.frombuffer(bytearray(shake_256(key.to_bytes(8)).digest(4 * _WORDS)), dtype=torch.uint32)
    fresh = torch.Generator()
    state = fresh.get_state()  # seed and counters, then the words, 64 bits for each
    state[_HEAD : _HEAD + 8 * _WORDS].view(torch.int64).copy_(words)
    return fresh.set_state(state)


@eager
def dropout(x: Tensor, p: float, *site: object, tp: Axis | None = None, dim: int = 1) -> Tensor:
    """Zero each element with probability p and scale the rest by 1/(1-p).

    Args:
        x: [s/c, ...], the stream's tokens; with `tp`, this rank's slice of dimension `dim`. Of a slice of dimension 0
            little more is drawn.
        site: layer and place in it; with the current stream it names the mask.
    """
    if p == 0.0:
        return x
    mask = draws(x.shape, *site, device=x.device, tp=tp, dim=dim, cut=current_stream().cut) < p
    return x.masked_fill(mask, 0.0).mul_(1.0 / (1.0 - p))  # one byte per element is kept for backward


def draws(
    shape: Sequence[int],
    *site: object,
    device: torch.device,
    tp: Axis | None = None,
    dim: int = 1,
    cut: Cut = WHOLE,
) -> Tensor:
    """A uniform number in [0, 1) for each element of an x of this shape: `dropout` zeroes those below p.

    cut: of dimension 0, before tp's slice of it.
    """
    whole = list(shape)
    if tp is not None:
        whole[dim] *= tp.size
    # The mask of the whole sequence has a name; a rank takes its part of it, so that no layout changes a bit.
    whole[0] = cut.whole(whole[0])
    rows = cut.spans(whole[0])
    if tp is not None and dim == 0:
        rows = share_of(rows, tp.rank, tp.size)
    stream = current_stream()
    parts = [_uniform(whole, r.start, len(r), device, stream.seed, stream.sample, *site) for r in rows]
    draw = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tp is not None and dim != 0:
        draw = draw.chunk(tp.size, dim)[tp.rank]
    return draw


def _uniform(shape: Sequence[int], first: int, rows: int, device: torch.device, *name: object) -> Tensor:
    """Rows first .. first + rows - 1 of the tensor of uniform float32 numbers in [0, 1) that has this shape and name.

    It consists of at most _BLOCKS blocks of rows, each from a stream of its own, so that a rank draws those it needs.
    """
    row = math.prod(shape[1:])
    size = max(-(-shape[0] // _BLOCKS), -(-_BLOCK_ELEMENTS // max(row, 1)))
    start = first // size
    drawn = torch.empty(
        min(-(-(first + rows) // size) * size, shape[0]) - start * size, *shape[1:], dtype=torch.float32, device=device
    )
    for number, block in enumerate(torch.split(drawn, size), start):
        block.uniform_(generator=generator(device, *name, number))
    return drawn[first - start * size :][:rows]


def initialize(module: nn.Module, seed: int, tp: Axis, threads: int | None = None) -> None:
    """Fill every parameter that has a layout: the same whole weight for the same seed and name, then this rank's slice.

    Drawn on the CPU in float32, one parameter or one expert at a time on each thread, so every device and layout starts
    from the same bits.

    Args:
        threads: by default this rank's share of the machine's, where there is much to draw.
    """
    jobs: list[Callable[[], object]] = []
    for name, param in module.named_parameters():
        if not hasattr(param, "mesh_layout"):
            continue  # a layer we do not know has initialised itself
        layout = layout_of(param)
        if math.prod(layout.local(tp)) != param.numel() or math.prod(layout.full) % param.numel():
            split = "" if layout.dim is None else f", of which a rank of {tp.size} has a part in dimension {layout.dim}"
            raise ConfigError(
                f"parameter {name} has {param.numel()} elements on a tensor-parallel rank, and its Layout says "
                f"{list(layout.full)}{split}. Make both agree in the model provider."
            )
        # A tied weight begins as its owner does, on whichever rank it is.
        name = whole_name(layout.tied_to or name)
        if not layout.experts:
            jobs.append(partial(_fill, param, name, layout, seed, tp))
            continue
        piece, pieces = layout.pieces(tp)[0]
        count = layout.full[0] // pieces
        for local, expert in enumerate(range(piece * count, (piece + 1) * count)):
            jobs.append(partial(_fill, param.detach()[local], name, layout, seed, tp, expert))
    if threads is None:
        threads = 1 if sum(param.numel() for param in module.parameters()) < _MANY else min(_MOST_THREADS, cores())
    if threads == 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads) as pool:  # torch draws without Python's lock
        for done in [pool.submit(job) for job in jobs]:
            done.result()


_MANY, _MOST_THREADS = 1 << 24, 16
"""Elements that are worth threads; each holds a whole parameter in float32 while it draws."""


@torch.no_grad()
def _fill(param: Tensor, name: str, layout: Layout, seed: int, tp: Axis, expert: int | None = None) -> None:
    mine = layout.mine(initial(name, layout, seed, expert), tp)
    param.copy_(mine.reshape(param.shape).to(param.dtype))  # rounded here: a copy to a device is half as long


def initial(name: str, layout: Layout, seed: int, expert: int | None = None) -> Tensor:
    """The weight, float32 on the CPU, with which a parameter of this name begins: the whole, or [1, ...] an expert."""
    shape, site = (layout.full, (name,)) if expert is None else ((1, *layout.full[1:]), (name, expert))
    whole, draw = torch.empty(shape, dtype=torch.float32), generator(torch.device("cpu"), seed, *site)
    if layout.std is None:
        bound = math.sqrt(6 / (shape[-1] + whole.numel() // shape[-1]))
        return whole.uniform_(-bound, bound, generator=draw).add_(layout.mean)
    return whole.normal_(layout.mean, layout.std, generator=draw) if layout.std else whole.fill_(layout.mean)
