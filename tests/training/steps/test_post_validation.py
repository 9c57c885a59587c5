"""The optimizer step without a barrier: the bits of a run with one, whatever the guess was."""

import math
import os
from dataclasses import replace

import pytest
from short_run import config
from tiny import STYLES

from megapipe.optim.rule import multiply
from megapipe.plan import make_plan
from megapipe.schedule import SCHEDULES, Exchange, Kind, ScheduleError, build, lower, verify
from megapipe.schedule.families.step.optimizer import with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from tools.proofs.fuzz_post_validation import Case, run_case

NAN, INF = math.nan, math.inf
STEPS = 9  # scripts/nightly.sh draws runs of thirty


@pytest.mark.parametrize(
    ("case", "undone"),
    [
        (Case("zb-h2", 2, 4, clip=100.0, bad=((0, NAN), (3, 1e5), (4, 1e5), (6, INF), (STEPS - 1, NAN))), 4),
        (Case("zb-v", 2, 2, dp=2, distributed=True, overlap=True, precision="bf16", clip=0.0, bad=((5, INF),)), 1),
        (Case("1f1b", 2, 4, precision="fp16", clip=0.0, bad=((6, 1e30),), saves=8, evaluates=5), 1),
        (Case("dualpipe", 2, 4, clip=1e-3), STEPS - 1),
    ],
)
def test_a_run_has_the_bits_of_one_with_a_barrier(case, undone):
    differences, late, wrong = run_case(replace(case, steps=STEPS))
    assert not differences
    assert wrong == undone
    assert late >= STEPS - 3, "only evaluations, saves and the end wait"


def test_it_waits_after_a_wrong_guess_until_so_many_steps_were_right():
    """--post-validation-after 3: step 5 is undone; 6 to 8 wait, with 0 to 2 and the last."""
    differences, late, wrong = run_case(Case("zb-h2", 2, 4, clip=100.0, bad=((5, NAN),), after=3, steps=11))
    assert (differences, late, wrong) == ([], 11 - 7, 1)


SKIPPED = [
    Case("1f1b", 2, 2, dp=2, clip=100.0, distributed=True, bad=((0, INF), (1, NAN))),
    Case("zb-h2", 2, 4, precision="fp16", clip=100.0, bad=((1, INF),)),
]
if os.environ.get("MEGAPIPE_NIGHTLY"):
    SKIPPED += [
        Case("1f1b", 2, 4, dp=2, clip=0.0, bad=((1, NAN),), optimizer="sgd"),
        Case("zb-v", 2, 4, dp=2, precision="bf16", clip=1.0, bad=((2, NAN),), evaluates=2),
    ]


@pytest.mark.parametrize("case", SKIPPED)
def test_a_skipped_step_that_waited_leaves_no_scale_for_the_next(case):
    """1 / (replicas x loss scale) of the skipped step multiplied the next step's gradients too."""
    differences, _, _ = run_case(replace(case, after=3, steps=6))
    assert differences == []


class DecayedDescent:
    """Gradient descent that adds the decay to the gradient where it lies."""

    elementwise, state = True, ()

    def update(self, parts, steps):
        for part in parts:
            part.grad.add_(part.value, alpha=0.1)
            part.value.sub_(part.grad, alpha=part.lr)


class SweepingDescent(DecayedDescent):
    """The same, which scales and rounds itself."""

    sweeps = True

    def update(self, parts, steps):
        for part in parts:
            multiply(part.grad, part.factors)
        super().update(parts, steps)
        for part in parts:
            part.round_value()


def decayed(train):
    return DecayedDescent()


def sweeping(train):
    return SweepingDescent()


@pytest.mark.parametrize("name", ["decayed", "sweeping"])
def test_an_update_of_yours_that_writes_gradients_is_undone_and_done_right(name):
    """It was done again from the gradients that the first one had left."""
    case = Case("1f1b", 2, 2, clip=100.0, bad=((3, 1e5),), optimizer=f"{__file__}:{name}", steps=6)
    differences, late, undone = run_case(case)
    assert (differences, undone) == ([], 1)
    assert late >= 6 - 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_message_is_half_way_where_passes_may_run_again(name):
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16)):
        try:
            table = with_optimizer(with_reduction(build(name, ranks, microbatches)), barrier=False)
        except ScheduleError:
            continue
        verify(table)
        before = []
        for rank, program in enumerate(lower(table)):
            cut = next(i for i, item in enumerate(program) if not isinstance(item, Exchange) and item[0].kind is Kind.V)
            messages = {m for item in program[:cut] if isinstance(item, Exchange) for m in item.messages}
            before.append((rank, messages))
        for rank, messages in before:
            for other, theirs in before:
                between = [{m for m in x if {m.src, m.dst} == {rank, other}} for x in (messages, theirs)]
                assert between[0] == between[1]


@pytest.mark.parametrize(("zero", "kept"), [(False, 12), (True, 6)])
def test_the_plan_counts_what_is_kept_until_v(zero, kept):
    plain = config(STYLES["gpt2"], dp=2, pp=2)
    plain = replace(plain, parallel=replace(plain.parallel, use_distributed_optimizer=zero))
    late = replace(plain, parallel=replace(plain.parallel, enable_optimizer_post_validation=True))
    before, after = make_plan(plain), make_plan(late)
    for rank, work in enumerate(before.works):
        # the tied head of the last rank has the first one's bytes too
        assert after.state_bytes[rank] - before.state_bytes[rank] == kept * work.parameters
