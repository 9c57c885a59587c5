"""Damaged files and words end no command in a traceback; scripts/nightly.sh draws more, of every kind."""

from __future__ import annotations

from random import Random

import pytest
from programs import run

from tools.proofs.inputs.damage import damage_bytes, damage_json, damage_words
from tools.proofs.inputs.fuzz import judge
from tools.proofs.inputs.scenes import read_scenes

CHEAP = [
    "flags of a run",
    "flags of schedules.py",
    "costs files",
    "schedule files",
    "schedules of a program",
    "traces",
]
"""Scenes that train nothing to be made."""


def test_drawn_inputs_are_taken_or_refused_by_name():
    drawn = run(["tools/proofs/inputs/fuzz.py", "--draws", "90", "--seed", "5", "--kinds", *CHEAP])
    assert drawn.returncode == 0, drawn.stdout + drawn.stderr
    *_, whole = drawn.stdout.strip().splitlines()
    taken, refused, *rest = (int(x) for x in whole.split("|")[2:8])
    assert taken > 5
    assert refused > 40
    assert rest == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "code, text, verdict",
    [
        (2, "x.py: error: --costs c.json is none", "refused"),
        (2, "x.py: error: it is none", "refused without its place"),
        (1, "Traceback (most recent call last):\n --costs c.json", "traceback"),
        (101, "thread panicked at --costs c.json", "traceback"),
        (-11, "--costs c.json", "crash"),
        (None, "--costs c.json", "hang"),
        (0, "", "accepted"),
    ],
)
def test_what_becomes_of_a_draw_is_told_apart(code, text, verdict):
    assert judge(code, text, frozenset({"c.json"})) == verdict


def test_every_draw_differs_from_what_it_damages():
    draw = Random(0)
    words = ["--pp", "4", "--costs", "c.json"]
    assert sum(damage_words(words, ["--pp"], draw) != words for _ in range(200)) > 180
    text = '{"f": 1, "b": [1, 2, {"x": null}]}'
    assert len({damage_json(text, draw) for _ in range(200)}) > 100
    assert len({damage_bytes(text.encode(), draw) for _ in range(200)}) > 100


def test_every_command_has_files_that_can_be_damaged_or_words():
    for scene in read_scenes().values():
        assert scene.files or scene.words == 1.0
        assert "--help" in scene.known
        assert len({*scene.known}) > 2
    assert "--top-k" in read_scenes()["checkpoints for text"].known
    assert "--measure" in read_scenes()["flags of plan.py"].known
