"""A schedule made by a function of the user's: each mistake in code is told as plainly as the same in a file."""

from pathlib import Path

import pytest

from megapipe.schedule import Costs, ScheduleError, build, simulate
from megapipe.schedule.families.offload.copies import with_offload

HEAD = """
from megapipe.schedule import Kind, Pass, Placement, Recorder, Schedule, loop

def make(ranks, microbatches):
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        for _ in range(microbatches):
            rec.f(rank)
            rec.b(rank)
            rec.w()
        rows.append(rec.steps)
"""
WHOLE = HEAD + "    return Schedule('mine', loop(ranks), microbatches, rows)\n"


def told(tmp_path: Path, source: str, name: str = "make") -> str:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ScheduleError) as caught:
        build(f"{tmp_path}/mine.py:{name}", 2, 3)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_rows_may_be_lists_and_a_step_a_pass_alone(tmp_path):
    (tmp_path / "mine.py").write_text(WHOLE.replace("rows.append(rec.steps)", "rows.append([p for p, in rec.steps])"))
    made = build(f"{tmp_path}/mine.py:make", 2, 3)
    assert made == build("naive", 2, 3).__class__("mine", made.placement, 3, made.ranks)
    assert hash(made)
    assert [str(p) for (p,) in made.ranks[1][:4]] == ["1F0", "1B0", "1W0", "1F1"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("rec.steps)", "[s for s in rec.steps if str(s[0]) != '1F1'])"), "not valid:\n  rank 1: 1F1 is missing"),
        (("rec.steps)", "[s for s in rec.steps if str(s[0]) != '0W2'])"), "not valid:\n  rank 0: 0W2 is missing"),
        (("rec.steps)", "rec.steps[::-1])"), "rank 0, step 0, 0W2: runs before 0B2 at step 1"),
        (("rec.w()", "rec.w() if rank else rec.w(3)"), "Recorder.w, after 2 steps: no weight gradient of stage 3"),
        (("microbatches, rows)", "2, rows)"), "num_microbatches is 2, not the 3 that were asked for"),
        (("microbatches, rows)", "microbatches, rows[:1])"), "rows for 1 ranks, not for the 2 that were asked for"),
        (("loop(ranks)", "Placement((0, 3), 2)"), "rank_of must name every rank from 0 to 1 and no other, got [0, 3]"),
        (("loop(ranks)", "Placement((0, 1), 3)"), "chain 3 must divide the number of stages, 2"),
        (("return Schedule(", "return ("), "it returned a tuple, not a Schedule(name, placement,"),
        (("rec.steps)", "[(Pass(0, Kind.F, 1),)])"), "rank 0, step 0, (Pass(kind=0, stage=<Kind.F: 'F'>, microb"),
        (("rec.f(rank)", "rec.f(rnk)"), "NameError: name 'rnk' is not defined (mine.py, line 9)"),
        (("make(ranks, m", "make(ranks, depth, m"), "mine.py:make takes (ranks, depth, microbatches), but a function"),
        (("def make", "def maek"), "mine.py:make: mine.py has no function make; did you mean maek?"),
        (("import Kind", "import kind"), "mine.py:make: cannot import mine.py: cannot import name 'kind' from"),
        (("def make", "what = 1 / 0\ndef make"), "cannot import mine.py: ZeroDivisionError: division by zero (mine"),
    ],
)  # fmt: skip
def test_a_mistake_in_code_is_one_sentence(tmp_path, change, sentence):
    assert sentence in told(tmp_path, WHOLE.replace(*change))


def test_ranks_that_wait_for_each_other_are_found_before_anything_is_simulated(tmp_path):
    forwards_first = "sorted(rec.steps, key=lambda s: (s[0].kind != 'F') * rank))"
    turned = WHOLE.replace("rec.steps)", forwards_first)
    assert told(tmp_path, turned).startswith("mine.py:make cannot proceed:\n  rank 0 waits at step")


def test_what_a_function_asks_of_the_catalogue_in_vain_is_said_of_the_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from megapipe.schedule import build\ndef make(p, m):\n    return build('1fb', p, m)\n"
    )
    with pytest.raises(ScheduleError, match=r"mine.py:make: unknown schedule 1fb; did you mean 1f1b"):
        build(f"{tmp_path}/mine.py:make", 2, 4)


def test_an_entry_of_ones_own_in_the_catalogue_is_verified_too(monkeypatch):
    from megapipe.schedule import SCHEDULES, Entry, Schedule

    def cut(ranks, microbatches):
        whole = build("1f1b", ranks, microbatches)
        return Schedule("cut", whole.placement, microbatches, (whole.ranks[0][:-1], *whole.ranks[1:]))

    monkeypatch.setitem(SCHEDULES, "cut", Entry(cut, "loop", 1, "a table that lacks its last pass"))
    with pytest.raises(ScheduleError, match="cut is not valid:\n  rank 0: 0BW3 is missing"):
        build("cut", 2, 4)


def test_a_function_that_ignores_the_chunks_it_names_is_refused(tmp_path):
    """Two rows of a comparison, v=2 and v=4, had the same table."""
    source = WHOLE.replace("make(ranks, microbatches)", "make(ranks, microbatches, chunks=1)")
    (tmp_path / "mine.py").write_text(source)
    name = f"{tmp_path}/mine.py:make"
    assert build(name, 2, 3).placement.num_stages == build(name, 2, 3, chunks=1).placement.num_stages == 2
    with pytest.raises(ScheduleError, match="it has 2 stages, not 4 chunks on each of 2 ranks"):
        build(name, 2, 3, chunks=4)


def test_a_weight_gradient_that_is_missing_names_the_pass_that_owes_it(tmp_path):
    assert "rank 1: 1W2 is missing; 1B2 owes it, or 1BW2 does both" in told(tmp_path, WHOLE.replace("rec.w()", "pass"))


def test_shared_lanes_and_depths_of_a_function_are_kept(tmp_path):
    """They were dropped: a rank held 2 where its lane, shared by four, leaves 3."""
    offload = """
from dataclasses import replace
from megapipe.schedule import Costs, build
from megapipe.schedule.families.offload.copies import with_offload

def make(ranks, microbatches):
    return with_offload(build("1f1b", ranks, microbatches), Costs(o=0.5, l=0.5), switches=[range(ranks)])

def lists(ranks, microbatches):
    made = make(ranks, microbatches)
    return replace(made, shared=[lane._replace(order=[tuple(x) for x in lane.order]) for lane in made.shared])

def wrong(ranks, microbatches):
    return replace(make(ranks, microbatches), shared=[["h2d"]])
"""
    (tmp_path / "mine.py").write_text(offload)
    costs = Costs(o=0.5, l=0.5)
    own = with_offload(build("1f1b", 4, 8), costs, switches=[range(4)])
    for name in ("make", "lists"):
        made = build(f"{tmp_path}/mine.py:{name}", 4, 8)
        assert made.shared == own.shared
        assert simulate(made, costs).peak == simulate(own, costs).peak
    assert "shared must be Shared streams, each with its ranks and a tuple of passes, got [['h2d']]" in told(
        tmp_path, offload, "wrong"
    )
    deep = "replace(build('1f1b', p, m), placement=Placement((0, 1, 2), 3, depths=1))"
    imports = "from dataclasses import replace\nfrom megapipe.schedule import Placement, build\n"
    (tmp_path / "deep.py").write_text(f"{imports}def make(p, m):\n    return {deep}\n")
    assert build(f"{tmp_path}/deep.py:make", 3, 4).placement.depths == 1
