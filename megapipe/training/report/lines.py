"""Format the lines that a run prints: iterations, validation and arguments as Megatron-LM has them.

Tools read these lines by field name. Our own fields therefore follow Megatron's last one.
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
    """Return Megatron-LM's line of an iteration (training_log), followed by our own fields.

    Args:
        moment: the values to report.
        now: the time to print.
    """
    iteration = f"iteration {moment.progress.iteration:8d}/{moment.last:8d}"
    head = f" [{now:%Y-%m-%d %H:%M:%S.%f}] {iteration} |"
    return head + "".join(f" {field} |" for field in fields(asked(moment.config), moment))


def short_line(moment: Moment, width: int = 80) -> str:
    """Return a line for people, with as many numbers as fit, the most important ones first.

    Numbers that a flag asks for, and the user's own metrics, follow the loss. These are never cut
    off, and the line may become longer than `width`.

    Args:
        moment: the values to report.
        width: columns of the line.
    """
    losses = moment.over.losses
    n = len(str(moment.last))
    # A metric of the user's own may come before the loss in the alphabet.
    main = "lm loss" if "lm loss" in losses else next(iter(losses), None)
    loss = "-" if main is None else f"{losses[main]:.4f}"
    head = f"{moment.progress.iteration:{n}}/{moment.last}  loss {loss}"
    always = [f"{name} {value:.4g}" for name, value in losses.items() if name != main]
    optional: list[str] = []
    rows = []
    for row in asked(moment.config):
        if row.short:
            value = row.of(moment)
            if value is not None:
                rows.append((*row.short, value))
    for place, text, value in sorted(rows, key=lambda row: row[0]):
        (always if place < 0 else optional).append(text(value))
    # The least important ones are last.
    while optional and len("  ".join([head, *optional])) > width:
        optional.pop()
    return "  ".join([head, *always, *optional])


LEGEND = """\
bubble: the share of the passes' time in which the rank that waits most computes nothing, the sum of
  table     what the schedule leaves open where all stages take the same
  stages    what stages of unlike times add; below 0 where they fit the schedule better
  host      the time between two passes
  messages  the rest, waiting for messages; called residual below 0, where less was waited than the
            parts above come to, which are simulated from the median time of each pass"""
"""An explanation of the fields of PASSES, printed once."""


def validation_lines(prefix: str, losses: Mapping[str, float], samples: range) -> str:
    """Return the result of an evaluation between two rules of dashes.

    The range of evaluated samples follows Megatron-LM's fields.

    Args:
        prefix: names the evaluation, such as "iteration 100".
        losses: means by name.
        samples: numbers of the samples that were evaluated.
    """
    text = f" validation loss at {prefix} | "
    for name, loss in losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    text += f"samples: {samples.start} to {samples.stop - 1} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def perplexity(loss: float) -> float:
    """Return exp(loss), at most exp(20), as in Megatron-LM."""
    return math.exp(min(20.0, loss))


def arguments(config: Config) -> str:
    """Return the settings that differ from their defaults, one a line, sorted by name."""
    values = {}
    count = 0
    for group in config.sections:
        for field in dataclasses.fields(group):
            count += 1
            value = getattr(group, field.name)
            if value != field.default:
                values[field.name] = value
    others = f"  {count - len(values)} others have their defaults, see --help"
    # Megatron-LM lists these two with the arguments.
    values["world_size"] = config.world_size
    values["data_parallel_size"] = config.data_parallel_size
    names = sorted(values, key=str.lower)
    rows = [f"  {name} ".ljust(50, ".") + f" {values[name]}" for name in names]
    head = f"{'-' * 24} arguments {'-' * 24}"
    end = f"{'-' * 20} end of arguments {'-' * 21}"
    return "\n".join([head, *rows, others, end])


def held_up_messages(config: Config, schedule: Schedule) -> str:
    """Return a warning that messages sent as one batch over NCCL delay passes.

    The text is empty if each rank has one stage, or no flag asks for batches of messages.
    """
    mode = config.parallel.p2p_mode
    if mode == "plain" or schedule.placement.num_stages == len(schedule.ranks):
        return ""
    flag = "--use-ring-exchange-p2p" if mode == "ring" else "--no-overlap-p2p-communication"
    return (
        f"WARNING: {flag} sends the messages of an exchange as one, which holds up the next "
        f"exchange: under {schedule.name}, with several stages on a rank, a step may take 1% to "
        "39% longer by NCCL's rules (docs/log/performance.md, By NCCL's rules). Leave it out to "
        "send them one by one."
    )


def banner(title: str, *lines: str) -> str:
    """Return lines between a title and a rule, for a message that nobody should overlook."""
    rule = "=" * 24
    text = "\n  ".join([f"{rule} {title} {rule}", *lines])
    return f"{text}\n{'=' * (50 + len(title))}"
