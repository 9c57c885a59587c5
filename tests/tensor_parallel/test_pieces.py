"""--tp-comm-overlap: products in pieces while rows of other ranks travel, the same numbers as of whole products."""

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from short_run import config
from tiny import GPT2, LLAMA, run_step

from megapipe.config import Config
from megapipe.distributed.axis import Axis, Pending
from megapipe.flags.idle import idle
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan.make import make_plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import with_messages
from megapipe.schedule import Costs, build
from megapipe.tensor_parallel.fp8.products import FP8Recipe
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.pieces import CollectiveMatmul


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize(("style", "schedule", "pp"), [(GPT2, "1f1b", 1), (LLAMA, "zb-h1", 2)], ids=["BW", "B and W"])
def test_ranks_have_the_numbers_of_whole_products(style, schedule, pp, sequence_parallel):
    """To float64's rounding: a kernel may add up otherwise for fewer rows."""
    plain, pieces = (
        run_threads(
            partial(
                run_step,
                model=replace(style, sequence_parallel=sequence_parallel, tp_comm_overlap=overlap),
                schedule=build(schedule, pp, 4),
            ),
            tp=2,
            pp=pp,
        )
        for overlap in (False, True)
    )
    for (losses, gradients), (found, others) in zip(plain, pieces, strict=True):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, (gradient, *_) in gradients.items():
            torch.testing.assert_close(others[name][0], gradient, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Told(Axis):
    """An axis that tells of what travels, and says so of its end."""

    events: list[str] = field(default_factory=list, compare=False)

    def _sent(self, what: str, out: torch.Tensor) -> Pending:
        self.events.append(what)
        return Pending(out, self)

    def wait(self) -> None:
        self.events.append("wait")

    def start_shift(self, x, channel=0, into=None):
        return self._sent("send", torch.zeros_like(x) if into is None else into)

    def start_all_reduce(self, x, op="sum"):
        return self._sent("sum", x)


@pytest.mark.parametrize(
    ("way", "shares", "wanted"),
    [
        ("gathered", True, "send product wait send product wait send product wait product"),
        ("summed", True, "product send product wait send product wait send product wait"),
        ("summed", False, "product sum product sum product sum product sum wait wait wait wait"),
        ("gathered", False, "product"),
    ],
)
def test_what_travels_has_begun_before_the_next_product(way, shares, wanted):
    axis = Told(1, 4, (0, 1, 2, 3))

    def multiply(rows, *, out=None):
        axis.events.append("product")
        return rows.new_zeros(len(rows), 3) if out is None else out

    getattr(CollectiveMatmul(axis, shares), way)(torch.zeros(8, 2), multiply, 3)
    assert " ".join(axis.events) == wanted


@pytest.mark.parametrize(
    ("kind", "cut"), [("tensorwise", False), ("delayed", False), ("blockwise", True), (None, True)]
)
def test_rows_that_share_a_scale_are_not_cut(kind, cut):
    recipe = None if kind is None else FP8Recipe("e4m3", kind)
    linear = ColumnParallelLinear(32, 32, tp=Axis(0, 2, (0, 1)), bias=False, fp8=recipe, in_pieces=True)
    assert (linear._opens.pieces is not None) == cut


def test_one_rank_has_nothing_to_send():
    assert idle(parse(Config, ["--tp-comm-overlap"])) == [
        ("--tp-comm-overlap", "nothing is sent, without --tensor-model-parallel-size of at least 2")
    ]


@pytest.mark.parametrize(("sequence_parallel", "shows"), [(True, 0.0), (False, 1 / 4)], ids=["sequence", "whole"])
def test_the_plan_counts_what_no_product_hides(sequence_parallel, shows):
    """A second of products hides all but the last of four pieces; a microsecond hides next to nothing."""

    def added(overlap: bool, seconds: float) -> float:
        run = config(replace(GPT2, sequence_parallel=sequence_parallel, tp_comm_overlap=overlap), tp=2)
        given = Costs(f=(seconds,), b=(seconds,), w=(seconds,))
        return with_messages(given, make_plan(run), run, Device()).f[0] - seconds

    assert added(True, 1.0) == pytest.approx(shows * added(False, 1.0), abs=1e-12)
    assert added(True, 1e-6) == pytest.approx(added(False, 1e-6), rel=0.01)
