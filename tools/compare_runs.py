"""Trains the same small GPT under every schedule and tabulates what each took: markdown, CSV and a chart.

Ranks are processes of this machine with real messages. All schedules of one number of ranks take turns in one pool of
processes. Where ranks share cores, a step takes the work of all of them, and what a rank waits for is also its core.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a fresh clone runs it before anything is installed

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from megapipe.checks.run import validate  # noqa: E402
from megapipe.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig  # noqa: E402
from megapipe.data.build import Datasets, build_datasets  # noqa: E402
from megapipe.data.tokenizer import build_tokenizer  # noqa: E402
from megapipe.distributed.axis import CPU  # noqa: E402
from megapipe.distributed.mesh import ProcessMesh  # noqa: E402
from megapipe.errors import UserError  # noqa: E402
from megapipe.models.provider import gpt_provider  # noqa: E402
from megapipe.pipeline_parallel.stopwatch import ran_by_all  # noqa: E402
from megapipe.pipeline_parallel.transport import Op  # noqa: E402
from megapipe.plan import Plan, make_plan  # noqa: E402
from megapipe.schedule import SCHEDULES, entry_of, simulate  # noqa: E402
from megapipe.schedule.measured import spent  # noqa: E402
from megapipe.training.pretrain import Run  # noqa: E402
from pretrain_gpt import forward_step  # noqa: E402

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


@dataclass(frozen=True)
class Row:
    """One schedule. Medians over the steps; loss of the last one.

    Attributes:
        bubble: mean share of the passes' time in which a rank runs none; predicted from the plan's FLOPs.
        mib: most activation that a rank's graphs hold at once, from F to B, in distinct storages.
        sent_mib: by all ranks in one step.
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


class Held:
    """Bytes that the graphs of this thread hold, as saved_tensors_hooks see them."""

    def __init__(self, run: Run) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for module in run.modules for p in module.parameters()}
        self.uses: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        storage = tensor.untyped_storage()
        return tensor if storage.data_ptr() in self.parameters else Kept(self, tensor, storage.data_ptr())

    def add(self, key: int, size: int, uses: int) -> None:
        """One use more or less."""
        before = self.uses[key] > 0
        self.uses[key] += uses
        self.bytes += size * ((self.uses[key] > 0) - before)
        self.peak = max(self.peak, self.bytes)


class Kept:
    """A saved tensor, counted as long as the graph has it."""

    def __init__(self, held: Held, tensor: Tensor, key: int) -> None:
        self.held, self.tensor, self.key, self.size = held, tensor, key, tensor.untyped_storage().nbytes()
        held.add(key, self.size, 1)

    def __del__(self) -> None:
        self.held.add(self.key, self.size, -1)


