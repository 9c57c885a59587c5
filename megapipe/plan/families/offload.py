"""Activations that do not stay on the device: copied to the host (O, L) or computed again (R).

Flags ask for copies, or --memory-limit-gib leaves no room for all activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.part import NothingToDo, PlanFeature
from megapipe.plan.plan import OfPlan, Plan
from megapipe.plan.state import GIB
from megapipe.schedule import Costs, Kind, Schedule, Timeline
from megapipe.schedule.costs import PerStage
from megapipe.schedule.families.offload.rules import MOVES
from megapipe.schedule.ingredients import CostModel
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import run_clock
from megapipe.schedule.views.features.moved import describe_moves

LIMIT = "--memory-limit-gib"
FLOPS_PER_BYTE = 8000.0
"""FLOPs of a device while a byte goes to the host or back, where --offload-time does not say.

An H100's 500 TFLOP/s and 62.5 GB/s.
"""


@dataclass(frozen=True)
class Copies(OfPlan):
    """The copies of activations to the host, as an optional part of a plan.

    `asked` and `of` make it from the flags. `priced` adds times and bytes of the copies to the
    costs, and `changes` reports the copies.

    Attributes:
        flag: the flag that leads to copies: an offload flag, --pipeline-schedule for a file whose
            table has copies, else --memory-limit-gib.
        share: the fraction of each microbatch's bytes that may be copied. Keys and values of slices
            are always copied entirely.
        time: the time of a copy in one direction, as a fraction of the stage's F, B and W. None
            takes it from --pipeline-costs, or computes it from the bytes.
        chunks: copy only for the first `chunks` stages of each rank; None for all.
        input: bytes of the input of a stage's forward. A forward that is recomputed keeps only
            this.
        modules: copy only activations of these modules, from --offload-modules; () for all.
    """

    flag: str
    share: float
    time: float | None
    chunks: int | None
    input: float
    modules: tuple[str, ...] = ()

    @classmethod
    def asked(cls, config: Config) -> Copies | None:
        """Return the copies if an offload flag asks for them, else None.

        --memory-limit-gib, which may also lead to copies, does not count.
        """
        par = config.parallel
        if not (par.fine_grained_activation_offloading or par.cpu_offload):
            return None
        # The same flag by two names: an error has to say the one that was typed.
        if par.cpu_offload:
            return cls.of(config, "--cpu-offload")
        return cls.of(config, "--fine-grained-activation-offloading")

    @classmethod
    def of(cls, config: Config, flag: str) -> Copies:
        """Return the copies of a run.

        Args:
            flag: the flag that asks for them. Printed lines and errors name it.
        """
        par = config.parallel
        model = config.model
        shared = par.context_parallel_size
        if model.sequence_parallel:
            shared *= par.tensor_model_parallel_size
        tokens = config.batch.tokens / shared
        return cls(
            flag,
            share=par.activation_offload_fraction,
            time=par.offload_time,
            chunks=par.offload_chunk_num,
            input=tokens * model.hidden * config.precision.element_bytes,
            modules=par.offload_modules,
        )

    def priced(self, plan: Plan, costs: Costs, counted: Costs) -> Costs:
        """Return the costs with the time of each stage's copies, and the bytes that a copy frees.

        Args:
            plan: the plan to whose stages the costs belong.
            costs: the costs of the plan's stages so far.
            counted: the costs by FLOPs, without --pipeline-costs.
        """
        stages = len(plan.counts) + len(plan.pieces.depths)
        held = _by_stage(costs.mem_b, stages)
        keys = _by_stage(costs.mem_k, stages)
        goes = held
        if self.modules and isinstance(costs.mem_o, tuple):
            goes = costs.mem_o
        # Keys and values of slices go with every copy, whatever its share of the rest.
        copied = tuple(self.share * max(0.0, x - k) + k for x, k in zip(goes, keys, strict=True))
        costs = replace(costs, mem_o=copied, mem_r=(self.input,) * stages)
        # The flag wins over --pipeline-costs, and these over the assumed bandwidth.
        if self.time is not None:
            passes = [_by_stage(x, stages) for x in (costs.f, costs.b, costs.w)]
            took = tuple(self.time * sum(of_stage) for of_stage in zip(*passes, strict=True))
        elif costs.o or costs.l:
            return costs
        else:
            byte = _time_of_a_byte(plan, costs, counted)
            took = tuple(byte * x for x in copied)
        return replace(costs, o=took, l=took)

    def changes(self, plan: Plan) -> list[str]:
        """Return lines for the user on which activations are offloaded or recomputed, and why.

        The lines also give memory and time of each rank. The list is empty if nothing is offloaded
        or recomputed.
        """
        if not plan.schedule.kinds & MOVES:
            return []
        step = plan.timeline.makespan
        first, *rows = describe_moves(
            plan.schedule,
            plan.costs,
            held=lambda x: f"{x / GIB:.3g} GiB",
            takes=lambda x: f"{x / step:.1%}",
            also=_compared,
        )
        return [f"{self.flag}: {first}", *rows]


def host_bytes(plan: Plan) -> float:
    """Return the most bytes of activations that a rank has on the host at one time, or 0.0."""
    table = plan.schedule
    if Kind.O not in table.kinds:
        return 0.0
    costs = plan.costs
    # A copy is of a slice where microbatches are cut.
    copied = {
        part: costs.of_slice(table.cuts, part).by_stage("mem_o", table.placement)
        for part in (*table.parts, None)
    }
    clock = run_clock(table, costs)
    most = 0.0
    for row, starts, ends in zip(table.ranks, clock.start, clock.end, strict=True):
        moments = []
        for step, start, end in zip(row, starts, ends, strict=True):
            for item in step:
                part = None if item.slice is None else table.part(item)
                if item.kind is Kind.O:
                    moments.append((start, copied[part][item.stage]))
                elif item.kind is Kind.L:
                    moments.append((end, -copied[part][item.stage]))
        there = 0.0
        # Of one moment the copies that end come first.
        for _, size in sorted(moments):
            there += size
            most = max(most, there)
    return most


def _compared(before: Timeline, now: Timeline) -> str:
    """Return text that compares two simulated steps: their peaks in GiB, and their times.

    Args:
        before: the simulated step without copies.
        now: the simulated step with them.
    """
    peak = max(now.peak) / GIB
    plain = max(before.peak) / GIB
    longer = now.makespan / before.makespan - 1
    step = "takes no longer"
    # Less would be printed as 0.0%.
    if longer > 5e-4:
        step = f"takes {longer:.1%} longer"
    return f": ranks hold at most {peak:.3g} GiB of them and not {plain:.3g}, and the step {step}"


def _time_of_a_byte(plan: Plan, costs: Costs, counted: Costs) -> float:
    """Return the time to copy a byte to the host, in the unit of `costs`.

    Args:
        costs: the costs of the stages, which may be measured.
        counted: the costs of the same stages by FLOPs.
    """
    # Ranks share FLOPs over tensor parallelism, and not a copy.
    flops = FLOPS_PER_BYTE * plan.tp
    if plan.given is None:
        return flops
    # Measured times are in a unit of their own: the same work in both gives the rate.
    return flops * _work(costs) / _work(counted)


def _work(costs: Costs) -> float:
    """Return the time of a microbatch's F, B and W on a stage, as the mean over the stages."""
    return sum(fmean(x if isinstance(x, tuple) else (x,)) for x in (costs.f, costs.b, costs.w))


