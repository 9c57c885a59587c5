"""Measure each rank of a run alone on this machine: what memory it needs and how long a step takes.

megapipe rehearse --world-size 64 [--ranks 0,3,7] -- <flags of the run>

Each different rank of a pipeline runs the real program on one device, in a process of its own.
Random tensors take the place of messages (rehearsed_rank.py). The simulator makes a step of the
timed passes. Communication is not measured: --rates gives the speeds of links, and without it they
take no time. --model-provider and --optimizer of the run work. The loss is megapipe pretrain's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from megapipe.checks.inputs import answer
from megapipe.checks.run import flag_problems
from megapipe.checks.vocabulary import vocabulary, with_vocabulary
from megapipe.commands.main import tell
from megapipe.commands.plan.forecast import Shown, forecast, numbers, report, work_of_stage
from megapipe.commands.plan.main import save_costs
from megapipe.commands.plan.rates import save_rates
from megapipe.commands.plan.rehearsed_rank import Answers, Rehearsed, answers_of, rehearse_rank
from megapipe.config import Config
from megapipe.data.files import file_problems
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.grid import Grids
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import parse, place_of_dashes, read
from megapipe.plan import Plan, make_plan
from megapipe.plan.seconds.device import NOTHING, load_device
from megapipe.plan.shapes.slices import chosen
from megapipe.training.check import as_here


@dataclass(frozen=True)
class Flags:
    """Measure each rank of a run alone on this machine. The flags of the run stand after --.

    Models and optimizers of your own are rehearsed, as --model-provider and --optimizer of the run
    name them. The loss is megapipe pretrain's, whatever your own program computes.
    """

    world_size: int = 1
    """Number of processes of the run."""
    ranks: str | None = None
    """Ranks to rehearse, separated by commas. Default: one of each kind of equal ranks."""
    steps: int = 3
    """Number of timed steps. One step before them is not timed."""
    memory_gib: float | None = None
    """Memory of a device; the report says whether the run fits."""
    rates: str | None = None
    """The speeds of links, as megapipe plan takes them: a .json, or a name such as h100."""
    save_costs: str | None = None
    """Write the times of the stages to this .json, for --pipeline-costs of the run."""
    save_rates: str | None = None
    """Measure products, memory and messages of this machine too, and write its rates to this .json,
    for --rates of megapipe plan."""
    json: str | None = None
    """Also write the numbers to this file; - prints them instead of the text."""


def main(argv: Sequence[str]) -> None:
    """Rehearse the ranks, print the report, and write the files that the flags name."""
    at = place_of_dashes(argv, "megapipe rehearse --world-size 4 -- --num-layers 8 ...")
    flags = parse(Flags, argv[:at])
    wrong = []
    for name in ("world_size", "steps", "memory_gib"):
        number = getattr(flags, name)
        if number is not None and not number > 0:
            wrong.append(f"--{name.replace('_', '-')} must be above 0, got {number:g}.")
    files = {
        "--save-costs": flags.save_costs,
        "--save-rates": flags.save_rates,
        "--json": flags.json,
    }
    wrong += file_problems(files)
    if wrong:
        raise ConfigError(wrong)
    device = NOTHING
    if flags.rates:
        device = load_device("--rates", flags.rates)
    config, plan = prepared(argv[at + 1 :], flags.world_size)
    # Measure, then predict, then report.
    shown = rehearse(config, plan, _positions(config, flags.ranks), flags.steps)
    found = forecast(config, plan, shown, device)
    links = "it takes no time here"
    if device != NOTHING:
        links = device.links
    text = report(config, plan, shown, found, flags.memory_gib)
    text += f"\ncommunication is not measured: {links}"
    tell(text, numbers(plan, shown, found), flags.json)
    if flags.save_costs:
        save_costs(found.costs, "in measured seconds", flags.save_costs)
    if flags.save_rates:
        save_rates(flags.save_rates, config, plan, forecast(config, plan, shown))


def prepared(argv: Sequence[str], world_size: int) -> tuple[Config, Plan]:
    """Return the configuration of a run of `world_size` processes, and its plan.

    Args:
        argv: the flags of the run.
    Raises: ConfigError with every problem, also for a run that cannot be rehearsed.
    """
    found = read(Config, argv)
    config = as_here(found.value)
    problems = [*found.problems]
    # --world-size is a flag of a run too, which `megapipe check` reads.
    given = config.check.world_size
    if given is not None and given != world_size:
        problems.append(
            f"--world-size {world_size} stands before --, and --world-size {given} after it. "
            "Leave out the second."
        )
    check = replace(config.check, world_size=world_size)
    config = replace(config, world_size=max(1, world_size), check=check)
    # Below are the families whose passes a lone rank cannot time.
    if config.parallel.vocab_parallel_pipeline:
        problems.append(
            "--vocab-parallel-pipeline has passes that are not timed one by one. "
            "Rehearse without it."
        )
    if config.parallel.enable_optimizer_post_validation:
        problems.append(
            "--enable-optimizer-post-validation lets steps overlap. Rehearse without it."
        )
    if (impl := config.model.transformer_impl) != "local":
        problems.append(
            f"--transformer-impl {impl}: a rehearsal runs layers of plain torch. "
            "Give --transformer-impl local."
        )
    if found.problems:
        raise ConfigError([*problems, *found.without_unread(flag_problems(config))])
    config, plan = planned(config, problems)
    return chosen(config, len(plan.schedule.cuts) or 1), plan


def planned(config: Config, problems: Sequence[str] = ()) -> tuple[Config, Plan]:
    """Return (configuration, plan), with the tokenizer's vocabulary and the final batch size.

    Args:
        problems: texts to report together with the problems of the flags.
    Raises: ConfigError with all problems.
    """
    if problems := [*flag_problems(config), *problems]:
        raise ConfigError(problems)
    tokenizer, _ = answer(lambda: build_tokenizer(config.data))
    config = with_vocabulary(config, vocabulary(config, tokenizer)[0])
    config = config.with_batch(config.global_batch_size)
    return config, make_plan(config)


def _pipelines(config: Config) -> list[tuple[int, ...]]:
    """Return the global ranks of each pipeline, in the order of its pipeline ranks."""
    return Grids.of(config.parallel, config.world_size).sets("pp")


def world_ranks(config: Config) -> list[int]:
    """Return the global ranks of the first pipeline, in the order of its pipeline ranks."""
    return [*_pipelines(config)[0]]


def _positions(config: Config, ranks: str | None) -> set[int] | None:
    """Return the pipeline ranks of the global ranks in --ranks; None without the flag.

    Args:
        ranks: the value of --ranks: global ranks between commas.
    Raises: ConfigError for a word that is no rank of the run.
    """
    if ranks is None:
        return None
    numbers = ranks.split(",")
    # A number of 20 digits is no rank, and int() refuses one of thousands.
    if not all(r.isdecimal() and len(r) < 20 and int(r) < config.world_size for r in numbers):
        raise ConfigError(
            f"--ranks {ranks} must be numbers from 0 to {config.world_size - 1}, by commas, "
            "such as --ranks 0."
        )
    wanted = {int(r) for r in numbers}
    # Ranks of several pipelines may have the same position, which is rehearsed once.
    found = set()
    for pipeline in _pipelines(config):
        found |= {at for at, rank in enumerate(pipeline) if rank in wanted}
    return found


def first_equal(config: Config, plan: Plan) -> list[int]:
    """Return, for each pipeline rank, the first one with equal work, such as [0, 1, 1, 3].

    Two ranks have equal work if their stages are equal and their passes have the same order. Only
    the first of such ranks is rehearsed.
    """
    place = plan.schedule.placement

    def work(rank: int) -> object:
        own = place.stages_on(rank)
        rows = []
        # Stages get their numbers on the rank, as other ranks have other stages.
        for step in plan.schedule.ranks[rank]:
            rows.append([item._replace(stage=own.index(item.stage)) for item in step])
        return [work_of_stage(config, plan, stage) for stage in own], rows

    works = [work(rank) for rank in range(place.num_ranks)]
    return [works.index(mine) for mine in works]


def rehearse(
    config: Config, plan: Plan, positions: set[int] | None = None, steps: int = 3
) -> Shown:
    """Rehearse one pipeline rank after another, each in a process of its own.

    A rehearsal trains one rank alone, with random numbers in place of received messages.

    Args:
        positions: the pipeline ranks to rehearse; None for all.
        steps: the number of timed steps.
    Returns: the measurements by pipeline rank. A rank that has equal work to a rehearsed rank gets
        the measurements of that rank.
    Raises: UserError if a rank cannot run.
    """
    ranks = world_ranks(config)
    same = first_equal(config, plan)
    answers = answers_of(config, plan, ranks)
    # A fork has the plan without another start. This process must have no CUDA context, which a
    # fork could not use.
    context = multiprocessing.get_context("fork")
    asked = range(len(ranks)) if positions is None else positions
    shown: dict[int, Rehearsed] = {}
    for at in sorted({same[rank] for rank in asked}):
        receiver, sender = context.Pipe(duplex=False)
        given = (sender, config, plan, ranks[at], answers, steps)
        child = context.Process(target=_child, args=given, daemon=True)
        child.start()
        # Only the child may hold this end: its death then ends the pipe, and recv() raises.
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            raise UserError(
                f"pipeline rank {at} could not be rehearsed; its error is above"
            ) from None
        finally:
            child.join()
        # The text of an error that the user can mend.
        if isinstance(found, str):
            raise UserError(found)
        shown[at] = found
    return {r: shown[same[r]] for r in range(len(ranks)) if same[r] in shown}


def _child(
    sender: Connection, config: Config, plan: Plan, rank: int, answers: Answers, steps: int
) -> None:
    """Rehearse a rank in this child process, and send the result to the parent.

    A rehearsal trains one rank alone, with random numbers in place of received messages.

    Args:
        sender: gets the measurements, or the text of an error that the user can mend.
        rank: the global rank.
        answers: the results of collectives before the first step, as `answers_of` returns them.
        steps: the number of timed steps.
    """
    # As many threads as torchrun gives a rank. A fork does not have the threads of OpenMP that its
    # parent had, and the first operation that uses them would deadlock.
    torch.set_num_threads(int((os.environ.get("OMP_NUM_THREADS") or "1").split(",")[0]))
    try:
        sender.send(rehearse_rank(config, plan, rank, answers, steps))
    except UserError as error:
        sender.send(str(error))
