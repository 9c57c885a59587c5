"""Megatron-LM's own training numbers of experts and of multi-token prediction: losses, norms, tokens of each expert,
biases, weights and moments.

tests/golden/experts has four of its runs; tools/proofs/megatron_golden.py compares others, under more layouts.
"""

from __future__ import annotations

import gzip
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from nightly import by_night

from tools.proofs.megatron_golden import LAYOUTS, differences, trained

GOLDEN = Path(__file__).parents[1] / "golden" / "experts"
CASES = json.loads((GOLDEN / "golden.json").read_text())["cases"]


def fits(name: str, layout: str) -> bool:
    """Depths are where there are some, experts too, and with `ep-tp` nothing: tp 2 does not divide three groups."""
    depths = name.startswith("mtp/")
    return layout != "ep-tp" and depths >= layout.startswith("mtp") and depths <= (not layout.startswith("e"))


FEW = [("mixtral/z", "one"), ("mixtral/expert-bias", "zb-v"), ("mixtral/z", "ep"), ("mtp/two", "mtp-zb-v")]
ALL = [(name, layout) for name in CASES for layout in LAYOUTS if fits(name, layout)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the data unpacked."""
    folder = tmp_path_factory.mktemp("golden") / "experts"
    shutil.copytree(GOLDEN, folder)
    for path in (folder / "data").iterdir():
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    return folder


@pytest.fixture(scope="module")
def numbers_of(folder):
    """What a case trains in a layout; both tests of this file ask for one of them."""
    return cache(lambda name, layout: trained(folder, CASES[name], name, layout))


@pytest.mark.parametrize(("name", "layout"), by_night(ALL, day=FEW))
def test_experts_and_depths_train_as_in_megatron(numbers_of, name, layout):
    assert list(differences(CASES[name], numbers_of(name, layout))) == []


def test_the_comparison_sees_a_step_of_float32_in_a_norm_and_one_token_elsewhere(numbers_of):
    name, layout = FEW[0]
    case = json.loads(json.dumps(CASES[name]))
    case["rows"][3]["grad_norm"] *= 1 + 2e-6
    case["rows"][5]["tokens"]["layer2"][1] += 1
    first, second = differences(case, numbers_of(name, layout))
    assert first.startswith("iteration 4, grad norm: ")
    assert second.startswith("iteration 6, tokens: ")