def _by_stage(value: PerStage, stages: int) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,) * stages


def _of(config: Config, plain: Schedule | None, made: Schedule | None) -> Copies | None:
    if plain is None:
        return None
    if asked := Copies.asked(config):
        return asked
    if made is not None and not made.kinds & MOVES:
        return None
    # Only a file's table begins with copies.
    if plain.kinds & MOVES:
        return Copies.of(config, "--pipeline-schedule")
    # While a table is made, the limit may ask for them.
    return Copies.of(config, LIMIT)


def _check(config: Config, table: Schedule, terms: CostModel) -> None:
    """Refuse --offload-modules with modules whose activations cannot be copied.

    Either these modules keep nothing, or core_attn is not among them although the table has slices,
    whose keys and values are always copied.

    Args:
        table: the table before any copies.
        terms: says what the stages of a table cost.
    Raises: ConfigError that names the modules.
    """
    asked = Copies.asked(config)
    if asked is None or not asked.modules:
        return
    names = " ".join(asked.modules)
    # Chosen modules may be of another kind of layer, or save nothing under recomputation.
    saved = terms.costs(table).mem_o
    if isinstance(saved, tuple) and not any(saved):
        raise ConfigError(
            f"--offload-modules {names}: nothing of what a forward keeps is theirs, so "
            f"{asked.flag} has nothing to copy. Name others, or leave --offload-modules out, so "
            "that all may go."
        )
    if table.cuts and "core_attn" not in asked.modules:
        raise ConfigError(
            f"--offload-modules {names}: keys and values of slices go with every copy, and are "
            "core_attn's. Add core_attn, or leave the slices out."
        )


def _check_made(config: Config, table: Schedule, recipe: Recipe) -> None:
    """Refuse a table without copies if flags ask to copy everything possible.

    Args:
        table: the finished table.
        recipe: the settings of the table. The recipe's field `offload` says which activations to
            copy.
    Raises: NothingToDo, which says what to change.
    """
    asked = Copies.asked(config)
    # Within a memory limit a table may rightly hold everything, or compute it again.
    everything = recipe.offload is not None and recipe.offload.when == "all"
    if asked and everything and not table.kinds & MOVES:
        raise NothingToDo(
            "offload",
            f"{asked.flag}: under {table.name} no activation stays long enough to be copied to the "
            "host and back before its backward. Leave the flag out, say with --offload-time 0.1 "
            "that copies are fast, or take a schedule of more microbatches in flight.",
        )


OFFLOAD = PlanFeature(
    "offload",
    of=_of,
    check=_check,
    check_made=_check_made,
    without=lambda config: config.with_fields(
        fine_grained_activation_offloading=False, cpu_offload=False
    ),
)
