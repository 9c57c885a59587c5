"""Train the same small GPT under every schedule, and tabulate times, bubbles, memory and messages.

Ranks are processes of this machine with real messages. All schedules of one number of ranks take
turns in one pool of processes. Where ranks share cores, a step takes the work of all of them. A
rank that seems to wait for a message may then wait for a core.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megapipe.checks.run import validate
from megapipe.commands.plan.held_bytes import held_in_step
from megapipe.commands.ranks import run_ranks
from megapipe.config import Config
from megapipe.data.build import Datasets, build_datasets
from megapipe.data.files import file_problems, folder_problems, write_complete
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.messages.transport import Op, Transport
from megapipe.pipeline_parallel.stopwatch import ran_by_all
from megapipe.plan import Plan, make_plan
from megapipe.schedule import SCHEDULES, simulate
from megapipe.schedule.measured.costs import MeasuredPass, measured_costs, spent
from megapipe.schedule.views.figure import Files
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training
from megapipe.training.report.compared import measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOCAB = 511
"""Ids of the tokenizer. With the end-of-document token the embedding has 512 rows."""
COLUMNS = {
    "pp": "pp",
    "schedule": "schedule",
    "loss": "loss",
    "step_ms": "step ms",
    "tokens_per_s": "tokens/s",
    "bubble_predicted": "bubble predicted",
    "bubble": "measured",
    "mib_predicted": "MiB held predicted",
    "mib": "counted",
    "sent_mib": "MiB sent",
}
"""Fields of a row, by the heads of their columns."""
WHY = {
    "most": "waits most",
    "table": "table",
    "stages": "stages",
    "messages": "messages",
    "host": "host",
}
"""Further columns for --why."""
LEGEND = """\
step ms, tokens/s: medians over the steps. bubble: mean share of the passes' time in which a rank
runs none, predicted from FLOPs and measured. MiB held: the most activation that a rank holds at
once, predicted and counted. MiB sent: by all ranks in a step."""
WHY_LEGEND = """\
waits most: the largest idle share of a rank between its own first and last pass. The measured
bubble also has a rank's time before and after them. The share is the sum of
  table     what the schedule leaves open where all stages take the same
  stages    what stages of unlike times add
  messages  waiting for messages; below 0, less was waited than the others come to
  host      the time between two passes"""


@dataclass(frozen=True)
class Row:
    """The measurements of one schedule, as medians over the steps. Fractions are of time.

    Attributes:
        pp: the number of pipeline ranks.
        schedule: the schedule's name.
        loss: the loss of the last step.
        step_ms: milliseconds of a step.
        tokens_per_s: tokens of a step per second, of all ranks together.
        bubble: mean fraction of the passes' time in which a rank runs no pass.
        bubble_predicted: the same fraction, predicted from the stages' FLOPs.
        mib: most MiB of activations that a rank's autograd graphs hold at once.
        mib_predicted: the same MiB, predicted before training.
        sent_mib: MiB that all ranks send in one step.
        most: the largest fraction of the time in which a rank is idle between its own first and
            last pass. The sum of the fractions `table`, `stages`, `messages` and `host`.
        table: idle because of the schedule's order, if all stages took the same time.
        stages: idle because stages take different times.
        messages: idle while waiting for messages. Below 0, the rank waited less than the other
            causes predict.
        host: idle between two passes, while Python prepares the next one.
    """

    pp: int
    schedule: str
    loss: float
    step_ms: float
    tokens_per_s: float
    bubble_predicted: float
    bubble: float
    mib_predicted: float
    mib: float
    sent_mib: float
    most: float
    table: float
    stages: float
    messages: float
    host: float


@dataclass(frozen=True)
class Flags(Files):
    """Train one small GPT under every schedule, and compare loss, time, bubble and memory.

    Ranks are processes of this machine with real messages. Where ranks share cores, a step's time
    is the work of all of them.
    """

    pp: tuple[int, ...] = (2, 4)
    """Pipeline ranks, each a process."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Names, files, FILE.py:NAME."""
    microbatches: int = 8
    """Microbatches, of one sequence each."""
    layers: int = 8
    """Layers of the model."""
    hidden: int = 128
    """Hidden size of the model."""
    seq: int = 128
    """Tokens of a sequence."""
    steps: int = 5
    """Number of measured steps. One step before them warms up."""
    why: bool = False
    """Also print the causes of the bubble of the rank that waits most."""
    out: str | None = None
    """Write runs.md and runs.csv into this folder."""


