"""--iterations-to-skip passes over samples: no step is made of them, and the learning rate waits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from short_run import config, run_of
from tiny import STYLES

from megapipe.checks.run import flag_problems
from megapipe.distributed.mesh import ProcessMesh


def rows(path, *skip: int, lr: float, post: bool = False):
    """Iteration -> (loss, learning rate) of six steps."""
    made = config(STYLES["llama"], train_iters=6, lr=lr, iterations_to_skip=skip, metrics_file=str(path))
    if post:
        made = made.with_fields(enable_optimizer_post_validation=True, post_validation_after=0)
    run_of(ProcessMesh.single(), made).train()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["iteration"]: (row["losses"]["lm loss"], row["learning_rate"]) for row in found}


@pytest.mark.parametrize("post", [False, True])
def test_the_other_iterations_read_the_samples_that_they_would_have_read(tmp_path, post):
    """With a rate of almost nothing a loss says which samples were read."""
    whole = rows(tmp_path / "a", lr=1e-12)
    some = rows(tmp_path / "b", 1, 4, 5, lr=1e-12, post=post)
    assert some.keys() == {2, 3, 6}
    for n, (loss, _) in some.items():
        assert loss == pytest.approx(whole[n][0], rel=1e-6)


def test_the_learning_rate_waits(tmp_path):
    whole = rows(tmp_path / "a", lr=3e-3)
    some = rows(tmp_path / "b", 1, 2, lr=3e-3)
    assert [rate for _, rate in some.values()] == [rate for _, rate in whole.values()][:4]


def test_iterations_count_from_1():
    made = replace(config(STYLES["gpt2"])).with_fields(iterations_to_skip=(0, 3))
    assert "--iterations-to-skip 0 3 must be at least 1, the first iteration" in flag_problems(made)
