"""Copies of a run: what they took, and how long passes stood still for them."""

from dataclasses import replace
from functools import partial

from megapipe.distributed.axis import CPU
from megapipe.pipeline_parallel.passes.begin import Begun
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Costs, Kind, Pass
from megapipe.schedule.measured.costs import MeasuredPass, Spent
from megapipe.schedule.views.lanes import Copied
from megapipe.training.report.compared import Measured
from megapipe.training.report.numbers import PASSES, fields


def test_copies_are_told_of_the_rank_that_waits_for_them_most():
    """In ms, beside what the plan predicts of it."""
    copies, predicted = (Copied(0.5, 0.25, 0.0), Copied(0.2, 0.1, 0.3)), (Copied(0.4, 0.4, 0.0), Copied(0.2, 0.2, 0.1))
    now = Measured(1, Costs(), (Spent(1, 1, 1, 0),) * 2, 1.0, *(0.1,) * 4, 2.0, 0.1, Costs(), (), (), None, None)
    assert not [text for text in fields(PASSES, now) if text.startswith("copies")]
    said = fields(PASSES, replace(now, copies=copies, predicted_copies=predicted))
    assert list(said)[-1] == (
        "copies of rank 1 (ms): 200.0 out, 100.0 back, 300.0 exposed, predicted: 200.0, 200.0, 100.0"
    )


def test_a_copy_is_exposed_while_its_call_and_the_wait_for_it_keep_passes_from_running():
    watch, now = Stopwatch(CPU), iter((2.0, 2.5, 4.0, 7.0))
    watch.mark = partial(next, now)
    item = Pass(Kind.L, 0, 3)
    begun = watch.copying(item, watch.mark(), Begun(lambda: None, lambda: (2.2, 6.9)))
    assert begun.wait() is None
    assert watch.copied() == [MeasuredPass(item, 2.2, 6.9, waited=0.5 + 3.0)]
