"""Compare the plan's step with published runs: their layout, their seconds or FLOP/s, and ours.

    python -m tools.bench.published                    the layouts of others
    python -m tools.bench.published --best             and the best plan that a search finds
    python -m tools.bench.published --sources          where each number stands, and what is assumed

Rates are the defaults of `--rates a100`, `h100` and `h800`. Nothing is fitted to a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import process_time

from megapipe.checks.vocabulary import with_vocabulary
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.listed.asked import asked_of
from megapipe.commands.plan.search.listing import best_of
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config, ParallelConfig
from megapipe.flags.parse import parse
from megapipe.flags.parse import run as start
from megapipe.plan import GIB
from megapipe.plan.seconds.device import DEVICES
from megapipe.plan.seconds.page import numbers
from megapipe.plan.seconds.step import TimedPlan
from tools.bench.published.models import COMMON
from tools.bench.published.runs import RUNS, Run

SCHEDULES = "1f1b,interleaved,zb-h1,zb-v,v-half,dualpipe-v,breadth-first,hanayo"
"""Schedules that --best looks at."""


@dataclass(frozen=True)
class Flags:
    """Compare the seconds of published runs with those of our plan of their layout."""

    only: str = ""
    """Runs whose name has this text."""
    best: bool = False
    """Also search for a better plan of each run, without context parallelism, of their micro
    batch or the next ones, on devices of 80 GiB."""
    best_seconds: float = 60.0
    """CPU seconds after which a search ends with the best so far."""
    sources: bool = False
    """Print where the numbers of each run stand, and what is assumed."""


def config_of(run: Run) -> Config:
    """Return the configuration of a run, with its vocabulary and its number of devices."""
    config = parse(Config, [*COMMON.split(), *run.flags.split()])
    config = with_vocabulary(config, vocabulary_of(config))
    return replace(config, world_size=run.gpus).with_batch(config.global_batch_size)


def vocabulary_of(config: Config) -> int:
    """Return the number of token ids: NullTokenizer has one more than --vocab-size."""
    return (config.data.vocab_size or 0) + 1


def published_seconds(run: Run, config: Config, flops: float) -> float:
    """Return the seconds of a step that a source states, or that follow from what it states.

    Args:
        flops: the model's FLOPs of a step.
    """
    tokens = config.global_batch_size * config.batch.sequence
    if run.seconds:
        return run.seconds
    if run.tokens:
        return tokens / (run.tokens * run.gpus)
    if run.narayanan:
        return _narayanan_flops(config) / (run.narayanan * 1e12 * run.gpus)
    reached = run.tflops * 1e12 or run.mfu * DEVICES[run.device].peak
    return flops / (reached * run.gpus)


def _narayanan_flops(config: Config) -> float:
    """Return formula 3 of arXiv 2104.04473: full attention, and a second forward of the layers."""
    s, h = config.batch.sequence, config.model.hidden
    layers = config.model.layers
    vocabulary = vocabulary_of(config)
    per_layer = 96 * config.global_batch_size * s * layers * h**2
    return per_layer * (1 + s / (6 * h) + vocabulary / (16 * layers * h))


def best_plan(run: Run, config: Config, most: float) -> TimedPlan | None:
    """Return the best plan that a search finds for a run's model, devices and batch.

    Args:
        most: CPU seconds after which it ends with the best so far.
    """
    micro = config.batch.micro_batch
    among = (f"micro={micro},{2 * micro},{4 * micro}", f"schedule={SCHEDULES}")
    asked = asked_of(("cp",), among, (), config)
    bare = config.with_fields(micro_batch_size=1)
    model = replace(bare.model, padded_vocab_size=None)
    bare = replace(bare, model=model, parallel=ParallelConfig())

    began = process_time()

    # A search ends with the best so far at ctrl-C.
    def stop(done: int, among: int, best: float | None) -> None:
        if process_time() - began > most:
            raise KeyboardInterrupt

    device = DEVICES[run.device]
    vocab = vocabulary_of(config)
    found = search(bare, run.gpus, Machine(80 * GIB), device, vocab, stop, asked=asked)
    return next((x.plan for x in best_of(found)), None)


def layout_in_words(plan: TimedPlan) -> str:
    """Return layout, schedule and recomputation of a plan."""
    tp, _, pp, micro, ep, etp = plan.layout
    text = f"tp {tp}, pp {pp}, "
    if plan.config.model.has_experts:
        text += f"ep {ep} x {etp}, "
    text += f"micro {micro}, {plan.schedule}"
    if "sharding" in plan.plan.own:
        text += ", sharded"
    if plan.config.model.recompute_granularity:
        text += f", {plan.config.model.recompute_granularity} recomputation"
    if plan.moves:
        text += ", single activations moved"
    return text


def why_faster(theirs: TimedPlan, best: TimedPlan) -> str:
    """Return the causes that save most seconds, as shares of their step."""
    saved = {name: (theirs.parts[name] - best.parts[name]) / theirs.step for name in best.parts}
    most = sorted(saved.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {-share:+.1%}" for name, share in most if share > 0.003)


def _row(run: Run, flags: Flags) -> tuple[str, float]:
    """Return (a row of the table, the error of the predicted seconds)."""
    device = DEVICES[run.device]
    config = config_of(run)
    theirs = of_run(config, device)
    found = numbers(theirs, device)
    flops = found["mfu"] * found["seconds"] * device.peak * run.gpus
    published = published_seconds(run, config, flops)
    error = found["seconds"] / published - 1
    reached = flops / (published * device.peak * run.gpus)
    cells = [
        run.name,
        f"{run.gpus} {run.device}",
        f"{published:.2f}",
        f"{found['seconds']:.2f}",
        f"{error:+.1%}" + (" (FP8)" if run.eight_bits else ""),
        f"{reached:.1%}",
        f"{found['mfu']:.1%}",
        f"{theirs.peak / GIB:.3g}",
    ]
    if flags.best:
        best = best_plan(run, config, flags.best_seconds)
        if best is None:
            cells += ["nothing fits", "", ""]
        else:
            faster = f"{best.step / found['seconds'] - 1:+.1%}"
            cells += [f"{best.step:.2f}, {faster}", layout_in_words(best), why_faster(theirs, best)]
    return f"| {' | '.join(cells)} |", error


def main(argv: Sequence[str]) -> None:
    """Print a table of the runs, and the mean error of those in bf16."""
    flags = parse(Flags, argv)
    runs = [run for run in RUNS if flags.only in run.name]
    if flags.sources:
        for run in runs:
            print(f"- {run.name}, {run.gpus} {run.device}: {run.source}. Assumed: {run.assumed}")
        return
    heads = "run | devices | published s | predicted s | error | published MFU | predicted | GiB"
    if flags.best:
        heads += " | best plan s | its layout | saves most"
    print(f"| {heads} |")
    print("|" + "---|" * (heads.count("|") + 1))
    errors = {}
    for run in runs:
        row, error = _row(run, flags)
        print(row, flush=True)
        if not run.eight_bits:
            errors[f"{run.name} on {run.gpus}"] = abs(error)
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        mean = sum(errors.values()) / len(errors)
        said = f"mean error {mean:.1%}, worst {errors[worst]:.1%} ({worst})"
        print(f"{len(errors)} runs in bf16: {said}")


if __name__ == "__main__":
    start(main)
