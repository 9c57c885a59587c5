"""Say which plan of a search to take, among those whose steps predictions cannot order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from megapipe.commands.plan.pasted import changed, chosen_fields
from megapipe.commands.plan.search.hiding import hides_unmeasured
from megapipe.commands.plan.search.listed.asked import NUMBERS, own_schedule
from megapipe.commands.plan.verdict import Machine, load_line, of_busy_experts, published_range
from megapipe.config import Config, ParallelConfig
from megapipe.flags.flag import flags_of as all_flags
from megapipe.plan import GIB
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.page import digest, recomputes
from megapipe.plan.seconds.step import TimedPlan
from megapipe.schedule import SCHEDULES
from megapipe.schedule.catalogue import PLAIN

YOURS = "yours"
CLOSE = 0.05
"""Predictions cannot distinguish plans with the same layout whose steps differ by less.

`is_equal` says which plans these are. Of 32 published pairs of layouts the ratio of the steps of 30
is predicted with a smaller error (tools/bench/published/pairs.py).
"""

_SPARE = 0.01
"""The fraction of a device's memory that a plan to take has to spare, apart from the reserve."""
_LEAST_GAIN = 0.01
"""The least gain, as a fraction of the step, of a plan 1 that is named next to the one to take."""
_SHARDED = "sharded weights"
_AT_ONCE = "weights that are all gathered at once"
_COLUMNS = 100
"""The columns of a line of the advice. Longer lines are broken, but not within names of flags."""
_OF_LAYOUT = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_schedule",
)
"""Fields by which a user names a layout or a schedule."""


