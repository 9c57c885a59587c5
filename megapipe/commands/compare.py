"""Trains the same small GPT under every schedule and tabulates what each took: markdown, CSV, a figure.

Ranks are processes of this machine with real messages. All schedules of one number of ranks take turns in one pool of
processes. Where ranks share cores, a step takes the work of all of them, and what a rank waits for is also its core.
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
from megapipe.schedule.measured.costs import Ran, measured_costs, spent
from megapipe.schedule.views.figure import Files
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training
from megapipe.training.report.counters import measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOCAB = 511
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
WHY = {
    "most": "waits most",
    "table": "table",
    "stages": "stages",
    "messages": "messages",
    "host": "host",
}
"""Columns of --why."""
LEGEND = """\
step ms, tokens/s: medians over the steps. bubble: mean share of the passes' time in which a rank runs none, predicted
from FLOPs and measured. MiB held: the most activation that a rank holds at once, predicted and counted. MiB sent: by
all ranks in a step."""
WHY_LEGEND = """\
waits most: the share of the rank that is idle most, the sum of
  table     what the schedule leaves open where all stages take the same
  stages    what stages of unlike times add
  messages  waiting for messages; below 0, less was waited than the others come to
  host      the time between two passes"""


@dataclass(frozen=True)
class Row:
    """One schedule. Medians over the steps; loss of the last one.

    Attributes:
        bubble: mean share of the passes' time in which a rank runs none; predicted from the plan's FLOPs.
        mib: most activation that a rank's graphs hold at once, from F to B, in distinct storages.
        sent_mib: by all ranks in one step.
        most: the most that a rank is idle, the sum of: what the table leaves open where stages are equal, what unequal
            stages add, waiting for messages (below 0: less than these come to), and the time between two passes.
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
    """A comparison: one small GPT trained under every schedule, and what each took, as a table and files of it.

    Ranks are processes of this machine with real messages; where they share cores, a step takes the work of all.
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
    """Its width."""
    seq: int = 128
    """Tokens of a sequence."""
    steps: int = 5
    """Measured ones; one before them warms up."""
    why: bool = False
    """Say also what the bubble of the rank that waits most is made of."""
    out: str | None = None
    """Write runs.md and runs.csv into this folder."""


def main(argv: Sequence[str]) -> None:
    """Train, print, write."""
    flags = parse(Flags, argv)
    wrong = [f"--pp {n} must be at least 1" for n in flags.pp if n < 1]
    wrong += [f"--steps {flags.steps} must be at least 1"] if flags.steps < 1 else []
    if wrong := [*wrong, *folder_problems({"--out": flags.out}), *file_problems(flags.by_flag)]:
        raise ConfigError(wrong)
    flags.check()
    rows: list[Row] = []
    for pp in flags.pp:
        configs = [_config(name, pp, flags) for name in flags.schedules]
        plans = [make_plan(config) for config in configs]
        runs = list(zip(configs, plans, strict=True))
        rows += run_ranks(pp, _rank, runs, flags.steps, preload=("megapipe.training.pretrain",))[0]
    text = to_markdown(rows, COLUMNS | WHY if flags.why else COLUMNS)
    print(f"{text}\n\n{LEGEND}")
    if flags.why:
        print(WHY_LEGEND)
    if flags.out is not None:
        folder = Path(flags.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_complete(folder / "runs.md", text + "\n")
        with (folder / "runs.csv").open(
            "w", newline="", encoding="utf-8", errors="backslashreplace"
        ) as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    for path, content in (draw(rows, flags) if flags.named else {}).items():
        write_complete(path, content)


def _config(name: str, pp: int, flags: Flags) -> Config:
    """A run of the small GPT; schedules that leave a choice get two chunks, zb-auto chooses."""
    free = name in SCHEDULES and SCHEDULES[name].any_chunks
    line = (
        f"--num-layers {flags.layers} --hidden-size {flags.hidden} --num-attention-heads 4 --seq-length {flags.seq} "
        f"--max-position-embeddings {flags.seq} --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB} "
        f"--padded-vocab-size {VOCAB + 1} --num-workers 0 --eval-iters 0 --split 1,0,0 --micro-batch-size 1 "
        f"--global-batch-size {flags.microbatches} --train-iters 100 --lr 1e-3 --distributed-backend gloo "
        f"--pipeline-model-parallel-size {pp} {'--num-virtual-stages-per-pipeline-rank 2' if free else ''}"
    )
    config = parse(Config, [*line.split(), "--pipeline-schedule", name])
    config = replace(config, world_size=pp)
    validate(config, has_cuda=False)
    return config


def _rank(runs: list[tuple[Config, Plan]], steps: int) -> list[Row]:
    """All runs in turn, on one of their ranks."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  the runs' own lines
    mesh = ProcessMesh.create(runs[0][0].parallel, CPU)
    data = build_datasets(runs[0][0], build_tokenizer(runs[0][0].data))
    rows = [_train(mesh, config, plan, data, steps) for config, plan in runs]
    mesh.close()
    return rows


