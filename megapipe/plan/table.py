"""The plan as text, printed before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megapipe.config import Config
from megapipe.notebook import aligned, html_table
from megapipe.partition.layout import FLAG as LAYOUT
from megapipe.partition.layout import layout_string
from megapipe.partition.spans import LayerSpan
from megapipe.plan.context import context_line, expert_line
from megapipe.plan.families.offload import host_bytes
from megapipe.plan.logits import FREE
from megapipe.plan.plan import Plan, stages_with_depths
from megapipe.plan.state import GIB, bytes_at_peak, bytes_of_state

_HEADER = (
    "stage",
    "rank",
    "chunk",
    "layers",
    "holds",
    "parameters",
    "forward GFLOP",
    "time share",
    "peak GiB",
)


def table(plan: Plan, parameters: Sequence[int] | None = None) -> str:
    """Return the table of stages as text, with the columns of `cells_of`.

    Args:
        parameters: number of parameters of each stage, counted on the built model; None to count
            them by formula.
    """
    return "\n".join(aligned(cells_of(plan, parameters)))


def memory_table(plan: Plan, config: Config) -> str:
    """Return a table of each rank's memory in GiB at its peak, with a column for each use.

    Columns that are empty on all ranks are left out.
    """
    rows = bytes_at_peak(plan, config)
    names = [name for name in rows[0] if any(round(row[name] / GIB, 4) for row in rows)]
    cells = [["rank", *names, "peak GiB"]]
    for rank, row in enumerate(rows):
        sizes = [*(row[name] for name in names), sum(row.values())]
        cells.append([str(rank), *(f"{size / GIB:.3g}" for size in sizes)])
    return "\n".join(aligned(cells))


def cells_of(plan: Plan, parameters: Sequence[int] | None = None) -> list[tuple[str, ...]]:
    """Return the table of stages as text cells: first the column titles, then a row for each stage.

    A row begins with the numbers of the stage, of its rank, and of the stage on that rank, from 0.
    Next are the stage's layers, by global numbers from 0, and "embedding", "loss" or "mtp" if it
    has them. Parameters follow: a tied weight counts with the embedding alone where the head is on
    the same rank. Then come the forward GFLOP of a microbatch over all tensor-parallel ranks, and
    the stage's share of all compute time. Last is the predicted peak memory of its rank in GiB.

    Args:
        parameters: number of parameters of each stage, counted on the built model; None to count
            them by formula.
    """
    place = plan.schedule.placement
    # Not 0, for pieces that cost nothing.
    total = sum(work.time for work in plan.works) or 1.0
    # Computed once for all lines: a rank's peak follows from the whole table.
    peaks = plan.peak_bytes
    rows: list[tuple[str, ...]] = [_HEADER]
    for stage, rank in enumerate(place.rank_of):
        span = plan.spans[stage]
        work = plan.works[stage]
        count = work.parameters if parameters is None else parameters[stage]
        # A rank with both ends of a tied model has their weight once.
        count -= round(plan.repeated(stage))
        rows.append(
            (
                str(stage),
                str(rank),
                str(place.stages_on(rank).index(stage)),
                _numbers(span),
                _holds(span),
                f"{count:,}",
                f"{work.f * 1e-9:.4g}",
                f"{work.time / total:.1%}",
                f"{peaks[rank] / GIB:.3g}",
            )
        )
    return rows


def to_html(plan: Plan) -> str:
    """Return the table as HTML, for a notebook, with the schedule and its predicted bubble."""
    time = plan.timeline
    bubble = time.bubble / time.makespan if time.makespan else 0.0
    peak = max(plan.peak_bytes) / GIB
    caption = f"{plan.schedule.name}: predicted bubble {bubble:.1%}, peak {peak:.3g} GiB on a rank"
    lines = [html_table(cells_of(plan), caption)]
    lines += [f"<p>{escape(line)}</p>" for line in own_lines(plan) if line]
    return "\n".join(lines)


def summary(plan: Plan, config: Config, parameters: Sequence[int] | None = None) -> str:
    """Return the table of stages with the lines below it.

    The lines give the size of a checkpoint, and the bytes that context and expert parallelism send.
    In a model with experts, a line says how many parameters a token uses.

    Args:
        parameters: number of parameters of each stage, counted on the built model; None to count
            them by formula.
    """
    lines = [
        table(plan, parameters),
        _active(plan),
        checkpoint_line(plan, config),
        context_line(plan, config),
        expert_line(config),
        *own_lines(plan),
    ]
    return "\n".join(filter(None, lines))


def own_lines(plan: Plan) -> list[str]:
    """Return the lines on optional features, such as sharding, below the table of stages."""
    return [one.summary(plan) for one in plan.own.values()]


def _active(plan: Plan) -> str:
    """Return a line on the number of parameters that a token uses; "" if it uses all."""
    # DualPipe's second chain has the same parameters once more.
    works = plan.works[: plan.schedule.placement.chain]
    whole = sum(work.parameters for work in works)
    unused = sum(work.unused for work in works)
    if not unused:
        return ""
    return (
        f"experts: each token uses {whole - unused:,} of {whole:,} parameters; "
        "FLOPs and MFU count those alone"
    )


def layout_of_plan(plan: Plan) -> str:
    """Return the layout string of a plan, with its layers and multi-token prediction."""
    return layout_string(plan.counts, stages_with_depths(plan.schedule.placement))


def changes(plan: Plan) -> str:
    """Return text that compares an automatic split with the split that it replaced.

    Lines on activations that the table offloads or recomputes follow. The text is "" for a given
    split whose activations stay on the device.
    """
    lines = _split_lines(plan)
    for one in plan.own.values():
        lines += one.changes(plan)
    return "\n".join(lines)


def _split_lines(plan: Plan) -> list[str]:
    before = plan.before
    if before is None:
        return []
    lines = [f"{LAYOUT} auto, predicted under {plan.schedule.name}:"]
    for when, one in (("before", before), ("after", plan)):
        timeline = one.timeline
        # How even the split is by work alone, to compare with what the schedule makes of it.
        times = [work.time for work in one.works]
        longest = max(times) * len(times) / (sum(times) or 1.0)
        idle = sum(timeline.idle) / (len(timeline.idle) * timeline.makespan)
        lines.append(
            f"  {when:<6}  step {timeline.makespan / before.timeline.makespan:.3f}  "
            f"idle {idle:.1%}  longest stage {longest:.2f} x mean  "
            f"peak {max(one.peak_bytes) / GIB:.3g} GiB  {layout_of_plan(one)}"
            f"{', shared vocabulary' * one.schedule.placement.vocabulary}"
        )
    return lines


def _holds(span: LayerSpan) -> str:
    """Return what a stage has besides layers, in words: embedding, loss, mtp; "-" for nothing."""
    if span.depth:
        return f"mtp {span.depth} loss"
    return " ".join(["embedding"] * span.embedding + ["loss"] * span.loss) or "-"


def _numbers(span: LayerSpan) -> str:
    if span.count > 1:
        return f"{span.first}-{span.layers[-1]}"
    return str(span.first) if span.count else "-"


def checkpoint_bytes(plan: Plan, config: Config) -> tuple[int, float]:
    """Return the bytes of a checkpoint.

    Returns: (bytes of its tensors, most bytes of host memory that a rank needs to write it).
    """
    weight, moments = _bytes_of_parameter(config)
    # torch's safetensors writer holds a rank's part as tensors, and once more as one piece.
    # Data-parallel replicas divide the writing among them.
    of_dense = 2 * (weight + moments) / config.weight_replicas
    of_expert = 2 * (weight + moments) / config.expert_replicas
    most = max(dense * of_dense + experts * of_expert for dense, experts in _parameters(plan))
    return saved_bytes(plan, config, [work.parameters for work in plan.works]), most


def waiting_bytes(plan: Plan, config: Config) -> float:
    """Return the most bytes of weights that wait on the host until a rank has sharded them.

    A rank that shards its weights builds one stage after the other on the device. The result is 0
    if weights are not sharded.
    """
    if not config.parallel.shards_weights:
        return 0.0
    return config.precision.element_bytes * max(map(sum, _parameters(plan)))


@dataclass(frozen=True)
class HostBytes:
    """The bytes of host memory that a rank needs. `most` is what a host must have for it.

    Attributes:
        start: for weights that wait there until they are sharded.
        save: to write a checkpoint.
        copies: for copied activations.
    """

    start: float
    save: float
    copies: float

    @property
    def most(self) -> float:
        """Return the most bytes in use at one time.

        The weights have left the host before the first activation is copied.
        """
        return max(self.start, self.save + self.copies)


def host_of(plan: Plan, config: Config) -> HostBytes:
    """Return the bytes of host memory that the rank with the largest need takes."""
    _, saving = checkpoint_bytes(plan, config)
    return HostBytes(waiting_bytes(plan, config), saving, host_bytes(plan))


def host_line(plan: Plan, config: Config, ranks: int, host: float) -> str:
    """Return, in words, what a plan needs of a node's host, and whether it fits.

    Args:
        ranks: number of ranks that share the host.
        host: bytes of its memory.
    """
    need = host_of(plan, config)
    unit = ranks / GIB
    text = f"on a host {'1 rank needs' if ranks == 1 else f'{ranks} ranks need'} "
    if need.start > need.save + need.copies:
        text += f"{need.start * unit:,.4g} GiB to start"
    else:
        text += f"{need.save * unit:,.4g} GiB to save"
        if need.copies:
            text += f", {need.copies * unit:,.4g} for copied activations"
    more = need.most * unit - host / GIB
    if more > 0:
        return f"{text}: does not fit, {more:,.4g} more than it has"
    return f"{text}: fits"


def fits(plan: Plan, memory: float, reserved: float) -> str:
    """Return, in words, the bytes that a plan needs of a device, and whether it fits.

    Args:
        memory: bytes of a device.
        reserved: the part of these that stays free for what no plan counts.
    """
    peak = max(plan.peak_bytes)
    text = f"peak {peak / GIB:.3g} GiB"
    spare = (memory - reserved - peak) / GIB
    if spare >= 0:
        kept = f", {reserved / GIB:.3g} reserved" if reserved else ""
        return f"{text}: fits with {spare:.3g} to spare{kept}"
    if peak <= memory:
        return f"{text}: tight, needs {-spare:.3g} of the {reserved / GIB:.3g} reserved"
    limit = f"{(memory - reserved) / GIB:.3g} GiB that are not reserved"
    return f"{text}: does not fit, {-spare:.3g} more than the {limit}"


def fits_line(plan: Plan, memory: float, source: str) -> str:
    """Return the line of a check and of a launch on whether the plan fits the devices.

    Args:
        memory: bytes of a device. A tenth of them is reserved.
        source: where this number comes from, in words.
    """
    reserved = FREE * memory
    text = fits(plan, memory, reserved)
    return f"memory of {source}, {memory / GIB:.3g} GiB, {reserved / GIB:.3g} reserved: {text}"


def _parameters(plan: Plan) -> list[tuple[float, float]]:
    """Return, for each rank, the parameters that it saves: (dense ones, of experts)."""
    place = plan.schedule.placement
    found = []
    for rank in range(place.num_ranks):
        stages = [stage for stage in place.stages_on(rank) if stage < place.chain]
        works = [plan.works[stage] for stage in stages]
        dense = sum(work.parameters - work.experts for work in works) / plan.tp
        dense -= sum(map(plan.repeated, stages)) / plan.tp
        found.append((dense, sum(work.experts for work in works) / plan.expert_ranks))
    return found


def saved_bytes(plan: Plan, config: Config, parameters: Sequence[int]) -> int:
    """Return the bytes of a checkpoint's tensors, over all ranks.

    Args:
        parameters: number of parameters of each stage, summed over its tensor-parallel ranks.
    """
    # A second chain has the weights of the first, and tied weights are saved once.
    once = sum(parameters[: plan.schedule.placement.chain]) - plan.tied * plan.vocab_weights
    return once * sum(_bytes_of_parameter(config))


def _bytes_of_parameter(config: Config) -> tuple[int, int]:
    """Return the bytes of one parameter in a checkpoint: (weight, optimizer state)."""
    half = config.precision.half
    weight = 2 if half else 4
    if config.checkpoint.no_save_optim:
        return weight, 0
    _, moments, master = bytes_of_state(config.optimizer, half)
    # A run in 16 bits saves main parameters in any case: without one in float32 the weight itself.
    return weight, moments + (master or weight * half)


def checkpoint_line(plan: Plan, config: Config) -> str:
    """Return a line on the size of checkpoints; "" without --save."""
    if config.checkpoint.save is None:
        return ""
    size, most = checkpoint_bytes(plan, config)
    return (
        f"a checkpoint has {size / GIB:.3g} GiB; "
        f"writing it takes up to {most / GIB:.3g} GiB of host memory on a rank"
    )
