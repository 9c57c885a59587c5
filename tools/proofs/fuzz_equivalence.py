"""Draw schedules, layouts and settings, and compare their training with one process.

    python tools/proofs/fuzz_equivalence.py --seconds 600 --seed 0

A case trains a tiny GPT for three steps, ranks as threads over gloo, and must have the losses,
gradients, gradient norms, weights and validation loss of the unsplit model, not compiled and with
nothing reported but its loss; where nothing is summed in another order, to the bit in every type.
Where gradients, or weights too, are shares between runs of passes, it also trains with weights that
live for ever, and must have all bits of that; where only the optimizer's state is in two shares,
those of the run without shares and without overlap. Two of five tables are drawn too
(tables/drawn.py): passes in any order, chains of unequal length; under those Megatron's no_sync is
left once for each chunk, not early. A case that differs is made smaller, and is the first of the
next run (shrink.py).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from megapipe.checks.context import context_problems
from megapipe.checks.model import delta_problems
from megapipe.errors import ConfigError
from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.messages.transport import P2PMode
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import sharing
from megapipe.schedule import SCHEDULES, Kind, Placement, ScheduleError, entry_of
from tools.proofs.equivalence import Outcome, differences, differing_bits, train
from tools.proofs.equivalence_case import METRICS, OVERRIDES, RECOMPUTE, SEQ, VOCAB, Case, table
from tools.proofs.families.styles import EXPERTS, PARTS, STYLES
from tools.proofs.shrink import Draws, Fuzzer, fail, found_by
from tools.proofs.synchronised import WAYS, too_early
from tools.proofs.tables.moved import MODULES, MOVED

SLICED, COMPILED = 0.25, 0.02
"""Share of the cases whose microbatches go in slices, where they can; of those of one or two ranks
that are compiled, which takes a minute.
"""


def run(case: Case) -> list[str]:
    """The differences of a case, ranks as threads."""
    seconds = 300 if case.compile else 60
    sizes: dict[str, Any] = {
        axis: getattr(case, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")
    }
    shares = sharing(table(case).placement, tied=case.tied)

    def trained(case: Case) -> list[Outcome]:
        return run_threads(partial(train, case=case), **sizes, shares=shares, timeout_s=seconds)

    outcomes = trained(case)
    found = differences(case, outcomes)
    if case.sharding != "none":
        found += differing_bits(outcomes, trained(sharded_otherwise(case)))
    elif case.distributed and case.dp * case.cp == 2:  # two numbers have one sum
        whole = replace(case, distributed=False, overlap=False)
        found += differing_bits(outcomes, trained(whole))
    if case.drawn is not None:
        own = table(replace(case, vocabulary=False, slices=(), depths=(), sharding="none"))
        found += [problem for way in WAYS for problem in too_early(own, way)]
    return found


def sharded_otherwise(case: Case) -> Case:
    """Return the case under ZeRO-1, or with weights that always stay if they did not, and the other
    way. The second holds if gradients are summed several times a step, or in an order of four ranks
    that tied weights, summed in full, do not have.
    """
    sums = [x for row in table(case).ranks for step in row for x in step if x.kind is Kind.RS]
    ordered = case.dp * case.cp == 2 or not (case.tied or case.depths)
    if ordered and len(sums) == len({x.stage for x in sums}):
        return replace(case, sharding="none", living=None, distributed=True)
    return replace(case, sharding="grads" if case.sharding == "weights" else "weights")


def draw(rng: random.Random, names: Sequence[str] = tuple(SCHEDULES)) -> Case:
    """A case of one of these schedules that it allows, of at most 8 ranks. names: as `build` takes
    them, no files.
    """
    draws = len(names) == len(SCHEDULES)
    while True:
        name, pp = rng.choice(names), rng.randint(1, 4)
        tp, dp = rng.choice(
            [
                sizes
                for sizes in ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))
                if sizes[0] * sizes[1] * pp <= 8
            ]
        )
        cp = rng.choice([c for c in (1, 1, 2, 4) if c * tp * dp * pp <= 8])
        case = Case(
            schedule=name,
            pp=pp,
            microbatches=rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 12)),
            layers=(),
            chunks=rng.randint(1, 3) if entry_of(name).chunks is None else None,
            tp=tp,
            cp=cp,
            way=rng.choice(("p2p", "all_gather", "a2a")),
            dp=dp,
            style=rng.choice(list(STYLES)),
            tied=rng.random() < 0.5,
            recompute=rng.choice(list(RECOMPUTE)),
            sequence_parallel=tp > 1 and rng.random() < 0.5,
            per_token_loss=rng.random() < 0.25,
            p2p=rng.choice(list(P2PMode)).value,
            file=rng.choice((None, None, "json", "csv")),
            variable=cp < 4 and rng.random() < 0.25,
            distributed=dp * cp > 1 and rng.random() < 0.5,
            overlap=dp * cp > 1 and rng.random() < 0.5,
            drawn=rng.randrange(10**6) if draws and rng.random() < 0.4 else None,
            buckets=rng.choice((1, 2, 3, 9)),
            dtype=rng.choice(("float64", "float64", "float64", "float32", "bfloat16", "float16")),
            attention_dropout=rng.choice((0.0, 0.1, 0.3)),
            hidden_dropout=rng.choice((0.0, 0.1)),
            fused=rng.random() < 0.5,
            metrics=rng.choice(list(METRICS)),
            documents=rng.choice(("none", "none", "attention", "positions", "both")),
            window=rng.choice((None, None, 0, 2, 7)),
            overrides=rng.choice(list(OVERRIDES)),
            loss_scale=rng.choice((1.0, 256.0, 2.0**40)),
            compile=rng.random() < COMPILED and tp * cp * dp * pp <= 2,
        )
        shares = (
            pp > 1 == cp and not case.variable and VOCAB % (pp * tp) == 0 and rng.random() < 0.25
        )
        batch, memory = (
            1 if case.variable else rng.choice((1, 1, 2)),
            rng.choice([*MOVED, "none", "none"]),
        )
        case = replace(case, batch=batch, memory=memory, vocabulary=shares)
        case = replace(case, **_drawn_passes(rng, split=dp * cp > 1, whole=shares))
        # Another rounding sends a token elsewhere.
        routes_alike = case.same_bits or case.dtype == "float64"
        if routes_alike and rng.random() < 0.5:
            # Of a microbatch: what is dropped is decided in each.
            parts = cp > 1 or case.sequence_parallel
            case = replace(
                case,
                experts=rng.choice([kind for kind in EXPERTS if kind != "dropping" or not parts]),
            )
        if case.experts != "none" and (tp == 1 or case.sequence_parallel):
            case = replace(case, **_drawn_grid(rng, tp * cp * dp, case.variable))
        case = _perhaps_sliced(rng, _perhaps_named(rng, _with_parts(rng, case)))
        try:
            place = table(case).placement
        except ScheduleError:
            continue
        case = replace(
            case, layers=_drawn_layers(rng, place), depths=_drawn_depths(rng, case, place)
        )
        if not 0 < sum(case.layers) <= 10:
            continue
        if not [*context_problems(case.config), *delta_problems(case.config)]:
            return case


def _with_parts(rng: random.Random, case: Case) -> Case:
    """Draw what differs from the style: a layer has one activation, and experts no scalars."""
    # longrope has a divisor for each pair of a head, and all heads the same ones.
    if case.style == "phi3" and case.overrides == "widths":
        case = replace(case, overrides="none")
    if case.window is not None:
        case = replace(case, skips=rng.choice((None, None, "2", "3")))
    if case.overrides == "kinds" or rng.random() < 0.5:
        return case
    placed = STYLES[case.style].get("norm_placement", "pre") != "pre"
    without = {"xielu": case.experts != "none", "one norm": placed, "two norms": placed}
    without["head bias"] = case.fused or case.vocabulary
    names = [name for name in PARTS if not without.get(name)]
    return replace(case, parts=rng.choice(names))


def _perhaps_named(rng: random.Random, case: Case) -> Case:
    """The case with what goes to the host by the modules that saved it."""
    if case.memory not in ("out", "some") or case.compile or rng.random() >= 0.5:
        return case
    return replace(case, modules=rng.choice(MODULES if case.experts != "none" else MODULES[:-2]))


def _perhaps_sliced(rng: random.Random, case: Case) -> Case:
    """Return the case in slices, which ranks divide in equal parts, if it can be cut."""
    multiple = case.cp * (2 if case.cp > 1 else 1) * (case.tp if case.sequence_parallel else 1)
    whole = case.vocabulary or case.variable or case.style == "delta"
    if whole or multiple > SEQ or rng.random() >= SLICED:
        return case
    ends = rng.sample(range(1, SEQ // multiple), rng.randint(0, SEQ // multiple - 1))
    lengths = tuple(multiple * (b - a) for a, b in pairwise([0, *sorted(ends), SEQ // multiple]))
    # What has a sum and a count.
    metrics = case.metrics if case.metrics in ("none", "pair", "empty") else "none"
    gathers = case.dispatcher == "allgather" and case.ep * (case.etp or case.tp) > case.tp * case.cp
    follows = case.documents in ("attention", "both") and not gathers and rng.random() < 0.5
    return replace(
        case, slices=lengths, follows=follows, paired=False, joined=None, metrics=metrics
    )


def _drawn_layers(rng: random.Random, place: Placement) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, 1, 2)) for _ in range(place.chain))


def _drawn_depths(rng: random.Random, case: Case, place: Placement) -> tuple[int, ...]:
    """Ranks of depths of multi-token prediction; of two copies of a model their ends share the
    outer ranks.
    """
    if case.slices or case.parts == "head bias" or rng.random() >= 0.4:
        return ()
    copies = table(
        replace(case, file=None)
    ).placement.num_chains  # a CSV has no chain without passes
    where = (0, place.num_ranks - 1) if copies > 1 else range(place.num_ranks)
    return tuple(rng.choice(where) for _ in range(rng.choice((1, 1, 2, 3))))


def _drawn_passes(rng: random.Random, *, split: bool, whole: bool) -> dict[str, Any]:
    """Which passes run together; what ranks have shares of, if there are several with the same
    weights, and how many stages of a rank are whole at a time: all of them, or few.
    """
    passes = {
        "paired": rng.random() < 0.3,
        "joined": rng.randrange(10**6) if rng.random() < 0.3 else None,
    }
    living = rng.choice((None, (rng.randint(1, 3), rng.randint(1, 3), rng.random() < 0.5)))
    sharding = rng.choice(("none", "none", "none", "grads", "weights")) if split else "none"
    return {
        **({} if whole else passes),
        "sharding": sharding,
        "living": None if sharding == "none" else living,
    }


def _drawn_grid(rng: random.Random, ranks: int, variable: bool) -> dict[str, Any]:
    """Draw how six experts of width 8 lie over the ranks of a stage. variable: these have sequences
    of other lengths.
    """
    ep, etp = rng.choice([(e, t) for e in (1, 2, 3, 6) for t in (1, 2, 4) if ranks % (e * t) == 0])
    return {
        "ep": ep,
        "etp": etp,
        "dispatcher": "alltoall" if variable else rng.choice(("allgather", "alltoall")),
    }


def command(case: Case) -> str:
    """Return the command that runs the case again."""
    given = {
        f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != f.default
    }
    return f"python tools/proofs/fuzz_equivalence.py --case '{json.dumps(given)}'"


def read(text: str) -> Case:
    """The case of a command. Raises: ValueError, TypeError, KeyError or ScheduleError for another
    text.
    """
    given = json.loads(text)
    lists = {
        name: tuple(given[name])
        for name in ("layers", "slices", "depths", "living", "modules")
        if name in given
    }
    case = Case(**given | lists)
    if len(case.layers) != (chain := table(case).placement.main):
        raise ValueError(f"{len(case.layers)} layer counts for a chain of {chain}")
    return case


@dataclass(frozen=True)
class Flags(Draws):
    """Draw schedules, layouts and settings, and compare their training with one process's."""

    seconds: float = 60.0
    """How long to go on."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Names, or FILE.py:NAME of your own."""
    case: str | None = None
    """Run this one case, as printed."""
    only_slices: bool = False
    """Cases alone whose microbatches go in several slices."""
    only_memory: bool = False
    """Cases alone whose activations go to the host or are computed again: O, L and R."""
    only_shares: bool = False
    """Cases alone whose ranks keep shares of gradients, or weights too, between runs of passes: AF,
    AB and RS.
    """
    only_states: bool = False
    """Cases alone whose ranks keep two shares of the optimizer's state, and gradients and weights
    whole: all bits are compared."""

    def wanted(self, case: Case) -> bool:
        """Return whether a case is of the kinds that are asked for."""
        return (
            (len(case.slices) > 1 or not self.only_slices)
            and (bool(table(case).kinds & {Kind.O, Kind.R}) or not self.only_memory)
            and (case.sharding != "none" or not self.only_shares)
            and (self._splits_states_alone(case) or not self.only_states)
        )

    def _splits_states_alone(self, case: Case) -> bool:
        return case.distributed and case.sharding == "none" and case.dp * case.cp == 2


def _given(text: str) -> Case:
    try:
        return read(text)
    except (ValueError, TypeError, KeyError, ScheduleError) as error:
        raise ConfigError(f"--case {text} is none that was printed here: {error}") from None


def main(argv: Sequence[str]) -> None:
    options = parse(Flags, argv)
    torch.set_num_threads(1)
    try:
        for name in options.schedules:
            entry_of(name)
    except ScheduleError as error:
        raise ConfigError(f"--schedules {error}") from None
    if options.case:
        case = _given(options.case)
        if found := found_by(run, case):
            fail("the case", found, command(case))
        print("no difference from one process")
        return
    fuzzer = Fuzzer("equivalence", partial(draw, names=options.schedules), run, options.wanted)
    fuzzer.prove(options, command)
    print(f"{fuzzer.count} cases, seed {options.seed}: no difference from one process")


if __name__ == "__main__":
    stop.run(main)