@dataclass(frozen=True)
class Advice:
    """The plan to take, and why. `lines` returns both in words.

    Attributes:
        number: the number of the plan in the list, from 1, or "yours".
        plan: the plan.
        changes: the plan's flags that differ from the user's; None if these name no layout.
        rules: a line for each rule that has chosen the plan.
        caveats: lines on errors of the predictions that matter here.
        yours: the plan of the user's own flags; None if there is none or if it does not fit.
    """

    number: int | str
    plan: TimedPlan
    changes: tuple[str, ...] | None
    rules: tuple[str, ...]
    caveats: tuple[str, ...] = ()
    yours: TimedPlan | None = None

    def lines(self, machine: Machine, device: Device) -> list[str]:
        """Return the advice in words: what to take, its gain, rules, caveats, the next step.

        Args:
            machine: the memory of a device and of a host.
        """
        x = self.plan
        sizes = dict(zip(NUMBERS, x.layout, strict=True))
        if not x.config.model.has_experts:
            del sizes["ep"], sizes["etp"]
        words = [f"{axis} {n}" for axis, n in sizes.items() if n > 1 or axis == "pp"]
        words += sorted(demands(x))
        if recomputed := recomputes(x.config.model):
            words.append(f"recomputes {recomputed}")
        if x.config.parallel.vocab_parallel_pipeline:
            words.append("vocabulary on all pipeline ranks")
        spare = (machine.limit - x.peak) / GIB
        first = f"take {self.number}: {x.schedule}, {', '.join(words)}, {x.step:.4g} s, "
        first += f"{spare:.3g} GiB to spare"
        rules = [*self._gain(device), *self.rules]
        if self.changes is not None:
            names = f" ({', '.join(self.changes)})" if self.changes else ""
            rules.insert(0, f"flags that differ from yours: {len(self.changes) or 'none'}{names}")
        flags = "the flags of this plan after yours"
        if self.number == YOURS:
            flags = "your flags as they are"
        said = [
            first,
            *(f"  {line}" for line in rules),
            *(f"  but {line}" for line in self.caveats),
            f"next: megapipe check with {flags} shows plan {digest(x.plan, x.config)} again.",
            "  Launch these by torchrun or scripts/ (docs/cluster.md, Launch).",
        ]
        return [
            row
            for line in said
            for row in wrap(line, _COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
        ]

    def _gain(self, device: Device) -> list[str]:
        """Return a line on how much longer the user's own plan takes, if this is another one."""
        if self.yours is None or self.number == YOURS:
            return []
        ratio = self.yours.step / self.plan.step
        text = f"yours takes {self.yours.step:.4g} s, {ratio:.3g} times as long"
        if known := published_range(self.yours, self.plan, device):
            text += f"; by the two published pairs {known}"
        return [text]


def to_take(
    best: Sequence[TimedPlan], own: Config, yours: TimedPlan | None, machine: Machine
) -> Advice:
    """Return the plan to take, with the rules that choose it.

    Nobody knows how much of their messages plans hide within passes, by pairs or by
    --tp-comm-overlap. So they count only if the user's own plan hides messages too, or if there are
    no others. A user's own plan that is as fast as the first of the plans that count, within CLOSE,
    needs no change. Otherwise `_chosen` chooses among plans that are faster than it by CLOSE.

    Args:
        best: the plans of the list, fastest first; at least one.
        own: the configuration of the user's own flags.
        yours: the plan of these flags; None if there is none.
        machine: the memory of a device and of a host.
    """
    counted = list(range(len(best)))
    if yours is None or not hides_unmeasured(yours):
        counted = [n for n in counted if not hides_unmeasured(best[n])] or counted
    sure = ""
    if len(counted) < len(best):
        sure = " without hidden messages"
    first = best[counted[0]]
    limit = (1 + CLOSE) * first.step
    unmeasured = _unmeasured(best[0], first)

    if yours is not None and yours.step < limit and machine.has_room(yours):
        rule = f"no plan{sure} is faster by more than predictions can tell"
        return Advice(YOURS, yours, (), (rule,), unmeasured)

    # A plan that is as fast as the user's own is no reason to change flags.
    has_room = yours is not None and machine.has_room(yours)
    worth = counted
    if yours is not None and has_room:
        worth = [n for n in counted if (1 + CLOSE) * best[n].step <= yours.step]
    n, rules = _chosen(best, worth, own, _known(own, yours), machine)
    near = _close(best, counted)
    gains = [one for one in near if one in worth]
    if gains != near:
        rules.insert(0, f"faster than yours by {CLOSE:.0%} or more: {_numbers(gains)}")
    if len(near) > 1:
        rules.insert(0, f"within {CLOSE:.0%} of the fastest{sure}: {_numbers(near)}")
    elif len(counted) < min(2, len(best)):
        rules.insert(0, f"it is the only plan{sure}")
    elif len(best) > 1:
        rules.insert(0, f"all other plans{sure} are slower by {CLOSE:.0%} or more")

    caveats = list(unmeasured)
    if not all(is_equal(first, best[other]) for other in {*near, n}):
        caveats.append(
            "some of these have other layouts, and how far such ratios are off is not known: "
            "measure them next to it"
        )
    # The page has this line of plan 1 already.
    load = load_line(best[n].plan, best[n].config, machine.limit)
    if load and n:
        caveats.append(load)
    caveats += _keeps_schedule(best, n, worth, own, machine)
    changes = None
    if names_layout(own):
        changes = tuple(changed(own, best[n].config))
    compared = yours if has_room else None
    return Advice(n + 1, best[n], changes, tuple(rules), tuple(caveats), compared)


def _keeps_schedule(
    best: Sequence[TimedPlan], taken: int, worth: list[int], own: Config, machine: Machine
) -> list[str]:
    """Return a line on a plan that keeps the user's pp and schedule and is about as fast.

    A user may prefer it, as predictions cannot distinguish it from the plan to take. There is no
    line if the plan to take keeps them itself, or if the user has no pipeline.

    Args:
        best: the plans of the list, fastest first.
        taken: the index in `best` of the plan to take.
        worth: indices of the plans that may be taken.
        own: the configuration of the user's own flags.
        machine: the memory of a device and of a host.
    """

    def kept(config: Config) -> tuple[int, str]:
        return config.parallel.pipeline_model_parallel_size, own_schedule(config)

    mine = kept(own)
    if mine[0] == 1 or kept(best[taken].config) == mine:
        return []
    for n in _close(best, [n for n in worth if n >= taken]):
        x = best[n]
        if kept(x.config) == mine and _need(x) <= _room(machine):
            more = x.step / best[taken].step - 1
            return [
                f"plan {n + 1} keeps your pp and schedule and takes {more:.1%} more, "
                "which predictions cannot tell from none"
            ]
    return []


def _need(x: TimedPlan) -> float:
    """Return the peak in bytes under an uneven load of the experts."""
    return x.peak + of_busy_experts(x.plan, x.config)


def _room(machine: Machine) -> float:
    """Return the bytes that a plan to take may need."""
    return machine.limit - _SPARE * machine.device


def _chosen(
    best: Sequence[TimedPlan],
    counted: list[int],
    own: Config,
    known: frozenset[str],
    machine: Machine,
) -> tuple[int, list[str]]:
    """Return (the plan to take, a line for each rule that has left some plans out).

    Of the plans within CLOSE of the fastest come first those with _SPARE of a device to spare,
    under an uneven load of their experts. Of these come those with fewest of `demands` in addition
    to the user's own. All such plans that are as fast as the first of them, within CLOSE, may be
    taken. The one is taken that changes fewest flags, and of several such the one that needs least
    memory. A user who has named no layout has nothing to keep, so that memory decides before flags.

    Args:
        best: the plans of the list, fastest first.
        counted: indices in `best` of the plans that count.
        own: the configuration of the user's own flags.
        known: the `demands` of the user's own plan.
        machine: the memory of a device and of a host.
    """
    rules = []
    near = _close(best, counted)
    peaks = {n: _need(best[n]) for n in counted}
    room = _room(machine)
    left = [n for n in near if peaks[n] <= room]
    if len(left) < len(near):
        line = f"with {_SPARE:.0%} of a device to spare"
        if any(peaks[n] > best[n].peak for n in near):
            line += ", also with an uneven load of their experts"
        rules.append(f"{line}: {_numbers(left) or 'none'}")
    left = left or near

    more = {n: demands(best[n]) - known for n in counted}
    fewest = min(len(more[n]) for n in left)
    plain = [n for n in left if len(more[n]) == fewest]
    if len(plain) < len(left):
        others = frozenset[str]().union(*(more[n] for n in left)) - more[plain[0]]
        rules.append(f"without {', '.join(sorted(others))}: {_numbers(plain)}")

    # A plan that was left out has nothing to say on which of the others are fast enough.
    alike = [n for n in counted if peaks[n] <= max(room, peaks[plain[0]])]
    alike = _close(best, [n for n in alike if n >= plain[0] and more[n] == more[plain[0]]])
    if added := [n for n in alike if n not in plain]:
        rules.append(f"as plain as {plain[0] + 1}, within {CLOSE:.0%} of it: {_numbers(added)}")
        plain += added

    changes = {n: len(changed(own, best[n].config)) for n in plain}
    if names_layout(own):
        if len(plain) > 1:
            rules.append(
                "fewest flags differ from yours, and of several such it needs least memory"
            )
        return min(plain, key=lambda n: (changes[n], best[n].peak)), rules
    if len(plain) > 1:
        rules.append("it needs least memory, as you have named no layout that it could keep")
    return min(plain, key=lambda n: (best[n].peak, changes[n])), rules


def _close(best: Sequence[TimedPlan], numbers: list[int]) -> list[int]:
    """Return the plans that are as fast as the first one, within CLOSE."""
    limit = (1 + CLOSE) * best[numbers[0]].step
    return [n for n in numbers if best[n].step < limit]


def _numbers(plans: list[int]) -> str:
    """Return indices of plans as the numbers of the page."""
    return ", ".join(str(n + 1) for n in plans)


def names_layout(own: Config) -> bool:
    """Return whether the user's flags say a layout or a schedule."""
    default = ParallelConfig()
    says = any(getattr(own.parallel, name) != getattr(default, name) for name in _OF_LAYOUT)
    return says or own_schedule(own) != PLAIN


def demands(x: TimedPlan) -> frozenset[str]:
    """Return, in words, what a plan needs in addition to a plain pipeline."""
    par = x.config.parallel
    found = []
    if par.use_megatron_fsdp:
        found.append(_SHARDED)
        place = x.plan.schedule.placement
        if par.shards_weights and place.num_stages == place.num_ranks:
            found.append(_AT_ONCE)
    elif par.pipeline_model_parallel_size == 1 and par.num_virtual_stages_per_pipeline_rank:
        found.append("virtual stages of one pipeline rank")
    if x.moves:
        found.append("single activations that are copied or computed again")
    entry = SCHEDULES.get(x.schedule)
    if entry is not None and entry.copies > 1:
        found.append("two copies of the weights")
    if entry is not None and entry.searched:
        found.append("a searched order")
    return frozenset(found)


def _known(own: Config, yours: TimedPlan | None) -> frozenset[str]:
    """Return the `demands` of the user's own flags.

    A run may refuse these flags as they are, and `yours` is then None.
    """
    if yours is not None:
        return demands(yours)
    return frozenset([_SHARDED, _AT_ONCE] * own.parallel.use_megatron_fsdp)


def _unmeasured(best: TimedPlan, sure: TimedPlan) -> tuple[str, ...]:
    """Return a line on how much the fastest plan gains by hiding messages; none below a percent.

    Args:
        best: the fastest plan.
        sure: the fastest plan that counts.
    """
    gain = 1 - best.step / sure.step
    if gain < _LEAST_GAIN:
        return ()
    return (
        f"plan 1 is {gain:.1%} faster than the fastest of these, if its messages hide under "
        "products as assumed: no GPU has measured that, so measure it first",
    )


def is_equal(first: TimedPlan, x: TimedPlan) -> bool:
    """Return whether a plan is slower than the first by less than predictions can tell.

    The two must have the same layout, microbatch and sharding: of other pairs of plans nobody has
    published enough steps to say how far their predicted ratio is off.
    """
    *sizes, _ = first.layout
    *others, _ = x.layout
    shards = [one.config.parallel.use_megatron_fsdp for one in (first, x)]
    same = sizes == others and shards[0] == shards[1]
    return same and x.step < (1 + CLOSE) * first.step


def choices(config: Config) -> list[str]:
    """Return the fields that a search has set to other values than their defaults.

    The fewer there are, the plainer is the plan. The schedule 1f1b counts as a default.
    """
    chosen = chosen_fields(config)
    found = []
    for flag in all_flags(Config).values():
        is_chosen = flag.field in chosen.get(flag.section, ())
        if is_chosen and config.value(flag.field) not in (flag.default, PLAIN):
            found.append(flag.field)
    return found


def plainness(config: Config) -> tuple[bool, int]:
    """Return (whether weights are sharded, number of choices); less is plainer."""
    return config.parallel.use_megatron_fsdp, len(choices(config))


def plainest(plans: Sequence[TimedPlan]) -> TimedPlan | None:
    """Return the plan with the fewest choices of those within CLOSE of the fastest.

    Plans with sharded weights come after all others. Of several such plans the fastest is
    returned; None without plans.
    """
    least = min((x.step for x in plans), default=0.0)
    near = [x for x in plans if x.step < (1 + CLOSE) * least]
    return min(near, key=lambda x: (*plainness(x.config), x.step), default=None)