def main(argv: Sequence[str]) -> None:
    """Train under each schedule, print the table, and write the files that the flags name.

    Raises: ConfigError for wrong flags, and for a schedule that cannot run at this size.
    """
    flags = parse(Flags, argv)
    wrong = [f"--pp {n} must be at least 1" for n in flags.pp if n < 1]
    if flags.steps < 1:
        wrong.append(f"--steps {flags.steps} must be at least 1")
    wrong += folder_problems({"--out": flags.out})
    wrong += file_problems(flags.by_flag)
    if wrong:
        raise ConfigError(wrong)
    flags.check()
    rows: list[Row] = []
    for pp in flags.pp:
        # All plans of these ranks are made before they train, so that wrong flags show at once.
        configs = [_config(name, pp, flags) for name in flags.schedules]
        plans = [make_plan(config) for config in configs]
        runs = list(zip(configs, plans, strict=True))
        # All ranks return the same rows. They are forked from a process that has imported torch,
        # which takes seconds.
        rows += run_ranks(pp, _rank, runs, flags.steps, preload=("megapipe.training.pretrain",))[0]
    columns = COLUMNS | WHY if flags.why else COLUMNS
    text = to_markdown(rows, columns)
    print(f"{text}\n\n{LEGEND}")
    if flags.why:
        print(WHY_LEGEND)
    if flags.out is not None:
        _write(Path(flags.out), text, rows)
    if flags.named:
        for path, content in draw(rows, flags).items():
            write_complete(path, content)