def main() -> int:
    """Train, print, write. Returns the exit status."""
    args = _arguments()
    rows: list[Row] = []
    try:
        for pp in args.pp:
            configs = [_config(name, pp, args) for name in args.schedules]
            plans = [make_plan(config) for config in configs]
            rows += _pool(pp, list(zip(configs, plans, strict=True)), args.steps)
    except UserError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 2
    text = to_markdown(rows)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "runs.md").write_text(text + "\n", encoding="utf-8")
        (args.out / "runs.svg").write_text(to_svg(rows), encoding="utf-8")
        with (args.out / "runs.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4], help="pipeline ranks, each a process")
    parser.add_argument("--schedules", nargs="+", default=[*SCHEDULES], help="names, files, FILE.py:NAME")
    parser.add_argument("--microbatches", type=int, default=8, help="of one sequence each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="measured ones; one before them warms up")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write runs.md, runs.csv and runs.svg there")
    return parser.parse_args()


def _config(name: str, pp: int, args: argparse.Namespace) -> Config:
    """A run of the small GPT; schedules that leave a choice get two chunks, zb-auto chooses."""
    free = name in SCHEDULES and name != "zb-auto" and entry_of(name).chunks is None
    config = Config(
        model=ModelConfig(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=4,
            max_position_embeddings=args.seq,
            padded_vocab_size=VOCAB + 1,
        ),
        parallel=ParallelConfig(
            pipeline_model_parallel_size=pp,
            pipeline_schedule=name,
            num_virtual_stages_per_pipeline_rank=2 if free else None,
            distributed_backend="gloo",
        ),
        train=TrainConfig(
            micro_batch_size=1, global_batch_size=args.microbatches, seq_length=args.seq, train_iters=100, lr=1e-3
        ),
        data=DataConfig(
            mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCAB, num_workers=0, eval_iters=0, split="1,0,0"
        ),
        world_size=pp,
    )
    validate(config, has_cuda=False)
    return config


def _pool(pp: int, runs: list[tuple[Config, Plan]], steps: int) -> list[Row]:
    """All runs in turn in one pool of ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megapipe.training.pretrain"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=_rank, args=(r, pp, port, runs, steps, sender), daemon=True) for r in range(pp)]
    for process in ranks:
        process.start()
    sender.close()
    try:
        rows: list[Row] = receiver.recv()
        return rows
    except EOFError:
        raise SystemExit("compare_runs.py: a rank failed; its error is above") from None
    finally:
        for process in ranks:
            process.join(timeout=30)


def _rank(rank: int, pp: int, port: int, runs: list[tuple[Config, Plan]], steps: int, sender: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(pp), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  the runs' own lines
    mesh = ProcessMesh.create(ParallelConfig(pipeline_model_parallel_size=pp, distributed_backend="gloo"), CPU)
    data = build_datasets(runs[0][0], build_tokenizer(runs[0][0].data))
    rows = [_train(mesh, config, plan, data, steps) for config, plan in runs]
    if rank == 0:
        sender.send(rows)
    mesh.close()


def _train(mesh: ProcessMesh, config: Config, plan: Plan, data: Datasets, steps: int) -> Row:
    run = Run(config, mesh, gpt_provider, forward_step, data, VOCAB, time.monotonic(), plan=plan)
    run.step()
    sent, took, bubbles, loss = _count_sent(run), [], [], 0.0
    for _ in range(steps):
        mesh.world.barrier()
        began = time.perf_counter()
        loss = run.step().losses["lm loss"]
        took.append(time.perf_counter() - began)
        (ranks,) = ran_by_all([run.pipeline.stopwatch], mesh.pp)
        span = max(row[-1].end for row in ranks) - min(row[0].begin for row in ranks)
        bubbles.append(1 - sum(spent(row).busy for row in ranks) / span / len(ranks))
    sent_bytes, held = sent[0] / steps, Held(run)
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda x: x.tensor if isinstance(x, Kept) else x):
        run.step()
    most = torch.tensor([statistics.median(took), float(held.peak), loss], dtype=torch.float64)
    step_s, peak, loss = mesh.world.all_reduce(most, "max").tolist()
    all_sent = mesh.world.all_reduce(torch.tensor([float(sent_bytes)])).item()
    until_b = simulate(plan.schedule, replace(plan.costs, mem_w=0.0))
    return Row(
        mesh.pp.size,
        plan.schedule.name,
        loss,
        step_s * 1e3,
        config.global_batch_size * config.train.sequence / step_s,
        sum(until_b.idle) / len(until_b.idle) / until_b.makespan,
        statistics.median(bubbles),
        max(until_b.peak) / 2**20,
        peak / 2**20,
        all_sent / 2**20,
    )


def _count_sent(run: Run) -> list[int]:
    """Bytes that this rank sends from here on, as they are posted."""
    transport, total = run.pipeline.transport, [0]
    post = transport.post

    def counted(ops: list[Op]) -> Any:
        total[0] += sum(op.tensor.nbytes for op in ops if op.sends)
        return post(ops)

    transport.post = counted  # type: ignore[method-assign]
    return total


def to_markdown(rows: list[Row]) -> str:
    """A table, numbers of one kind below each other."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", "|---:|---|" + "---:|" * (len(COLUMNS) - 2)]
    for r in rows:
        cells = [str(r.pp), r.schedule, f"{r.loss:.9f}", f"{r.step_ms:.0f}", f"{r.tokens_per_s:.0f}"]
        cells += [f"{r.bubble_predicted:.1%}", f"{r.bubble:.1%}"]
        cells += [f"{x:.2f}" for x in (r.mib_predicted, r.mib, r.sent_mib)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def to_svg(rows: list[Row]) -> str:
    """A bar for each step, what the ranks wait of it lighter; one block for each number of ranks."""
    longest, y, parts = max(r.step_ms for r in rows), 0, []
    for i, r in enumerate(rows):
        if not i or rows[i - 1].pp != r.pp:
            y += 30
            parts.append(f'<text x="8" y="{y}" font-weight="bold">{r.pp} ranks</text>')
        y += 18
        whole = 460 * r.step_ms / longest
        parts += [
            f'<text x="150" y="{y}" text-anchor="end">{escape(r.schedule)}</text>',
            f'<rect x="158" y="{y - 11}" width="{whole:.1f}" height="14" fill="#c9d8ea"/>',
            f'<rect x="158" y="{y - 11}" width="{whole * (1 - r.bubble):.1f}" height="14" fill="#4573a7"/>',
            f'<text x="{164 + whole:.1f}" y="{y}">{r.step_ms:.0f} ms, {r.bubble:.0%} waiting</text>',
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="780" height="{y + 16}" viewBox="0 0 780 {y + 16}">'
    style = "<style>text{font:12px sans-serif;fill:#222}</style>"
    return f'{head}{style}<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    sys.exit(main())
