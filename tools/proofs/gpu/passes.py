"""The passes of a schedule without a model: the real executor, messenger and transport over stages
that do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.groups import links_of
from megapipe.errors import ScheduleError
from megapipe.pipeline_parallel.engine import SLACK, _programs
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import P2PMode, Transport
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import SCHEDULES, Costs, Kind, Schedule, build
from megapipe.schedule.costs import UNIT
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from tools.proofs.gpu.record import Group, Recorder, recording
from tools.proofs.gpu.rules import Item, Work

GPU = torch.device("cuda", 0)
SHAPE = (2, 1, 4)
NAMES = {Kind.F: "forward", Kind.W: "weight", Kind.E: "look_up", Kind.S: "give", Kind.C: "combine"}
NAMES |= {Kind.T: "head_gradient", Kind.EW: "rows_gradient"}


class NoData(TorchFunctionMode):
    """Within the block, tensors made on the device have no data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(
            *args, **(kwargs | {"device": "meta"} if kwargs.get("device") == GPU else kwargs)
        )


class Idle:
    """A stage whose passes take their time on the device and leave a tensor without contents."""

    def __init__(self, by: Recorder, durations: Mapping[str, float]) -> None:
        self.by, self.durations, self.share, self.own = by, durations, self, {"vocabulary": self}

    def backward(self, microbatch: int, grad: object, *, weights: bool) -> torch.Tensor:
        return self._run(Kind.BW if weights else Kind.B)

    def overlapped_forward_backward(
        self, n: int, x: object, other: Idle, m: int, grad: object, *, weights: bool
    ) -> Any:
        return self._run(Kind.F), other.backward(m, grad, weights=weights)

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES.values():  # what only some stages have
            raise AttributeError(name)
        kind = next(kind for kind, called in NAMES.items() if called == name)
        return lambda *given: self._run(kind)

    def _run(self, kind: Kind) -> torch.Tensor:
        self.by.items.append(Work(self.durations[kind]))
        return torch.empty(SHAPE, dtype=torch.bfloat16, device=GPU)


def records_of(
    table: Schedule,
    mode: str,
    *,
    evaluate: bool = False,
    overlap: bool = True,
    costs: Costs = UNIT,
    lazy: bool = False,
) -> dict[int, list[Item]]:
    """Return the requests of every rank of a pipeline in one step under a table. lazy: links are
    not opened beforehand.
    """
    pp, place = len(table.ranks), table.placement
    parallel = ParallelConfig(
        pipeline_model_parallel_size=pp, vocab_parallel_pipeline=place.vocabulary
    )
    programs, in_flight = _programs(table, costs, evaluate, overlap)
    durations, everyone = costs.durations(place), tuple(range(pp))
    records: dict[int, list[Item]] = {}
    for rank in everyone:
        by = Recorder(rank)
        links: Any = tuple(Group(by, f"link{n}", everyone) for n in range(links_of(parallel)))
        group: Any = Group(by, "pp", everyone)
        axis = Axis(rank, pp, everyone, group, GPU, None, links)
        stages: Any = {
            s: Idle(by, {k: row[s] for k, row in durations.items()}) for s in place.stages_on(rank)
        }
        with recording(), NoData():
            comm = Messenger(
                axis,
                SHAPE,
                torch.bfloat16,
                transport=Transport(axis, mode),
                beyond_neighbours=place.vocabulary,
                sends_in_flight=in_flight[rank] + SLACK,
            )
            if not lazy:
                comm.open_links(place)
            execute(programs[rank], place, stages, comm, watch=Stopwatch(CPU))
        records[rank] = by.items
    return records


def tables(sizes: tuple[int, ...], whole: bool) -> Iterator[Schedule]:
    """Every schedule of the catalogue that there is with these numbers of ranks, and some with
    shared vocabularies.
    """
    for pp in sizes:
        for name, entry in SCHEDULES.items():
            counts = {pp, 2 * pp, 2 * pp + 1, 4 * pp} if whole else {2 * pp}
            for chunks in (None, 3) if entry.chunks is None and whole else (None,):
                for m in sorted(counts):
                    if not (entry.searched and pp * m > 32):
                        yield from built(name, pp, m, chunks)
            if not entry.searched:
                for table in built(name, pp, 2 * pp):
                    try:
                        yield with_vocabulary(table)
                    except ScheduleError:  # a rank without a stage of a chain
                        continue


def built(name: str, pp: int, m: int, chunks: int | None = None) -> Iterator[Schedule]:
    """The schedule, if there is one of these numbers."""
    options: dict[str, Any] = {"effort": 0.2} if SCHEDULES[name].searched else {}
    try:
        yield build(name, pp, m, chunks=chunks, **options)
    except ScheduleError:
        return


def ways(table: Schedule) -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and the arguments of `records_of`, of every way to run a table."""
    paired = any(len(step) > 1 for row in table.ranks for step in row)
    for mode in P2PMode:
        for evaluate in (False, True):
            for overlap in (True, False) if paired and not evaluate else (True,):
                text = f"{mode} {table.name} pp {len(table.ranks)} m {table.num_microbatches}"
                text += (
                    " vocabulary" * table.placement.vocabulary
                    + " evaluation" * evaluate
                    + " unpaired" * (not overlap)
                )
                yield text, {"mode": mode, "evaluate": evaluate, "overlap": overlap}
