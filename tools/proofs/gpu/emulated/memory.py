"""Train drawn models on emulated devices, and compare the allocator's peak with the plan's.

    python -m tools.proofs.gpu.emulated.memory --models 30 --seed 0 [--results FILE]

A device allocates by the rules of torch's caching allocator (allocator.h). Products are not
computed, their results are zeros: bytes do not depend on values. What a kernel of CUDA takes within
itself, as cuBLAS's workspace, is in neither number.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from megapipe.config import Config
from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.library.runs import make_plan
from tools.proofs.gpu.emulated.launch import start
from tools.proofs.gpu.emulated.streams import Library

MIB = 2**20
HELD = "held at the peak:"
"""A line of a rank's output, before its blocks."""
ALWAYS = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-3 --log-interval 1 --train-iters 3 "
    "--split 1,0,99 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
)
STYLES = (
    "",
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear ",
)
RECOMPUTE = (
    "",
    "",
    "--recompute-granularity selective ",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
)
UPDATES = ("", "--bf16 ", "--bf16 --cross-entropy-loss-fusion ")


def draw(dice: Random) -> tuple[int, str]:
    """Ranks, and the flags of a model whose tensors are large beside the allocator's steps."""
    pp = dice.choice((1, 1, 2))
    layers, heads = dice.choice((3, 6)) * pp, dice.choice((4, 8))
    hidden, length = 64 * dice.choice((4, 6)), dice.choice((256, 512))
    sizes = {
        "num-layers": layers,
        "hidden-size": hidden,
        "num-attention-heads": heads,
        "seq-length": length,
        "max-position-embeddings": length,
        "vocab-size": dice.choice((2047, 8191)),
        "make-vocab-size-divisible-by": 64,
        "micro-batch-size": dice.choice((1, 2)),
        "global-batch-size": 4 * pp,
        "pipeline-model-parallel-size": pp,
    }
    numbers = " ".join(f"--{name} {size}" for name, size in sizes.items()) + " "
    schedule = dice.choice(("1f1b", "zb-h1")) if pp > 1 else "1f1b"
    drawn = dice.choice(STYLES) + dice.choice(RECOMPUTE) + dice.choice(UPDATES)
    return pp, f"{ALWAYS}{numbers}--pipeline-schedule {schedule} {drawn}"


def _without_products(lib: Library) -> None:
    """Let products of matrices on devices be zeros, of the right size."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a.new_zeros(*a.shape[:-1], b.shape[-1])

    def into(x: Tensor, *_: Any, out: Tensor | None = None, **__: Any) -> Tensor:
        return x if out is None else out

    kernels = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    given: dict[str, Callable[..., Tensor]] = {
        "mm": product,
        "bmm": product,
        "addmm": lambda x, a, b, **_: product(a, b),
        "addmm_": into,
        "addmm.out": into,
        "mm.out": into,
    }
    for name, function in given.items():
        kernels.impl(name, function, "CUDA")  # type: ignore[no-untyped-call]
    lib.lasting = kernels  # as long as its devices


def _before(lib: Library, *, named: bool) -> None:
    _without_products(lib)
    if named:
        lib.name_blocks()


def _after(lib: Library) -> None:
    print(HELD, *lib.held_at_peak(torch.cuda.current_device()), sep="\n")


def peaks(ranks: int, flags: str, held: int = 0) -> list[tuple[float, float]]:
    """Train. Returns: of each rank the allocator's peak and the plan's, in bytes.

    held: lines to print of what each rank's memory held at its peak.
    """
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    try:
        argv = f"{flags} --metrics-file {folder / 'steps'}".split()
        texts = start(ranks, argv, folder, partial(_before, named=held > 0), _after)
        for rank, text in enumerate(texts):
            lines = text.partition(f"{HELD}\n")[2].splitlines()[:held]
            print(*(f"rank {rank}: {line}" for line in lines), sep="\n", end="\n" * bool(lines))
        step = json.loads((folder / "steps").read_text().splitlines()[-1])
    finally:
        shutil.rmtree(folder)
    pairs = zip(step["peak_gib"], step["predicted_peak_gib"], strict=True)
    return [(peak * 2**30, planned * 2**30) for peak, planned in pairs]


@dataclass(frozen=True)
class Flags:
    """Compare the peak memory of emulated devices with the plan's."""

    models: int = 30
    """How many."""
    seed: int = 0
    """Of the draws."""
    only: tuple[int, ...] = ()
    """Their numbers; all by default."""
    held: int = 0
    """The largest blocks at the peak of each rank to print: bytes, number, operation, place."""
    results: Path | None = None
    """A file with a line for each model that has run; those are only planned again."""


def _known(results: Path | None) -> dict[int, list[tuple[float, float]]]:
    if results is None or not results.exists():
        return {}
    return {row["number"]: row["peaks"] for row in map(json.loads, results.open())}


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    dice = Random(flags.seed)
    drawn = [draw(dice) for _ in range(flags.models)]
    known, worst, count = _known(flags.results), 0.0, 0
    for n in flags.only or range(flags.models):
        ranks, given = drawn[n]
        found: Sequence[tuple[float, float]] = known.get(n) or peaks(ranks, given, flags.held)
        if flags.results is not None and n not in known:
            with flags.results.open("a") as out:
                print(json.dumps({"number": n, "peaks": found, "flags": given}), file=out)
        plan = make_plan(parse(Config, [*given.split(), "--world-size", str(ranks)]))
        found = [(peak, now) for (peak, _), now in zip(found, plan.peak_bytes, strict=True)]
        off = max((peak / planned - 1 for peak, planned in found), key=abs)
        worst, count = max(worst, abs(off)), count + (abs(off) <= 0.03)
        sizes = ", ".join(f"{peak / MIB:.2f} of {planned / MIB:.2f} MiB" for peak, planned in found)
        print(f"{n}: {off:+.1%} ({sizes}) {given.removeprefix(ALWAYS)}", flush=True)
    print(f"{len(flags.only) or flags.models} models, {count} within 3%, worst {worst:.1%}")


if __name__ == "__main__":
    stop.run(main)