def _train(mesh: ProcessMesh, config: Config, plan: Plan, data: Datasets, steps: int) -> Row:
    training = Training(
        config, mesh, gpt_provider, forward_step, data, VOCAB, time.monotonic(), plan=plan
    )
    training.driver.whole()
    sent, took, ran, loss = (
        _count_sent(training.run.stages.engine.transport),
        list[float](),
        list[list[list[Ran]]](),
        0.0,
    )
    for _ in range(steps):
        mesh.world.barrier()
        began = time.perf_counter()
        loss = training.driver.whole().losses["lm loss"]
        took.append(time.perf_counter() - began)
        ran += ran_by_all([training.run.stages.stopwatch], mesh.pp)
    sent_bytes, held = sent[0] / steps, held_in_step(training)
    most = torch.tensor([statistics.median(took), float(held.peak), loss], dtype=torch.float64)
    step_s, peak, loss = mesh.world.all_reduce(most, "max").tolist()
    all_sent = mesh.world.all_reduce(torch.tensor([float(sent_bytes)])).item()
    until_b = simulate(plan.schedule, replace(plan.costs, mem_w=0.0))
    costs = measured_costs(ran, plan.schedule.placement, plan.costs, plan.schedule.cuts)
    why = measured(ran, costs, plan.schedule, plan)
    return Row(
        mesh.pp.size,
        plan.schedule.name,
        loss,
        step_s * 1e3,
        config.global_batch_size * config.batch.sequence / step_s,
        sum(until_b.idle) / len(until_b.idle) / until_b.makespan,
        statistics.median(map(_bubble, ran)),
        max(until_b.peak) / 2**20,
        peak / 2**20,
        all_sent / 2**20,
        *(why.bubble, why.of_table, why.of_stages, why.of_messages, why.of_host),
    )


def _bubble(ranks: list[list[Ran]]) -> float:
    span = max(row[-1].end for row in ranks) - min(row[0].begin for row in ranks)
    return 1 - sum(spent(row).busy for row in ranks) / span / len(ranks)


def _count_sent(transport: Transport) -> list[int]:
    """Bytes that this rank sends from here on, as they are posted."""
    total, post = [0], transport.post

    def counted(ops: list[Op]) -> Any:
        total[0] += sum(op.tensor.nbytes for op in ops if op.sends)
        return post(ops)

    transport.post = counted  # type: ignore[method-assign]
    return total


def to_markdown(rows: list[Row], columns: dict[str, str] = COLUMNS) -> str:
    """A table, numbers of one kind below each other."""
    lines = [f"| {' | '.join(columns.values())} |", "|---:|---|" + "---:|" * (len(columns) - 2)]
    for r in rows:
        cells = [
            str(r.pp),
            r.schedule,
            f"{r.loss:.9f}",
            f"{r.step_ms:.0f}",
            f"{r.tokens_per_s:.0f}",
        ]
        cells += [f"{r.bubble_predicted:.1%}", f"{r.bubble:.1%}"]
        cells += [f"{x:.2f}" for x in (r.mib_predicted, r.mib, r.sent_mib)]
        cells += [f"{getattr(r, name):z.1%}" for name in WHY if name in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row], files: Files) -> dict[Path, bytes]:
    """A bar for each step, what the ranks wait of it lighter, and where the waiting was predicted to begin."""
    about = (
        "The same small GPT under every schedule, ranks as processes of one machine: the time of a step, and what part "
        "of it ranks wait. The mark is where waiting would begin as predicted from the plan's FLOPs."
    )

    def paint(figure: Figure) -> None:
        sizes = list(dict.fromkeys(row.pp for row in rows))
        heights = [sum(row.pp == pp for row in rows) + 1.0 for pp in sizes]
        panels = figure.subplots(
            len(sizes), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )[:, 0]
        for axes, pp in zip(panels, sizes, strict=True):
            of = [row for row in rows[::-1] if row.pp == pp]
            names = [row.schedule for row in of]
            axes.barh(names, [r.step_ms for r in of], color="#c9d8ea", label="wait")
            axes.barh(
                names, [r.step_ms * (1 - r.bubble) for r in of], color="#4573a7", label="compute"
            )
            mark = {
                "color": "#c2185b",
                "marker": "|",
                "linestyle": "",
                "markersize": 6,
                "label": "predicted",
            }
            axes.plot([r.step_ms * (1 - r.bubble_predicted) for r in of], names, **mark)
            for n, row in enumerate(of):
                axes.text(row.step_ms, n, f" {row.bubble:.0%}", va="center", fontsize=5)
            axes.set(title=f"{pp} ranks", ylim=(-0.6, len(of) - 0.4))
        panels[-1].set_xlabel("ms a step")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)

    return files.draw(0.6 + 0.13 * len(rows) + 0.25 * len({row.pp for row in rows}), about, paint)
