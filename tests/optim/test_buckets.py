"""Buckets of layers: what is summed over data parallel while a stage's last weight pass goes on."""

from dataclasses import replace

import pytest
import torch
from short_run import config, datasets, run_of
from tiny import STYLES
from torch import nn

from megapipe.optim.buckets import buckets_of
from megapipe.pipeline_parallel.threads import run_threads

SIZES = {"embedding.weight": 50, "layers.4.a": 10, "layers.4.b": 2, "layers.5.a": 10, "layers.6.a": 10, "norm.a": 3}


@pytest.mark.parametrize(
    ("how", "firsts"),
    [
        ({}, [0]),
        ({"least": 1}, [2, 1, 0]),
        ({"least": 11}, [1, 0]),
        ({"least": 33}, [0]),
        ({"number": 1}, [0]),
        ({"number": 2}, [1, 0]),
        ({"number": 9}, [2, 1, 0]),
    ],
)
def test_a_bucket_has_layers_that_follow_each_other_from_the_last_on(how, firsts):
    params = {name: nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    made = buckets_of(params, **how)
    assert [bucket.first for bucket in made] == firsts
    assert {bucket.layers for bucket in made} == {3}
    assert sorted(name for bucket in made for name in bucket.params) == sorted(params)
    assert {"embedding.weight", "norm.a"} <= made[-1].params.keys()


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("zb-h1", 2)])
def test_the_sum_of_a_bucket_begins_while_the_layers_before_it_have_no_whole_gradient(schedule, pp):
    """In BW as autograd goes back, in W as products that waited are done."""

    def body(mesh) -> list[torch.Tensor]:
        training = run_of(mesh, flags)
        (buckets,) = training.run.optimizer.chunks
        front, seen = buckets[-1], []

        def watched(start, *given):
            seen.append(front.grads.clone())
            return start(*given)

        for b in buckets:
            b.start_reduce = lambda *given, start=b.start_reduce: watched(start, *given)
        training.driver.whole()
        return seen

    plain = config(STYLES["gpt2"], dp=2, pp=pp, schedule=schedule)
    flags = replace(plain, parallel=replace(plain.parallel, overlap_grad_reduce=True, ddp_bucket_size=1))
    datasets()
    for seen in run_threads(body, dp=2, pp=pp):
        assert len(seen) == 4 // pp
        assert all(not torch.equal(early, seen[-1]) for early in seen[:-1])
