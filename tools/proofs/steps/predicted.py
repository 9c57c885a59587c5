"""Compare steps of small models on this machine with their prediction from measured passes.

    python -m tools.proofs.steps.predicted --models 20 --seed 0

Each drawn model trains on processes over gloo with one thread each, twice judged:

- replayed: the simulator replays each step from 7 on with the measured times of its own passes
  (megapipe/training/report/again.py). Its makespan and bubble stand next to the measured ones. This
  holds on a busy machine too, and for more ranks than cores.
- ahead: what the log predicts from steps 2 to 6, next to the medians of the steps from 7 on. The
  simulator gives each rank a core of its own. So only models with no more ranks than cores are
  judged: on two cores, two ranks. Where ranks share cores, a pass takes longer while others run.

Another program on the cores spoils the second comparison: passes of later steps take other times.
Linux counts the time that a thread was ready to run and had no core (/proc/self/schedstat). A model
of which a rank waited so for more than --waited of its time is measured again, up to --tries times,
and then not judged. If nothing else can be stopped, priority takes most of the cores:

    sudo sysctl kernel.sched_autogroup_enabled=0    # else a priority counts within a session alone
    sudo nice -n -20 python -m tools.proofs.steps.predicted
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from megapipe.checks.run import validate
from megapipe.commands.ranks import run_ranks
from megapipe.config import Config
from megapipe.data.build import build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.stopwatch import ran_by_all
from megapipe.plan import Plan, make_plan
from megapipe.schedule.measured.costs import MeasuredPass
from megapipe.training.forward_step import forward_step
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.pretrain import Training
from megapipe.training.report.again import MEASURED, predict_again
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved", "breadth-first")
STEP = 0.05
"""Most difference of a predicted step, as a share of the measured one."""
BUBBLE = 0.03
"""Most difference of a predicted bubble, in shares of the passes' time."""
LATER = MEASURED + 2
"""The first measured step. The steps before it, but for the first, give the prediction."""


@dataclass(frozen=True)
class Flags:
    """Compare steps of small models on this machine with their prediction from measured passes."""

    models: int = 20
    """Number of drawn models."""
    seed: int = 0
    """Seed of the drawing."""
    pp: tuple[int, ...] = (2, 2, 2, 3, 4)
    """Pipeline ranks to draw from."""
    steps: int = 15
    """Steps of each model."""
    tries: int = 3
    """Most measurements of a model, if other programs take the cores."""
    waited: float = 0.02
    """A rank that waits for a core for a larger share of its time shares the cores with others."""


@dataclass(frozen=True)
class Ran:
    """What a run measured.

    Attributes:
        rows: the lines of --metrics-file.
        steps: [step from LATER on][pipeline rank] -> its measured passes.
        waited: the largest share of a rank's time in which it was ready and had no core.
    """

    rows: list[dict[str, Any]]
    steps: list[list[list[MeasuredPass]]]
    waited: float


@dataclass(frozen=True)
class Both:
    """A predicted and a measured step: their seconds, and their bubbles."""

    predicted: tuple[float, float]
    measured: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Return the errors of step and bubble, as shares of the step and of the passes' time."""
        step = self.predicted[0] / self.measured[0] - 1
        return step, self.predicted[1] - self.measured[1]

    @property
    def verdict(self) -> str:
        """Return whether both errors are within their bars, in a word."""
        step, bubble = self.errors
        return "holds" if abs(step) <= STEP and abs(bubble) <= BUBBLE else "MISSED"


def drawn(flags: Flags) -> list[Config]:
    """Return the configurations of the drawn models."""
    draw = random.Random(flags.seed)
    found: list[Config] = []
    while len(found) < flags.models:
        pp = draw.choice(flags.pp)
        seq = draw.choice((64, 128))
        micro = draw.choice((1, 2))
        size = micro * pp * draw.choice((2, 3, 4))
        vocab = draw.choice((512, 1024, 4096))
        line = (
            f"--pipeline-model-parallel-size {pp} --pipeline-schedule {draw.choice(SCHEDULES)} "
            f"--num-layers {2 * pp * draw.choice((1, 2))} "
            f"--hidden-size {draw.choice((64, 128, 192))} "
            f"--num-attention-heads 4 --seq-length {seq} --max-position-embeddings {seq} "
            f"--micro-batch-size {micro} --global-batch-size {size} --train-iters {flags.steps} "
            f"--lr 1e-3 --vocab-size {vocab - 1} --padded-vocab-size {vocab} --mock-data "
            "--tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --split 1,0,99 "
            "--distributed-backend gloo --log-interval 1000"
        )
        config = replace(parse(Config, line.split()), world_size=pp)
        try:
            validate(config, has_cuda=False)
            make_plan(config)
        except ConfigError:
            # Some schedules need another number of microbatches.
            continue
        found.append(config)
    return found


