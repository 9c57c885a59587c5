"""Layouts as a user starts them: a run saved under one goes on under another, bit for bit, and says what it does."""

import re

from .test_launch import MODEL, launch, numbers

RUN = (
    f"{MODEL} --mock-data --split 1,0,99 --eval-iters 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 3e-3 --log-interval 1 --save-interval 2"
)


def test_a_checkpoint_of_one_layout_goes_on_under_another(tmp_path):
    v_with_empty_stage = "--pipeline-schedule v-half --pipeline-model-parallel-layout Et||t*2|tL"
    saved = launch(f"{RUN} --pipeline-model-parallel-size 2 {v_with_empty_stage} --save {tmp_path}", 2)
    loop_by_cost = "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout auto"
    resumed = launch(
        f"{RUN} --pipeline-model-parallel-size 2 {loop_by_cost} --load {tmp_path} --ckpt-step 2 "
        f"--save {tmp_path}/again",
        2,
    )
    last_two = {n: row for n, row in numbers(saved).items() if int(n) > 2}
    assert len(last_two) == 2
    assert numbers(resumed) == last_two

    rows = re.findall(r"^ +(\d) +(\d) +(\d) +(\S+) +(\S+) +([\d,]+) ", saved, re.MULTILINE)
    assert [row[:5] for row in rows] == [
        ("0", "0", "0", "0", "embedding"),
        ("1", "1", "0", "-", "-"),
        ("2", "1", "1", "1-2", "-"),
        ("3", "0", "1", "3", "loss"),
    ]
    assert "after " in resumed
    assert resumed.index("predicted under interleaved") < resumed.index("iteration        3/")
