"""Which rank is named, from what each rank says of itself."""

from dataclasses import replace

import pytest

from megapipe.pipeline_parallel.watch.diagnosis import TERMINATED, Link, Report, first_mismatch

STEP = "iteration 7"


def report(place, waits=None, ahead=(), **kwargs):
    return Report(
        **{"name": "rank", "place": f"pass {place} of {STEP}", "step": STEP, "since_s": 6.0, "waits": waits}
        | {"ahead": list(ahead), "note": "timed out", "cause": None}
        | kwargs
    )


def takes(what, peer):
    return Link(what, peer, False)


def gives(what, peer):
    return Link(what, peer, True)


# 1F1B on three ranks: rank 2 waits for a forward of rank 1, which waits for what rank 2 would make of it.
SKIPPED = {
    0: report("0B2", takes("1B2", 1), [takes("1B2", 1)]),
    1: report("1B2", takes("2B2", 2), [takes("2B2", 2), gives("1B2", 0)]),
    2: report("2F2", takes("1F2", 1), [takes("1F2", 1), gives("2B2", 1)]),
}
PENDING = SKIPPED | {1: replace(SKIPPED[1], ahead=[gives("1F2", 2), *SKIPPED[1].ahead])}


@pytest.mark.parametrize(
    "reports, sentence",
    [
        (SKIPPED, "rank 1 is in pass 1B2 of iteration 7 and never sent 1F2 to rank 2; ranks 0 and 2 wait for it"),
        (
            PENDING | {1: replace(PENDING[1], waits=None, place="pass 1F2 of iteration 7", since_s=8.04)},
            "rank 1 is in pass 1F2 of iteration 7 since 8.0 s and has not yet sent 1B2 to rank 0; "
            "ranks 0 and 2 wait for it",
        ),
        (
            {0: report("0F2", gives("0F1", 1)), 1: report("1B2"), 2: report("2B2")},
            "rank 1 is in pass 1B2 of iteration 7 and never received 0F1 from rank 0; rank 0 waits for it",
        ),
        (
            {rank: SKIPPED[rank] for rank in (0, 2)},
            "rank 1 does not answer: killed, stopped or cut off; rank 0 waits for 1B2 from rank 1; "
            "rank 2 waits for 1F2 from rank 1",
        ),
        ({0: SKIPPED[0]}, "ranks 1 and 2 do not answer: killed, stopped or cut off; rank 0 waits for 1B2 from rank 1"),
        (
            SKIPPED | {1: replace(SKIPPED[1], cause="ValueError: shapes")},
            "rank 1 ended in pass 1B2 of iteration 7: ValueError: shapes",
        ),
        (SKIPPED | {1: replace(SKIPPED[1], note=TERMINATED)}, "rank 1 was asked to stop (SIGTERM)"),
        (
            {rank: report("0F0", step=f"iteration {7 + (rank == 2)}") for rank in range(3)},
            "rank 0 is in iteration 7; rank 1 is in iteration 7; rank 2 is in iteration 8",
        ),
        (PENDING, "no message is missing; rank 0 has been longest in its place, pass 0B2 of iteration 7"),
    ],
    ids=["skipped", "busy", "not received", "silent", "two silent", "failed", "told to stop", "steps", "lost"],
)
def test_the_rank_that_holds_up_the_others_is_named(reports, sentence):
    assert first_mismatch(reports, world=3) == sentence


def test_a_rank_that_has_not_begun_the_step_is_not_blamed_for_what_it_has_not_sent():
    beginning = replace(SKIPPED[1], waits=None, ahead=None, place="the start of iteration 7")
    assert first_mismatch(SKIPPED | {1: beginning}, world=3) == (
        "rank 1 is in the start of iteration 7 since 6.0 s and has not yet sent 1B2 to rank 0; "
        "ranks 0 and 2 wait for it"
    )


def test_reports_pass_through_the_store_unchanged():
    for said in SKIPPED.values():
        assert Report.from_json(said.to_json()) == said
    assert str(SKIPPED[2]) == "rank is in pass 2F2 of iteration 7, waits for 1F2 from rank 1, since 6.0 s: timed out"
