"""The report of a search of layouts: its best plans, each with the flags to paste, and what became of the rest."""

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
"""Fields of a layout that are printed at their defaults too; see flags_of."""


def best_of(found: Search) -> list[Timed]:
    """The ten best plans that were found."""
    return sorted(found.best.values(), key=lambda x: x.step)[:BEST]


def report(found: Search, memory: float) -> str:
    """The best plans, each with the flags to paste, and what became of the rest."""
    best = best_of(found)
    if not best:
        return f"nothing fits in {memory / GIB:g} GiB: {_lost(found)}"
    first = best[0]
    lines = []
    for n, x in enumerate(best, 1):
        tp, cp, pp, micro, ep, etp = x.layout
        experts = f"experts {ep} x {etp}, " * x.config.model.has_experts
        tokens = x.config.global_batch_size * x.config.batch.sequence / x.step
        shares = ", sharded," * ("sharding" in x.plan.own)
        worst = max(x.parts, key=lambda name: x.parts[name] - first.parts[name])
        more = (x.parts[worst] - first.parts[worst]) / first.step
        lines += [
            f"{n:2}. {x.step:.4g} s, {tokens:,.0f} tokens/s, peak {x.peak / GIB:.3g} GiB, bubble "
            f"{x.parts['bubble'] / x.step:z.1%}: {x.config.data_parallel_size} data{shares} x {pp} pipeline "
            f"x {cp} context x {tp} tensor, {experts}micro batch {micro}, {x.schedule}, "
            f"recomputes {x.config.model.recompute_granularity or 'nothing'}{_moved(x)}",
            f"      {x.step / first.step - 1:.1%} slower than the first, {worst} {more:+.1%} of its step" * (n > 1),
            f"      {' '.join(flags_of(x.config))}",
        ]
    if first.moves:
        lines.append(_without(found, first))
    return "\n".join([*filter(None, lines), f"the other plans: {_lost(found)}"])


def _moved(x: Timed) -> str:
    """Words on what its table moves."""
    count = Counter(item.kind for item in x.plan.schedule.passes())
    told = (f"{count[kind]} {what}" for kind, what in ((Kind.O, "copied"), (Kind.R, "computed again")) if count[kind])
    return f"; of {count[Kind.F]} activations {' and '.join(told)}" if x.moves else ""


def _without(found: Search, first: Timed) -> str:
    """A line on the best plan of those that move nothing."""
    if (x := found.plain) is None:
        return "without copies to the host and second forwards of single activations no plan fits"
    return (
        f"without copies to the host and second forwards of single activations: {x.step:.4g} s, "
        f"{x.step / first.step - 1:.1%} slower than the first, {x.schedule}, {' '.join(flags_of(x.config))}"
    )


def _lost(found: Search) -> str:
    return "; ".join(f"{count:,} {why}" for why, count in found.lost.most_common())


def flags_of(config: Config) -> list[str]:
    """Return the choice of the search as flags; pasted after others they win, so those at their defaults are there too.

    A switch that is off, and a value that is not given, have no spelling.
    """
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
            values = value if flag.count == "many" else () if flag.count == "none" else (value,)
            tokens += flag.spell([str(v) for v in values])
    return tokens
