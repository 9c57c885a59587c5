"""The covering array of tools/proofs/cover: its rows have every legal combination, and its judge sees what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from programs import ROOT, run

from tools.proofs.cover.array import Array
from tools.proofs.cover.choices import CHOICES, PLAIN, num_layers, one_process, problems, world_size
from tools.proofs.cover.judge import Runs, differences
from tools.proofs.cover.planted import DEFECTS, nearest_first
from tools.proofs.cover.rank import BIASES, HISTORIES, Numbers, Part

SMALL = {"a": ["0", "1", "2"], "b": ["0", "1"], "c": ["0", "1", "2"], "d": ["0", "1"], "e": ["0", "1"]}


def refused(row, fixed=None):
    """Two rules: one of two choices, one that forbids a third value where two are given."""
    if row["a"] == "2" and row["b"] == "0":
        return ["a 2 needs b 1"]
    if row["c"] == "1" and row["d"] == "1" and row["e"] == "1":
        return ["c 1, d 1 and e 1 exclude each other"]
    return []


@pytest.mark.parametrize("strength", [2, 3])
def test_the_rows_have_every_combination_that_any_legal_case_has(strength):
    array = Array(SMALL, (refused,), lambda text: {name for name in SMALL if name in text.split()})
    array.extend(strength)
    every = [dict(zip(SMALL, values, strict=True)) for values in product(*SMALL.values())]
    legal = [row for row in every if not refused(row)]

    def covered(rows):
        return {combination for row in rows for combination in combinations(sorted(row.items()), strength)}

    assert all(not refused(row) for row in array.rows)
    assert covered(array.rows) == covered(legal)
    assert array.legal(strength) == len(covered(legal))
    assert len(array.rows) < len(legal) / 2
    assert (("a", "2"), ("b", "0")) in array.refused


def test_a_combination_that_narrow_rules_refuse_is_asked_of_the_wide_ones():
    """As processes are limited: a case has few of them, unless a combination needs more."""

    def narrow(row, fixed=None):
        return ["c is 0 in small cases"] if row["c"] != "0" and "c" not in (fixed or {}) else refused(row)

    def need(row, fixed=None):
        """a 1 goes only with c 2, which a combination of a 1 with others does not fix."""
        return ["a 1 needs c 2"] if row["a"] == "1" and row["c"] != "2" else refused(row)

    both = [lambda row, fixed: [*narrow(row, fixed), *need(row, fixed)], need]
    array = Array(SMALL, both, lambda text: {name for name in SMALL if name in text.split()})
    array.extend(3)
    assert any(row["a"] == "1" and row["d"] == "1" and row["e"] == "1" for row in array.rows)
    assert (("a", "1"), ("b", "1"), ("d", "1")) not in array.refused


def test_an_array_begins_with_the_rows_of_a_smaller_one():
    named = lambda text: {name for name in SMALL if name in text.split()}  # noqa: E731
    few = Array({name: values[:2] for name, values in SMALL.items()}, (refused,), named)
    few.extend(3)
    grown = Array(SMALL, (refused,), named)
    grown.take(few.rows, few.refused)
    grown.extend(3)
    anew = Array(SMALL, (refused,), named)
    anew.extend(3)
    assert grown.rows[: len(few.rows)] == few.rows
    assert grown.legal(3) == anew.legal(3)
    assert grown.refused.keys() == anew.refused.keys()


def test_the_usual_case_is_legal_and_a_refused_one_says_why():
    assert problems(PLAIN) == ()
    (sentence,) = problems(PLAIN | {"vocabulary": "shared"})
    assert "--vocab-parallel-pipeline" in sentence


@pytest.mark.parametrize("name", CHOICES)
def test_each_value_of_a_choice_has_flags_that_parse(name):
    for value in CHOICES[name]:
        case = PLAIN | {name: value}
        assert all("unknown flag" not in line and "invalid choice" not in line for line in problems(case))


def test_a_case_of_two_ranks_that_is_saved_and_goes_on_on_one_has_the_numbers_of_one_process():
    """In a process of its own: it forks, and a process that has run tests has threads."""
    case = {"pp": "2", "schedule": "zb-h1", "resumed": "into-one", "evaluation": "every-2"}
    ran = run(["-m", "tools.proofs.cover", "--case", json.dumps(case)])
    assert ran.stdout.splitlines()[0] == "same", ran.stdout + ran.stderr


def numbers(weight: float, loss: float) -> Numbers:
    steps = {n: {"lm loss": loss, "norm": 1.0, "skipped": 0.0} for n in range(1, 6)}
    weights = {"layers.0.weight": Part(torch.full((4, 2), weight, dtype=torch.float64), {})}
    return Numbers(steps, [{"lm loss": loss}], {"weights": weights})


def test_a_loss_and_a_weight_that_differ_are_named():
    whole = numbers(1.0, 3.0)
    assert differences(PLAIN, [numbers(1.0, 3.0)], whole) == []
    found = differences(PLAIN, [numbers(1.001, 3.0)], whole)
    assert len(found) == 1
    assert "weights of layers.0.weight differ by 0.001" in found[0]
    assert all("lm loss" in line for line in differences(PLAIN, [numbers(1.0, 3.1)], whole))
    half = replace(whole, tensors={"weights": {"layers.0.weight": Part(torch.ones(2, 2).double(), {0: (1, 2)})}})
    assert differences(PLAIN, [half], whole) == []


def test_copies_on_two_ranks_are_equal_to_the_bit_where_losses_are_compared_to_a_tenth():
    case = PLAIN | {"precision": "bf16", "dp": "2"}
    whole, close = numbers(1.0, 3.0), numbers(1.0 + 1e-12, 3.0)
    assert differences(case, [whole, whole], whole) == []
    (found,) = differences(case, [whole, close], whole)
    assert found == "ranks 0 and 1: weights of layers.0.weight differ by 1e-12 from each other"


@pytest.mark.parametrize("off, named", [(1e-6, False), (0.02, True)])
def test_a_bias_that_went_another_step_differs_in_float32(off, named):
    """Rounding moves none: the judge took 0.03 for it, and a step is 0.02."""
    case, biases = PLAIN | {"precision": "float32"}, torch.tensor([0.02, -0.02])
    whole, mine = (replace(numbers(1.0, 3.0), tensors={BIASES: {"layer 1": Part(biases + x, {})}}) for x in (0.0, off))
    assert bool(differences(case, [mine], whole)) == named


INPUTS_WEIGHTS_GRADIENTS = torch.tensor([[1.0, 0.5], [0.1, 0.2], [0.03, 0.04]])


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("off, named", [(0.2, False), (0.3, True)])
def test_largest_values_of_8_bits_are_those_of_one_process_but_for_rounding(off, named, row):
    values = INPUTS_WEIGHTS_GRADIENTS.clone()
    values[row] *= 1 - off
    assert bool(histories_differ("1", values)) == named


@pytest.mark.parametrize("dp, factor, named", [("1", 2.0, True), ("2", 2.0, False), ("2", 4.0, True)])
def test_gradients_of_a_replica_are_larger_by_the_number_of_replicas_until_they_are_averaged(dp, factor, named):
    values = INPUTS_WEIGHTS_GRADIENTS * torch.tensor([[1.0], [1.0], [factor]])
    assert bool(histories_differ(dp, values)) == named


def histories_differ(dp: str, values: torch.Tensor) -> list[str]:
    case = PLAIN | {"precision": "fp8", "dp": dp}
    whole, mine = (
        replace(numbers(1.0, 3.0), tensors={HISTORIES: {"linear": Part(x, {})}})
        for x in (INPUTS_WEIGHTS_GRADIENTS, values)
    )
    return differences(case, [mine], whole)


def test_the_next_loss_scale_is_exact():
    case = PLAIN | {"precision": "fp16"}
    whole, mine = (replace(numbers(1.0, 3.0), steps={5: {"next scale": x}}) for x in (128.0, 127.9))
    assert differences(case, [mine], whole) == ["rank 0: iteration 5: next scale 127.9, not 128.0"]


def test_a_case_that_agrees_with_kept_references_is_not_trained_on_one_process_again(tmp_path, monkeypatch):
    """Of another source too: what differs from them is compared with one process of this source."""
    starts, source = [], {"weight": 1.0}

    def start(self, case, layers, more, at):
        starts.append(world_size(case))
        found = numbers(source["weight"], 3.0)
        torch.save(found, at.with_name(f"{at.name}-0"))
        return [found]

    monkeypatch.setattr(Runs, "start", start)
    case = PLAIN | {"pp": "2"}
    kept = tmp_path / "kept"
    assert Runs(kept, 1.0).judge(case).result == "same"
    assert starts == [1, 2]
    starts.clear()
    assert Runs(tmp_path / "again", 1.0, kept).judge(case).result == "same"
    assert starts == [2]
    starts.clear()
    source["weight"] = 2.0
    assert Runs(tmp_path / "changed", 1.0, kept).judge(case).result == "same"
    assert starts == [2, 1]


def test_of_the_cases_nearest_to_a_defect_the_cheapest_sharp_one_runs_first():
    defect = next(iter(DEFECTS.values()))
    near = {"update": "validated", "spoiled": "large"}
    cheap, dear, blunt = near, near | {"tp": "2", "batch": "grows"}, near | {"precision": "bf16"}
    far = {"precision": "float32"}
    assert nearest_first([far, blunt, dear, cheap], defect) == [cheap, dear, blunt, far]


def test_the_reference_is_one_process_of_the_same_model():
    case = PLAIN | {"pp": "4", "tp": "2", "router": "softmax", "sharding": "weights"}
    alone = one_process(case)
    assert world_size(alone) == 1
    assert alone["router"] == "softmax"
    assert num_layers(PLAIN | {"pp": "4", "schedule": "zb-v"}) == 8


def test_each_planted_defect_has_its_place_in_the_package():
    for name, defect in DEFECTS.items():
        text = (ROOT / "megapipe" / defect.path).read_text()
        assert text.count(defect.before) == 1, name
        assert all(value in CHOICES[choice] for choice, values in defect.where.items() for value in values), name
