"""Two passes together: what a piece of them costs the host, and what they hide of a real
all-to-all.

    python tools/bench/pairs.py                          # no-op stages, on one thread each
    torchrun --nproc-per-node 4 tools/bench/pairs.py     # ep 2, pp 2: steps with pairs and without

The second one trains a small model with experts over gloo. Steps with pairs and without take turns
in one run, so that whatever else the machine does meets both; a pair may hide only what the cores
have room for.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from megapipe.config import ModelConfig, ParallelConfig
from megapipe.distributed.axis import CPU, Pending
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.shared_memory import Started
from megapipe.flags.parse import parse, run
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import partition
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.shapes.pairs.together import How, Together
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Costs, Schedule, build, entry_of, unpaired
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.tensor_parallel.rng import initialize


@dataclass(frozen=True)
class Flags:
    """Two passes together: what a piece costs the host, and under torchrun what they hide of a real
    all-to-all.
    """

    pieces: int = 50
    """Waits of each no-op pass."""
    repeats: int = 9
    """Measured ones; one before them warms up."""
    schedule: str = "interleaved"
    """Under torchrun."""
    layers: int = 8
    """Of the model under torchrun."""
    hidden: int = 256
    """Its width."""
    tokens: int = 256
    """Of each of its microbatches."""
    microbatches: int = 8
    """Of each step."""
    link_us: float = 0.0
    """Microseconds that each all-to-all takes longer than gloo's, as between machines; without work
    of the host.
    """


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        _real(flags)
    else:
        _no_op(flags)


def _no_op(flags: Flags) -> None:
    """Do nothing in a pass but wait for what it needs."""
    done = Started(lambda: None)

    def work() -> None:
        for _ in range(flags.pieces):
            Pending(torch.empty(0), done).wait()

    def median_us(how: How) -> float:
        together, took = Together(CPU), []
        for _ in range(flags.repeats * 20):
            watch = Stopwatch(CPU)
            begin = time.perf_counter()
            together.run(work, work, how, watch)
            took.append((time.perf_counter() - begin) / (2 * flags.pieces) * 1e6)
        return statistics.median(took)

    apart, both = median_us(How.APART), median_us(How.ONE_BEGINS)
    print(
        f"host time of a piece, medians: {apart:.2f} us one after the other, {both:.2f} us "
        "together, ",
        end="",
    )
    print(f"{both - apart:.2f} us more")


def _real(flags: Flags) -> None:
    mesh = ProcessMesh.create(
        ParallelConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=2), CPU
    )
    if flags.link_us:
        _lengthen(flags.link_us / 1e6)
    chunks = 2 if entry_of(flags.schedule).any_chunks else None
    schedule = build(flags.schedule, 2, flags.microbatches, chunks=chunks)
    tables = unpaired(schedule), pairs(schedule, Costs(link_f=0.3, link_b=0.3), split=False)
    steps = [_step(flags, mesh, table) for table in tables]
    times: list[list[tuple[float, float]]] = [[] for _ in steps]
    for _ in range(flags.repeats + 1):
        for step, of in zip(steps, times, strict=True):
            mesh.world.barrier()
            begin = time.perf_counter()
            exposed = step()
            mesh.world.barrier()
            of.append((time.perf_counter() - begin, exposed))
    if mesh.world.rank == 0:
        (plain, waits), (paired, hidden) = (
            [statistics.median(x) for x in zip(*of[1:], strict=True)] for of in times
        )
        ratios = [b[0] / a[0] for a, b in zip(*(of[1:] for of in times), strict=True)]
        print(
            f"{schedule.name}, pp 2, ep 2, {os.cpu_count()} cores, medians of {flags.repeats} "
            "steps of each in turns:"
        )
        print(
            f"one after the other {plain * 1e3:.0f} ms, of which rank 0 waited for experts "
            f"{waits * 1e3:.0f} ms"
        )
        print(
            f"with pairs          {paired * 1e3:.0f} ms, of which rank 0 waited for experts "
            f"{hidden * 1e3:.0f} ms"
        )
        print(f"step by step {statistics.median(ratios):.3f} of the time")
    mesh.close()


def _step(flags: Flags, mesh: ProcessMesh, table: Schedule) -> Callable[[], float]:
    """A step under the table; returns the seconds that its passes waited for collectives."""
    model = ModelConfig(
        num_layers=flags.layers,
        hidden_size=flags.hidden,
        num_attention_heads=4,
        max_position_embeddings=flags.tokens,
        padded_vocab_size=256,
        num_experts=4,
        moe_ffn_hidden_size=2 * flags.hidden,
        moe_router_topk=2,
        moe_router_force_load_balancing=True,
        moe_token_dispatcher_type="alltoall",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=True,
    )
    spans = partition(flags.layers, table.placement)
    own = table.placement.stages_on(mesh.pp.rank)
    stages = [gpt_provider(model, spans[stage], mesh.tp) for stage in own]
    for stage in stages:
        initialize(stage, 1, mesh.tp)
    engine = ForwardBackward(mesh, table, config=model)
    tokens = torch.randint(0, 256, (flags.microbatches, 1, flags.tokens + 1))

    def forward(data, module):  # type: ignore[no-untyped-def]
        batch = next(data)
        return module(batch[:, :-1], labels=batch[:, 1:]), lambda losses: (losses.mean(), {})

    def step() -> float:
        watch = Stopwatch(CPU)
        engine(
            forward_step_func=forward,
            data_iterator=[iter(tokens) for _ in stages],
            model=stages,
            num_microbatches=flags.microbatches,
            seq_length=flags.tokens,
            micro_batch_size=1,
            stopwatch=watch,
        )
        for module in stages:
            module.zero_grad()
        return watch.exposed_communication

    return step


def _lengthen(seconds: float) -> None:
    """Let every collective of a pass take longer than gloo takes, by a given time."""
    made, wait = Pending.__init__, Pending.wait

    def init(self, *args, **given):  # type: ignore[no-untyped-def]
        made(self, *args, **given)
        object.__setattr__(self, "over", time.perf_counter() + seconds)

    def later(self):  # type: ignore[no-untyped-def]
        work = self.work
        if work is not None:
            over = self.over

            def both() -> None:
                for one in work if isinstance(work, Sequence) else (work,):
                    one.wait()
                time.sleep(max(0.0, over - time.perf_counter()))

            object.__setattr__(self, "work", Started(both))
        return wait(self)

    Pending.__init__, Pending.wait = init, later  # type: ignore[method-assign]


if __name__ == "__main__":
    run(main)
