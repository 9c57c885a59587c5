"""A config.json with something changed comes in as transformers computes it, or is refused in one line."""

from __future__ import annotations

import json
import random
from collections import Counter

from drawn_families import DRAWN

from tools.proofs.inputs.configs import drawn, fuzzer, outcome


def test_twenty_drawn_changes_come_in_exactly_or_are_refused():
    """`python -m tools.proofs.inputs.configs --cases 200` draws ten times as many."""
    counts = Counter()
    proof = fuzzer(counts)
    assert proof.fuzz(0, most=20), proof.found
    assert counts["exact"] > 0 < counts["refused"]


def test_the_proof_finds_a_model_that_comes_in_as_another(tmp_path, monkeypatch):
    case = drawn(random.Random(1), {"granite": DRAWN["granite"]})
    content = json.loads(json.dumps(DRAWN["granite"](random.Random(1)).to_dict())) | {"model_type": "granite"}
    case = case._replace(content=content)
    assert outcome(case, tmp_path / "a") == "exact"
    monkeypatch.setattr("megapipe.models.layer.scaled", lambda x, factor: x)
    assert outcome(case, tmp_path / "b").startswith("logits differ")
