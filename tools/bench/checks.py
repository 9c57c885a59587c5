"""Measure what all checks add to a start and to a step, in milliseconds of one core: `python
tools/bench/checks.py`.

Ranks check side by side, so that a start waits for one rank's checks, and for the store that all of
them ask. The store is one process, whose time grows with the ranks: its slope is measured, and
1,024 ranks are reckoned from it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megapipe.checkpoint.lock import one_run
from megapipe.checkpoint.save_load import check_save
from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.data.build import build_datasets
from megapipe.data.indexed import IndexedWriter
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.meeting.agreement import agree
from megapipe.distributed.meeting.meeting import call_the_roll
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.watch.watch import Watch
from megapipe.plan import make_plan
from megapipe.training.forward_step import forward_step
from megapipe.training.guards.model import check_ownership
from megapipe.training.guards.process import Stopping
from megapipe.training.guards.ranks import contents, facts
from megapipe.training.guards.replicas import hashes
from megapipe.training.pretrain import Training
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult

FLAGS = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 8191 --padded-vocab-size 8192 --micro-batch-size "
    "1 --split 1,0,0 "
    "--global-batch-size 16 --train-iters 100 --save-interval 100 --num-workers 0 --eval-iters 0"
)
STEPS, IDLE_S = 2000, 5.0


def ms(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Return the milliseconds that one call takes."""
    began = clock()
    work()
    return 1e3 * (clock() - began)


def meeting(ranks: int, says: dict[str, str]) -> float:
    """Return the milliseconds until all ranks have met and compared, median of 5.

    Ranks are threads with connections of their own.
    """
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, None, False) for _ in range(ranks)]

    def one(rank: int, turn: int) -> None:
        store = PrefixStore(str(turn), clients[rank])
        call_the_roll(PrefixStore("roll", store), rank, ranks, 60)
        agree(PrefixStore("agreement", store), rank, ranks, says)

    with ThreadPoolExecutor(ranks) as pool:
        turns = (lambda n=n: list(pool.map(one, range(ranks), [n] * ranks)) for n in range(5))
        return statistics.median(ms(turn, time.perf_counter) for turn in turns)


def at_start(config: Config, run: Run, says: dict[str, str]) -> dict[str, float]:
    """Milliseconds of each check of a start."""
    mesh, folder = run.mesh, config.checkpoint.save
    assert folder is not None
    place, named = run.plan.schedule.placement, dict(run.modules[0].named_parameters())
    took = {
        "flags and files (`validate`)": ms(lambda: validate(config, has_cuda=False)),
        "digests of source, data, tokenizer, table": ms(
            lambda: facts(config, run.plan, [gpt_provider, forward_step])
        ),
        "data and tokenizer as the checkpoint knows them": ms(lambda: contents(config)),
        "who owns which parameter": ms(
            lambda: check_ownership(run.modules, config.model, gpt_provider, place, mesh)
        ),
        "room and rights in --save": ms(lambda: check_save(folder, 0, mesh, 1)),
        "the lock of --save": ms(one_run(folder, mesh).__enter__),
    }
    size = sum(x.numel() * x.element_size() for x in named.values())
    took[f"hash of {size / 2**20:.0f} MiB of weights, to compare replicas"] = ms(
        lambda: hashes(named, mesh.device)
    )
    took["meeting and comparing, 4 ranks over a TCP store"] = meeting(4, says)
    return took


def at_step(config: Config, training: Training) -> dict[str, float]:
    """Milliseconds of each check of a step at which nothing is due."""
    run = training.run
    stopping, result = (
        Stopping(config.guards, run.mesh, 0.0),
        StepResult({"lm loss": 2.0}, 1.0, 1, skipped=False),
    )

    def steps() -> None:
        for n in range(1, STEPS + 1):
            training.driver.guard.step(lambda limits: result, n, 1.0, 0)
            training.saving.look()
            stopping.reason(n)

    def passes() -> None:
        for _ in range(STEPS):
            run.mesh.position.enter("a pass")

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = PrefixStore("run", TCPStore("127.0.0.1", server.port, None, False))
    with Watch(replace(run.mesh, store=store)):
        beside = ms(lambda: time.sleep(IDLE_S))
    number = 2 * config.num_microbatches
    return {
        "guard, signals, saves under way": ms(steps) / STEPS,
        f"where the rank is, noted for {number} passes": ms(passes) / STEPS * number,
        "the watch beside it, for 100 ms, the store's answers with it": beside / IDLE_S * 0.1,
        "look at the files' sizes (at evaluations and saves only)": ms(training.check_files),
    }


def main() -> None:
    """Measure and print two tables."""
    with TemporaryDirectory() as name:
        with IndexedWriter(f"{name}/data", np.uint16) as writer:
            writer.add_documents(np.arange(10**6) % 8191, np.full(10_000, 100))
        config = parse(
            Config, [*FLAGS.split(), "--data-path", f"{name}/data", "--save", f"{name}/run"]
        )
        plan, tokenizer = make_plan(config), build_tokenizer(config.data)
        data = build_datasets(config, tokenizer)
        given = config, ProcessMesh.single(), gpt_provider, forward_step, data, tokenizer.eod, 0.0
        training = Training(*given, plan=plan)
        says = facts(config, plan, [gpt_provider, forward_step])
        start, step = at_start(config, training.run, says), at_step(config, training)
        few, many = meeting(16, says), meeting(128, says)
    slope = (many - few) / (128 - 16)
    print(
        "\n| at start | ms |\n|---|---|",
        *(f"| {name} | {x:.1f} |" for name, x in start.items()),
        sep="\n",
    )
    print(f"| all, of a rank of 4 | {sum(start.values()):.0f} |")
    print(f"| meeting, 16 and 128 ranks | {few:.0f}, {many:.0f} |")
    whole = sum(start.values()) + 1020 * slope
    print(f"| all at 1,024: {slope:.2f} ms of the store for each further rank | {whole:.0f} |")
    print(
        "\n| at a step | us |\n|---|---|",
        *(f"| {name} | {1e3 * x:.1f} |" for name, x in step.items()),
        sep="\n",
    )
    always = sum([*step.values()][:-1])
    print(
        f"| all when nothing is due, of a step of 100 ms | {1e3 * always:.0f} = {always / 100:.3%} "
        "|"
    )


if __name__ == "__main__":
    main()
