"""Random numbers that depend on the model and the data, and not on the rank.

Initial weights are drawn from a stream named by the parameter. Dropout masks are drawn from a
stream named by the sample, the layer and the place in the layer. So every parallel layout, and
every recomputation, draws the same numbers.
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

# The bytes of torch.Generator.get_state: a head, then the words of the Mersenne Twister.
_HEAD = 24
_WORDS = 624
_BLOCKS = 8
"""The most blocks that a mask is drawn in. A rank draws only the blocks that it needs."""
_BLOCK_ELEMENTS = 2**18
"""The fewest elements of a block, unless it is the only one."""


@dataclass(frozen=True)
class MicrobatchContext:
    """A microbatch as its layers see it: its random streams, documents, ranks and slice.

    A random stream is a generator for one use of random numbers in one layer, such as a dropout.
    Layers find this object by `current_microbatch`.

    In the context `active` layers find this object. `activate` does the same without an end.

    Attributes:
        seed, sample: the run's seed, and the number of the microbatch's first sample in the whole
            training. Both name the random streams.
        documents: the documents of each sequence, if attention or positions depend on them.
        recomputes: False if recomputation is switched off for this microbatch.
        cp: the ranks that share the sequences; `cut` says which tokens are on this rank.
        dp: the ranks that run other microbatches in the same order at the same time.
        weigh: weigh(tokens, part=1.0) -> the weight of a layer's own mean loss, such as a router's,
            in the loss that the step differentiates. `tokens` is the number in the slice; with part
            1.0 the number in the whole microbatch.
        kept: choices of a forward for its recomputation, under keys that the layers choose.
        piece, length: the slice that the pass runs, of sequences of this length. None: no slices.
        prefix: tensors of earlier slices for later ones, under keys that the layers choose. All
            slices of the microbatch share this dictionary.
        keep: (keys and values, sees) -> a function that returns them later, reloaded from the host
            if they were moved there. sees(begin) says whether the slice that starts at token
            `begin` attends to any of them.
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
        """Which tokens of the whole sequences are on this rank, in this pass."""
        return Cut(self.cp.rank, self.cp.size, self.piece, self.length)

    @property
    def share(self) -> float:
        """The fraction of the microbatch's tokens that the pass runs."""
        return 1.0 if self.piece is None else len(self.piece) / self.length

    @property
    def begin(self) -> int:
        """The first token of the pass's slice, in the whole sequences."""
        return 0 if self.piece is None else self.piece.start

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context whose layers find this object by `current_microbatch`."""
        token = self.activate()
        try:
            yield
        finally:
            _stream.reset(token)

    def activate(self) -> Token[MicrobatchContext | None]:
        """Make this stream the current one, for the rest of the running contextvars context.

        Returns: contextvars' token, by which the caller restores the stream before.
        """
        return _stream.set(self)


_stream: ContextVar[MicrobatchContext | None] = ContextVar("stream", default=None)


@eager
def current_microbatch() -> MicrobatchContext:
    """Return the `MicrobatchContext` of the microbatch whose pass is running.

    Outside of any pass it is MicrobatchContext(0, 0), of seed 0 and sample 0.
    """
    return _stream.get() or MicrobatchContext(0, 0)


def stream_key(*name: object) -> int:
    """Return a hash of a name, which seeds a random stream: 64 bits of BLAKE2b (RFC 7693).

    Args:
        name: numbers and strings, such as a layer's number and a place in it.
    """
    return int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little")


def generator(device: torch.device, *name: object) -> torch.Generator:
    """Return a random generator whose state depends on the name only.

    Names with different `stream_key` have different states. Philox on a GPU takes the key as its
    seed. The CPU's Mersenne Twister would use 32 bits of a seed: among 10^6 streams 116 pairs would
    be equal. So its whole state is computed from the key by SHAKE-256.
    """
    key = stream_key(*name)
    if device.type != "cpu":
        return torch.Generator(device).manual_seed(key)
    digest = shake_256(key.to_bytes(8)).digest(4 * _WORDS)
    words = torch.frombuffer(bytearray(digest), dtype=torch.uint32)
    fresh = torch.Generator()
    # The state has seed and counters, then the words, each stored in 64 bits.
    state = fresh.get_state()
    state[_HEAD : _HEAD + 8 * _WORDS].view(torch.int64).copy_(words)
    return fresh.set_state(state)


@eager
def dropout(x: Tensor, p: float, *site: object, tp: Axis | None = None, dim: int = 1) -> Tensor:
    """Zero each element with probability p and scale the rest by 1/(1-p).

    Args:
        x: [s/c, ...], the tokens of the current stream.
        site: the layer and the name of the dropout in it; with the current stream it names the
            mask.
        tp: the ranks that split dimension `dim` of x; None if x is whole. The mask of the whole
            dimension is drawn, unless dim is 0.
    Returns: a new tensor of x's shape and type; x itself for p = 0.
    """
    if p == 0.0:
        return x
    # GPUs and CPUs draw different numbers: masks are equal in every layout, not on both devices.
    mask = draws(x.shape, *site, device=x.device, tp=tp, dim=dim, cut=current_microbatch().cut) < p
    # Backward keeps the mask, one byte for each element.
    return x.masked_fill(mask, 0.0).mul_(1.0 / (1.0 - p))


def draws(
    shape: Sequence[int],
    *site: object,
    device: torch.device,
    tp: Axis | None = None,
    dim: int = 1,
    cut: Cut = WHOLE,
) -> Tensor:
    """Draw a uniform number in [0, 1) for each element of a tensor.

    The seed is made from the running microbatch's stream and the site.

    Args:
        shape: the shape of this rank's tensor.
        site: the layer, and a name for this use of random numbers in it.
        device: the device of the result; a GPU and a CPU draw different numbers.
        tp: the ranks that split dimension `dim`: the numbers are a slice of the whole tensor's.
            None if no ranks split it.
        cut: which rows of dimension 0 of the whole tensor are on this rank, before tp splits it.
    Returns: float32 of this shape.
    """
    whole = list(shape)
    if tp is not None:
        whole[dim] *= tp.size
    # The name belongs to the mask of the whole sequence. A rank takes its part, so that every
    # layout has the same mask.
    whole[0] = cut.whole(whole[0])
    rows = cut.spans(whole[0])
    if tp is not None and dim == 0:
        rows = share_of(rows, tp.rank, tp.size)
    stream = current_microbatch()
    name = (stream.seed, stream.sample, *site)
    parts = [_uniform(whole, r.start, len(r), device, *name) for r in rows]
    draw = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tp is not None and dim != 0:
        draw = draw.chunk(tp.size, dim)[tp.rank]
    return draw


def _uniform(
    shape: Sequence[int], first: int, rows: int, device: torch.device, *name: object
) -> Tensor:
    """Return some rows of a tensor of uniform float32 numbers in [0, 1), seeded by `name`.

    The tensor consists of at most _BLOCKS blocks of rows. Each block has a stream of its own, so
    that a rank draws only the blocks that it needs.

    Args:
        shape: the shape of the whole tensor.
        first, rows: the first row to return, and the number of rows.
        name: seeds the numbers. Equal names give equal numbers.
    """
    row = math.prod(shape[1:])
    # Small blocks would be dominated by their generators, which take 20 us each on a CPU.
    size = max(-(-shape[0] // _BLOCKS), -(-_BLOCK_ELEMENTS // max(row, 1)))
    start = first // size
    end = min(-(-(first + rows) // size) * size, shape[0])
    drawn = torch.empty(end - start * size, *shape[1:], dtype=torch.float32, device=device)
    for number, block in enumerate(torch.split(drawn, size), start):
        block.uniform_(generator=generator(device, *name, number))
    return drawn[first - start * size :][:rows]


def initialize(module: nn.Module, seed: int, tp: Axis, threads: int | None = None) -> None:
    """Fill every parameter that has a Layout with its initial values; others stay as they are.

    The whole weight is drawn on the CPU in float32, and this rank's slice of it is copied. So
    every device and every layout starts from the same values. A thread draws one parameter, or one
    expert, at a time.

    Args:
        seed: with the parameter's global name, it names the random stream.
        tp: tensor parallelism, which splits the weights.
        threads: threads that draw. None: this rank's part of the cores, at most 16, or 1 for small
            modules.
    Raises: ConfigError if a parameter's size differs from its Layout's.
    """
    jobs: list[Callable[[], object]] = []
    for name, param in module.named_parameters():
        if not hasattr(param, "mesh_layout"):
            continue  # a layer of the user's has initialised itself
        layout = layout_of(param)
        if math.prod(layout.local(tp)) != param.numel() or math.prod(layout.full) % param.numel():
            split = ""
            if layout.dim is not None:
                split = f", split over {tp.size} ranks in dimension {layout.dim}"
            raise ConfigError(
                f"parameter {name} has {param.numel()} elements on a tensor-parallel rank, and its "
                f"Layout says {list(layout.full)}{split}. Make both agree in the model provider."
            )
        # A tied weight starts with the values of its owner, on every rank.
        name = whole_name(layout.tied_to or name)
        if not layout.experts:
            jobs.append(partial(_fill, param, name, layout, seed, tp))
            continue
        # Experts are drawn one by one, so that a rank draws only its own.
        piece, pieces = layout.pieces(tp)[0]
        count = layout.full[0] // pieces
        for local, expert in enumerate(range(piece * count, (piece + 1) * count)):
            jobs.append(partial(_fill, param.detach()[local], name, layout, seed, tp, expert))
    if threads is None:
        elements = sum(param.numel() for param in module.parameters())
        threads = 1 if elements < _MANY else min(_MOST_THREADS, cores())
    if threads == 1:
        for job in jobs:
            job()
        return
    # torch releases Python's lock while it draws.
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(job) for job in jobs]:
            # Raises what the job raised; the pool alone would swallow it.
            done.result()


_MANY = 1 << 24
"""Elements from which several threads initialise a module."""
_MOST_THREADS = 16
"""The most threads: each holds a whole parameter in float32 while it draws."""


@torch.no_grad()
def _fill(
    param: Tensor, name: str, layout: Layout, seed: int, tp: Axis, expert: int | None = None
) -> None:
    mine = layout.mine(initial(name, layout, seed, expert), tp)
    # Rounded on the CPU, so that half as many bytes are copied to the device.
    param.copy_(mine.reshape(param.shape).to(param.dtype))


def initial(name: str, layout: Layout, seed: int, expert: int | None = None) -> Tensor:
    """Return a parameter's initial values before they are split, in float32 on the CPU.

    Args:
        name: the parameter's global name. seed: the seed of the run.
        expert: index of the expert whose values are returned; None for all values.
    Returns: a tensor of shape layout.full; for one expert [1, ...].
    """
    shape = layout.full
    site: tuple[object, ...] = (name,)
    if expert is not None:
        shape = (1, *layout.full[1:])
        site = (name, expert)
    whole = torch.empty(shape, dtype=torch.float32)
    draw = generator(torch.device("cpu"), seed, *site)
    if layout.log_of is not None:
        return whole.uniform_(*layout.log_of, generator=draw).log_()
    if layout.std is None:
        # Glorot and Bengio 2010: inputs are the last dimension, outputs the others.
        bound = math.sqrt(6 / (shape[-1] + whole.numel() // shape[-1]))
        return whole.uniform_(-bound, bound, generator=draw).add_(layout.mean)
    if layout.std:
        return whole.normal_(layout.mean, layout.std, generator=draw)
    return whole.fill_(layout.mean)