def _ready() -> tuple[float, float]:
    """Return the seconds that this process's main thread has run, and was ready without a core."""
    ran, waited, _ = Path("/proc/self/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


class Passes(Callback):
    """Collects the passes of all ranks in the steps from LATER on."""

    def __init__(self) -> None:
        self.steps: list[list[list[MeasuredPass]]] = []

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.progress.iteration >= LATER:
            self.steps += ran_by_all([run.stages.stopwatch], run.mesh.pp)


def _rank(runs: Sequence[tuple[Config, Plan]], file: str) -> list[Ran]:
    """Train each model to its last step, as one of its ranks, and return what was measured.

    Args:
        file: the path of the metrics file, which the rank of the log writes.
    """
    # The log of the runs would hide the table.
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    found = []
    mesh = ProcessMesh.create(runs[0][0].parallel, CPU)
    for n, (config, plan) in enumerate(runs):
        config = config.with_fields(metrics_file=f"{file}{n}")
        tokenizer = build_tokenizer(config.data)
        data = build_datasets(config, tokenizer)
        passes = Passes()
        given = (config, mesh, gpt_provider, forward_step, data, tokenizer.eod, time.monotonic())
        training = Training(*given, plan=plan, hooks=Hooks(callbacks=(passes,)))
        mesh.world.barrier()
        began = _ready()
        training.train()
        ended = _ready()
        ran, waited = (after - before for before, after in zip(began, ended, strict=True))
        share = max(mesh.world.gather_json(waited / (ran + waited)))
        rows = [json.loads(line) for line in Path(f"{file}{n}").read_text().splitlines()]
        found.append(Ran(rows, passes.steps, share))
    mesh.close()
    return found


def ahead(ran: Ran) -> Both:
    """Return the log's prediction from the first steps, and the medians of the later ones."""
    again = ran.rows[-1]["by_measured_passes"]
    later = ran.rows[LATER - 1 :]
    step = median(row["step_ms"] for row in later)
    bubble = median(row["bubble"] for row in later)
    return Both((again["step_ms"] / 1e3, again["bubble"]), (step / 1e3, bubble))


def replayed(ran: Ran, plan: Plan) -> Both:
    """Return the medians of the later steps, predicted from their own passes and measured."""
    later = ran.rows[LATER - 1 :]
    seconds = [row["step_ms"] / 1e3 for row in later]
    again = predict_again(ran.steps, plan.costs, plan.schedule, seconds)
    measured = median(seconds), median(row["bubble"] for row in later)
    return Both((again.step, again.bubble), measured)


def text(config: Config, plan: Plan, ran: Ran, verdicts: Sequence[str]) -> str:
    """Return the row of a model.

    Args:
        verdicts: of the step replayed, and of the one predicted ahead.
    """
    model = config.model
    cells = [
        f"pp {len(plan.schedule.ranks)} {plan.schedule.name:13} {model.num_layers:2} layers of "
        f"{model.hidden:3}, vocabulary {model.padded_vocab_size:4}, {config.num_microbatches:2} x "
        f"{config.batch.micro_batch} x {config.batch.sequence:3}",
        f"{plan.timeline.bubble / plan.timeline.makespan:5.1%}",
    ]
    for both, verdict in zip((replayed(ran, plan), ahead(ran)), verdicts, strict=True):
        (step, bubble), (seconds, measured) = both.predicted, both.measured
        off, points = both.errors
        cells.append(
            f"{step * 1e3:6.1f} {seconds * 1e3:6.1f} {off:+6.1%}  {bubble:5.1%} {measured:5.1%} "
            f"{100 * points:+5.1f}  {verdict}"
        )
    return " | ".join([*cells, f"{ran.waited:.1%}"])


def main(argv: Sequence[str]) -> None:
    """Train the models and print the table. Exit with status 1 if a judged one misses its bars."""
    flags = parse(Flags, argv)
    cores = len(os.sched_getaffinity(0))
    runs = [(config, make_plan(config)) for config in drawn(flags)]
    best = measure(runs, flags, cores)
    print(
        f"{cores} cores. Columns: model | bubble by FLOPs | replayed: step ms predicted, measured, "
        "error, bubble predicted, measured, error in points | ahead: the same | waited for a core"
    )
    count = Counter[tuple[str, str]]()
    for n, (config, plan) in enumerate(runs):
        ran = best[n]
        verdicts = [replayed(ran, plan).verdict, ahead(ran).verdict]
        if len(plan.schedule.ranks) > cores:
            verdicts[1] = "ranks share cores"
        elif ran.waited > flags.waited:
            verdicts[1] = "other programs ran"
        count.update(zip(("replayed", "ahead"), verdicts, strict=True))
        print(text(config, plan, ran, verdicts))
    for name in ("replayed", "ahead"):
        held = count[name, "holds"]
        print(
            f"{name}: {held} of {held + count[name, 'MISSED']} judged are within {STEP:.0%} of the "
            f"step and {100 * BUBBLE:g} points of the bubble"
        )
    raise SystemExit(any(verdict == "MISSED" for _, verdict in count))


def measure(runs: Sequence[tuple[Config, Plan]], flags: Flags, cores: int) -> dict[int, Ran]:
    """Train all models, and those again during which other programs took the cores.

    Args:
        cores: the number of cores. Models with more ranks are trained once.
    Returns: for each model the measurement during which its ranks waited least for a core.
    """
    best: dict[int, Ran] = {}
    left = list(range(len(runs)))
    for _ in range(flags.tries):
        for pp in sorted({len(runs[n][1].schedule.ranks) for n in left}):
            some = [n for n in left if len(runs[n][1].schedule.ranks) == pp]
            with TemporaryDirectory() as folder:
                given = ([runs[n] for n in some], f"{folder}/steps")
                made = run_ranks(pp, _rank, *given, preload=("megapipe.training.pretrain",))[0]
            for n, ran in zip(some, made, strict=True):
                if n not in best or ran.waited < best[n].waited:
                    best[n] = ran
        left = [
            n
            for n in left
            if best[n].waited > flags.waited and len(runs[n][1].schedule.ranks) <= cores
        ]
    return best


if __name__ == "__main__":
    run(main)
