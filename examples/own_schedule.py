"""Schedules of your own: 1F1B with twice the warm-up, and GPipe over chunks with split backwards.

    python tools/schedules.py show examples/own_schedule.py:eager --pp 4 --microbatches 8 --costs 1,1,1,0.5
    python tools/schedules.py compare examples/own_schedule.py:eager --pp 4 --microbatches 8 --only zb-h1
    python tools/proofs/fuzz_equivalence.py --seconds 60 --schedules examples/own_schedule.py:eager
    torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-schedule examples/own_schedule.py:eager ...

Whatever order it writes down is verified before anything else happens, and trains to the same bits as 1F1B.
"""

from megapipe.schedule import Recorder, Schedule, loop


def eager(ranks: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, which hides the round trip of slow messages; memory 2p-1"""
    rows = []
    for rank in range(ranks):
        rec, warmup = Recorder(), min(2 * (ranks - 1 - rank), microbatches)
        for i in range(microbatches + warmup):
            if i < microbatches:
                rec.f(rank)
            if i >= warmup:
                rec.bw(rank)
        rows.append(tuple(rec.steps))
    return Schedule("eager", loop(ranks), microbatches, tuple(rows))


def split(ranks: int, microbatches: int, *, chunks: int = 1) -> Schedule:
    """GPipe over v chunks; the W of a chunk fill the time until the gradients of the next one arrive; memory m"""
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        for chunk in range(chunks):
            for _ in range(microbatches):
                rec.f(chunk * ranks + rank)
        for chunk in reversed(range(chunks)):
            for _ in range(microbatches):
                rec.b(chunk * ranks + rank)
            rec.pay()
        rows.append(tuple(rec.steps))
    return Schedule("split", loop(ranks, chunks), microbatches, tuple(rows))
