"""Lines that a run prints: Megatron's iteration line letter for letter, validation, arguments.

Tools read these lines by field name, so fields of our own stand behind the last of Megatron's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime

from megapipe.config import Config
from megapipe.schedule import Schedule
from megapipe.training.report.moment import Moment
from megapipe.training.report.numbers import asked, fields


def iteration_line(moment: Moment, now: datetime) -> str:
    """Megatron-LM's line (training_log), then our own fields."""
    head = f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {moment.progress.iteration:8d}/{moment.last:8d} |"
    return head + "".join(f" {field} |" for field in fields(asked(moment.config), moment))


def short_line(moment: Moment, width: int = 80) -> str:
    """A line for people: what matters most first, as much as fits; what was asked for, by a flag or as a metric of
    one's own, stands behind the loss and takes nothing of it."""
    losses, n = moment.over.losses, len(str(moment.last))
    main = "lm loss" if "lm loss" in losses else next(iter(losses), None)
    head = f"{moment.progress.iteration:{n}}/{moment.last}  loss {'-' if main is None else f'{losses[main]:.4f}'}"
    own = [f"{name} {value:.4g}" for name, value in losses.items() if name != main]
    parts = list[str]()
    rows = [(*row.short, value) for row in asked(moment.config) if row.short and (value := row.of(moment)) is not None]
    for place, text, value in sorted(rows, key=lambda row: row[0]):
        (own if place < 0 else parts).append(text(value))
    while parts and len("  ".join([head, *parts])) > width:
        parts.pop()
    return "  ".join([head, *own, *parts])


LEGEND = """\
bubble: the share of the passes' time in which the rank that waits most computes nothing, the sum of
  table     what the schedule leaves open where all stages take the same
  stages    what stages of unlike times add; below 0 where they fit the schedule better
  host      the time between two passes
  messages  the rest, waiting for messages; called residual below 0, where less was waited than the parts above come
            to, which are simulated from the median time of each pass"""
"""Told once, for the fields of PASSES."""


def validation_lines(prefix: str, losses: Mapping[str, float], samples: range) -> str:
    """The validation result between two rules of dashes; behind Megatron-LM's fields the samples that it is of."""
    text = f" validation loss at {prefix} | " + "".join(
        f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | " for name, loss in losses.items()
    )
    text += f"samples: {samples.start} to {samples.stop - 1} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def perplexity(loss: float) -> float:
    """exp(loss), capped as Megatron's at exp(20)."""
    return math.exp(min(20.0, loss))


def arguments(config: Config) -> str:
    """The settings that differ from their defaults, sorted without case."""
    settings = [(f, getattr(group, f.name)) for group in config.sections for f in dataclasses.fields(group)]
    values = {f.name: value for f, value in settings if value != f.default}
    others = f"  {len(settings) - len(values)} others have their defaults, see --help"
    values["world_size"] = config.world_size
    values["data_parallel_size"] = config.data_parallel_size
    rows = [f"  {name} ".ljust(50, ".") + f" {values[name]}" for name in sorted(values, key=str.lower)]
    dashes = "-" * 24
    return "\n".join([f"{dashes} arguments {dashes}", *rows, others, f"{'-' * 20} end of arguments {'-' * 21}"])


def held_up_messages(config: Config, schedule: Schedule) -> str:
    """The price of batched messages over NCCL, where a table gives ranks several stages; else nothing."""
    mode = config.parallel.p2p_mode
    if mode == "plain" or schedule.placement.num_stages == len(schedule.ranks):
        return ""
    flag = "--use-ring-exchange-p2p" if mode == "ring" else "--no-overlap-p2p-communication"
    return (
        f"WARNING: {flag} sends the messages of an exchange as one, which holds up those of the next: under "
        f"{schedule.name}, with several stages on a rank, a step may take 1% to 39% longer by NCCL's rules "
        "(docs/performance.md, By NCCL's rules). Leave it out to send them one by one."
    )


def banner(title: str, *lines: str) -> str:
    """A frame around what nobody should overlook."""
    rule = "=" * 24
    return "\n  ".join([f"{rule} {title} {rule}", *lines]) + "\n" + "=" * (50 + len(title))