def _write(folder: Path, text: str, rows: Sequence[Row]) -> None:
    """Write the table `text` to runs.md of the folder, and the rows to runs.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    write_complete(folder / "runs.md", text + "\n")
    # The csv module writes its own ends of lines. A schedule may be a file whose name is no text.
    path = folder / "runs.csv"
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def _config(name: str, pp: int, flags: Flags) -> Config:
    """Return the configuration of a run of the small GPT on `pp` ranks under a schedule.

    A schedule that leaves the number of stages open gets two on each rank. zb-auto chooses the
    number.
    """
    line = (
        f"--num-layers {flags.layers} --hidden-size {flags.hidden} --num-attention-heads 4 "
        f"--seq-length {flags.seq} --max-position-embeddings {flags.seq} --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --padded-vocab-size {VOCAB + 1} "
        "--num-workers 0 --eval-iters 0 --split 1,0,0 --micro-batch-size 1 "
        f"--global-batch-size {flags.microbatches} --train-iters 100 --lr 1e-3 "
        f"--distributed-backend gloo --pipeline-model-parallel-size {pp}"
    )
    if name in SCHEDULES and SCHEDULES[name].any_chunks:
        line += " --num-virtual-stages-per-pipeline-rank 2"
    # The name of a file may have blanks, so it is no part of the line.
    config = parse(Config, [*line.split(), "--pipeline-schedule", name])
    config = replace(config, world_size=pp)
    # The ranks are processes over gloo, whatever devices there are.
    validate(config, has_cuda=False)
    return config


def _rank(runs: list[tuple[Config, Plan]], steps: int) -> list[Row]:
    """Train all runs one after another, as one rank of each. Return a row for each run.

    Args:
        runs: (configuration, plan) of each run.
        steps: the number of measured steps of each run.
    """
    # The log lines of the trainings would hide the table.
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # Mesh and data are the same under every schedule.
    config, _ = runs[0]
    mesh = ProcessMesh.create(config.parallel, CPU)
    data = build_datasets(config, build_tokenizer(config.data))
    rows = [_train(mesh, config, plan, data, steps) for config, plan in runs]
    mesh.close()
    return rows


def _train(mesh: ProcessMesh, config: Config, plan: Plan, data: Datasets, steps: int) -> Row:
    """Train one warm-up step and `steps` measured steps.

    Args:
        mesh: this rank's mesh.
        data: the training samples.
        steps: the number of measured steps.
    Returns: the row of the table, which is equal on all ranks.
    """
    training = Training(
        config, mesh, gpt_provider, forward_step, data, VOCAB, time.monotonic(), plan=plan
    )
    # The first step allocates memory, so it is slower than the others.
    training.driver.whole()
    stages = training.run.stages
    sent = _count_sent(stages.engine.transport)
    times: list[float] = []
    ran: list[list[list[MeasuredPass]]] = []
    loss = 0.0
    for _ in range(steps):
        # All ranks begin together, so that none waits for a rank that is still sharing its times.
        mesh.world.barrier()
        began = time.perf_counter()
        loss = training.driver.whole().losses["lm loss"]
        times.append(time.perf_counter() - began)
        ran += ran_by_all([stages.stopwatch], mesh.pp)
    sent_bytes = sent[0] / steps
    # Counting slows a step down, so it has a step of its own, after the timed ones.
    held = held_in_step(training)
    # A step is as long as on its slowest rank. Only the last stage has a loss.
    most = torch.tensor([statistics.median(times), float(held.peak), loss], dtype=torch.float64)
    step_s, peak, loss = mesh.world.all_reduce(most, "max").tolist()
    all_sent = mesh.world.all_reduce(torch.tensor([float(sent_bytes)])).item()
    # Autograd's graphs hold activations until B. What W needs is held elsewhere, and what a pass
    # needs for a moment is in no graph.
    until_b = simulate(plan.schedule, replace(plan.costs, mem_w=0.0, mem_p=0.0))
    costs = measured_costs(ran, plan.schedule.placement, plan.costs, plan.schedule.cuts)
    why = measured(ran, costs, plan.schedule, plan)
    return Row(
        pp=mesh.pp.size,
        schedule=plan.schedule.name,
        loss=loss,
        step_ms=step_s * 1e3,
        tokens_per_s=config.global_batch_size * config.batch.sequence / step_s,
        bubble_predicted=sum(until_b.idle) / len(until_b.idle) / until_b.makespan,
        bubble=statistics.median(map(_bubble, ran)),
        mib_predicted=max(until_b.peak) / 2**20,
        mib=peak / 2**20,
        sent_mib=all_sent / 2**20,
        most=why.bubble,
        table=why.of_table,
        stages=why.of_stages,
        messages=why.of_messages,
        host=why.of_host,
    )


def _bubble(ranks: list[list[MeasuredPass]]) -> float:
    """Return the fraction of a step's time in which a rank runs no pass, as a mean over ranks.

    Args:
        ranks: the passes of each rank, with their times. The first and the last bound the step.
    """
    # From the first pass of any rank to the last pass of any rank.
    span = max(row[-1].end for row in ranks) - min(row[0].begin for row in ranks)
    return 1 - sum(spent(row).busy for row in ranks) / span / len(ranks)


def _count_sent(transport: Transport) -> list[int]:
    """Count the bytes that this rank sends from now on.

    Args:
        transport: sends this rank's messages. The transport's method `post` is replaced by one that
            counts.
    Returns: a list with one number, the bytes so far. The number grows with every message.
    """
    total = [0]
    post = transport.post

    def counted(ops: list[Op]) -> Any:
        total[0] += sum(op.tensor.nbytes for op in ops if op.sends)
        return post(ops)

    transport.post = counted  # type: ignore[method-assign]
    return total


def to_markdown(rows: list[Row], columns: dict[str, str] = COLUMNS) -> str:
    """Return a markdown table with a line for each row.

    Args:
        rows: the measurements of each schedule.
        columns: the title of each column by the field of Row: COLUMNS, or COLUMNS and WHY.
    """
    right_aligned = "---:|" * (len(columns) - 2)
    lines = [f"| {' | '.join(columns.values())} |", f"|---:|---|{right_aligned}"]
    for r in rows:
        # Nine digits of the loss: schedules that agree bit by bit agree in all of them.
        cells = [str(r.pp), r.schedule, f"{r.loss:.9f}", f"{r.step_ms:.0f}"]
        cells += [f"{r.tokens_per_s:.0f}", f"{r.bubble_predicted:.1%}", f"{r.bubble:.1%}"]
        cells += [f"{mib:.2f}" for mib in (r.mib_predicted, r.mib, r.sent_mib)]
        # z: a small negative share is printed as 0.0%, not as -0.0%.
        cells += [f"{getattr(r, name):z.1%}" for name in WHY if name in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row], files: Files) -> dict[Path, bytes]:
    """Return a bar chart of the step times, as the content of each file to write.

    The lighter part of a bar is the time that ranks wait. A mark shows where the waiting was
    predicted to begin.

    Args:
        rows: the measurements of each schedule.
        files: the paths and the size of the figure, by the flags.
    """
    about = (
        "The same small GPT under every schedule, ranks as processes of one machine: the time of a "
        "step, and what part of it ranks wait. The mark is where waiting would begin as predicted "
        "from the plan's FLOPs."
    )
    # A panel for each number of ranks, as high as its number of bars.
    panels_of: dict[int, list[Row]] = {}
    for row in rows:
        panels_of.setdefault(row.pp, []).append(row)

    def paint(figure: Figure) -> None:
        heights = [len(of_size) + 1.0 for of_size in panels_of.values()]
        ratios = {"height_ratios": heights}
        panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[
            :, 0
        ]
        mark = {
            "color": "#c2185b",
            "marker": "|",
            "linestyle": "",
            "markersize": 6,
            "label": "predicted",
        }
        for axes, (pp, of_size) in zip(panels, panels_of.items(), strict=True):
            # The first bar is drawn at the bottom, so the rows go backwards.
            bars = of_size[::-1]
            names = [row.schedule for row in bars]
            computed = [row.step_ms * (1 - row.bubble) for row in bars]
            predicted = [row.step_ms * (1 - row.bubble_predicted) for row in bars]
            # The darker bar covers the computing part of the lighter one.
            axes.barh(names, [row.step_ms for row in bars], color="#c9d8ea", label="wait")
            axes.barh(names, computed, color="#4573a7", label="compute")
            axes.plot(predicted, names, **mark)
            for n, row in enumerate(bars):
                axes.text(row.step_ms, n, f" {row.bubble:.0%}", va="center", fontsize=5)
            axes.set(title=f"{pp} ranks", ylim=(-0.6, len(bars) - 0.4))
        panels[-1].set_xlabel("ms a step")
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=3)

    height = 0.6 + 0.13 * len(rows) + 0.25 * len(panels_of)
    return files.draw(height, about, paint)
