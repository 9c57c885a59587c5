"""A pipeline computes what the unsplit model computes: every gradient, every schedule, ranks as threads."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from tiny import STYLES, run_step

from megapipe.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build

MICROBATCHES = 4


@cache
def whole(style: str):
    return run_step(ProcessMesh.single(), STYLES[style], build("naive", 1, MICROBATCHES))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_losses_and_every_gradient_equal_the_unsplit_model(name, tp, pp, style):
    losses, gradients = whole(style)
    step = partial(run_step, model=STYLES[style], schedule=build(name, pp, MICROBATCHES))
    ranks = run_threads(step, tp=tp, pp=pp, timeout_s=30)

    assert [reported for reported, _ in ranks if reported] == [pytest.approx(losses, rel=1e-12)] * tp
    seen = set()
    for rank, (_, local) in enumerate(ranks):
        for param, (gradient, dim, full) in local.items():
            expected = gradients[param][0].reshape(full)
            if dim is not None:
                expected = expected.chunk(tp, dim)[rank % tp]
            torch.testing.assert_close(gradient, expected.reshape(gradient.shape), rtol=1e-9, atol=1e-14)
            seen.add(param)
    assert seen == set(gradients)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [2, 4])
def test_float32_gradients_have_the_same_bits_under_every_split(name, pp):
    step = partial(run_step, model=STYLES["gpt2"], dtype=torch.float32)
    _, gradients = step(ProcessMesh.single(), schedule=build("naive", 1, MICROBATCHES))
    for _, local in run_threads(partial(step, schedule=build(name, pp, MICROBATCHES)), pp=pp, timeout_s=30):
        for param, (gradient, _, _) in local.items():
            assert torch.equal(gradient, gradients[param][0]), param
