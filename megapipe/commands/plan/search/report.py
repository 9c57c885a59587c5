"""Print the report of a search: the best plans with the flags to paste, and why others are out."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

from megapipe.commands.plan.search.search import BEST, Search
from megapipe.commands.plan.search.timed import Timed
from megapipe.config import Config
from megapipe.flags.flag import flags_of as all_flags
from megapipe.plan import GIB
from megapipe.schedule import Kind

_ALWAYS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "micro_batch_size",
)
"""Fields that are printed even at their defaults; see flags_of."""


def best_of(found: Search) -> list[Timed]:
    """Return the ten best plans, fastest first."""
    return sorted(found.best.values(), key=lambda x: x.step)[:BEST]


def report(found: Search, memory: float) -> str:
    """Return the best plans with the flags to paste, and why the others are out.

    Args:
        memory: bytes of a device.
    """
    # Without any plan the reasons are the whole report.
    best = best_of(found)
    if not best:
        return f"nothing fits in {memory / GIB:g} GiB: {_lost(found)}"
    first = best[0]
    lines = []
    for n, x in enumerate(best, 1):
        lines.append(f"{n:2}. {_summary(x)}")
        # The part of the step by which this plan loses most against the first.
        if n > 1:
            worst = max(x.parts, key=lambda name: x.parts[name] - first.parts[name])
            more = (x.parts[worst] - first.parts[worst]) / first.step
            slower = f"{x.step / first.step - 1:.1%} slower than the first"
            lines.append(f"      {slower}, {worst} {more:+.1%} of its step")
        lines.append(f"      {' '.join(flags_of(x.config))}")
    if first.moves:
        lines.append(_without(found, first))
    return "\n".join([*lines, f"the other plans: {_lost(found)}"])


def _summary(x: Timed) -> str:
    """Return times, memory, layout, schedule and recomputation of a plan in a line."""
    config = x.config
    tp, cp, pp, micro, ep, etp = x.layout
    tokens = config.global_batch_size * config.batch.sequence / x.step
    text = f"{x.step:.4g} s, {tokens:,.0f} tokens/s, peak {x.peak / GIB:.3g} GiB"
    text += f", bubble {x.parts['bubble'] / x.step:z.1%}: {config.data_parallel_size} data"
    if "sharding" in x.plan.own:
        text += ", sharded,"
    text += f" x {pp} pipeline x {cp} context x {tp} tensor, "
    if config.model.has_experts:
        text += f"experts {ep} x {etp}, "
    text += f"micro batch {micro}, {x.schedule}, "
    text += f"recomputes {config.model.recompute_granularity or 'nothing'}"
    if not x.moves:
        return text
    # O is a copy to the host, R a second forward.
    count = Counter(item.kind for item in x.plan.schedule.passes())
    moved = []
    if count[Kind.O]:
        moved.append(f"{count[Kind.O]} copied")
    if count[Kind.R]:
        moved.append(f"{count[Kind.R]} computed again")
    return f"{text}; of {count[Kind.F]} activations {' and '.join(moved)}"


def _without(found: Search, first: Timed) -> str:
    """Return a line on the best plan that neither offloads nor recomputes single activations."""
    without = "without copies to the host and second forwards of single activations"
    x = found.plain
    if x is None:
        return f"{without} no plan fits"
    slower = f"{x.step / first.step - 1:.1%} slower than the first"
    return f"{without}: {x.step:.4g} s, {slower}, {x.schedule}, {' '.join(flags_of(x.config))}"


def _lost(found: Search) -> str:
    """Return how many plans are out for each reason, the most frequent first."""
    return "; ".join(f"{count:,} {why}" for why, count in found.lost.most_common())


def flags_of(config: Config) -> list[str]:
    """Return the choices of the search as flags.

    They win if they are pasted after other flags, so some are given at their defaults too. A switch
    that is off has no flag, nor has a value of None.
    """
    # The fields that a search sets, by their section. All others are the user's own flags.
    chosen = {
        "model": {"recompute_granularity", "sequence_parallel"},
        "parallel": {field.name for field in fields(config.parallel)},
        "batch": {"micro_batch_size"},
    }
    always = set(_ALWAYS)
    if config.model.has_experts:
        chosen["model"].add("moe_token_dispatcher_type")
        always |= {"moe_token_dispatcher_type", "expert_model_parallel_size"}
    tokens: list[str] = []
    for flag in all_flags(Config).values():
        if flag.field not in chosen.get(flag.section, ()):
            continue
        value = config.value(flag.field)
        if value != flag.default or (value is not None and flag.field in always):
            # A switch has no value, and a list has several.
            if flag.count == "many":
                values = value
            elif flag.count == "none":
                values = ()
            else:
                values = (value,)
            tokens += flag.spell([str(v) for v in values])
    return tokens
