"""Fuzzers draw by Hypothesis: what fails is made smaller, is kept, and is tried first next time."""

from collections import Counter
from functools import partial

import pytest

from megapipe.schedule import SCHEDULES
from tools.proofs import fuzz_equivalence, shrink
from tools.proofs.shrink import Fuzzer


@pytest.fixture(autouse=True)
def _kept(tmp_path, monkeypatch):
    monkeypatch.setattr(shrink, "KEPT", tmp_path)


def draw(rng):
    return rng.randint(1, 100), rng.choice("abcd"), rng.random() < 0.5, tuple(rng.sample(range(20), 3))


def fails(case):
    return ["too large"] if case[0] > 37 and case[2] else []


def test_what_fails_is_made_smaller_and_is_the_first_of_the_next_run():
    first = Fuzzer("numbers", draw, fails)
    assert not first.fuzz(0)
    assert first.failed[:3] == (38, "a", True)  # the least that fails, and of the rest the first
    assert first.found == ["too large"]
    again = Fuzzer("numbers", draw, fails)
    assert not again.fuzz(1)
    assert (again.count, again.failed) == (1, first.failed)
    assert Fuzzer("numbers", draw, lambda case: []).fuzz(2, most=3)


def test_a_run_ends_after_its_cases_or_its_time_and_runs_none_that_is_not_wanted():
    seen = Counter()

    def run(case):
        seen.update(case[1:3])
        return []

    fuzzer = Fuzzer("enough", draw, run, wanted=lambda case: case[1] != "b")
    assert fuzzer.fuzz(0, most=200)
    assert fuzzer.count == seen[True] + seen[False] == 200
    assert min(seen[x] for x in (True, False, "a", "c", "d")) > 20
    assert not seen["b"]
    assert Fuzzer("late", draw, run).fuzz(0, seconds=0.0)


def test_a_fault_of_training_is_found_in_a_small_case():
    """A fault of split backwards on several ranks."""

    def run(case):
        wrong = SCHEDULES[case.schedule].split and case.pp > 1 and case.microbatches > 2
        return ["losses differ"] * wrong

    fuzzer = Fuzzer("training", partial(fuzz_equivalence.draw, names=("1f1b", "zb-h1", "zb-v")), run)
    # A shrunk case is a local minimum. From seeds 1 and 2 it is the smallest case, from 0 it has 3 ranks.
    assert not fuzzer.fuzz(1, seconds=60)
    case = fuzzer.failed
    assert fuzzer.found == ["losses differ"]
    assert (case.pp, case.microbatches) == (2, 3)
    assert (case.tp, case.cp, case.dp, case.experts) == (1, 1, 1, "none")
    assert (case.vocabulary, case.slices, case.depths, case.tied) == (False, (), (), False)
    assert fuzz_equivalence.read(fuzz_equivalence.command(case).split("--case ")[1].strip("'")) == case
