"""Damaged files and words end no command in a traceback; scripts/nightly.sh draws more, of every kind."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from programs import run

from megapipe.commands.main import command
from megapipe.doors import DOORS
from tools.proofs.inputs import commands
from tools.proofs.inputs.damage import damage_bytes, damage_json, damage_text
from tools.proofs.inputs.fuzz import judge
from tools.proofs.inputs.lines import draw_line
from tools.proofs.inputs.options import Option
from tools.proofs.inputs.scenes import read_scenes

CHEAP = ["check", "schedules", "schedules of a program", "traces"]
"""Scenes that train nothing to be made."""
QUICK = ["check", "plan", "schedules", "init", "completion", "chaos"]
"""Commands whose lines take milliseconds."""


def test_drawn_inputs_are_taken_or_refused_by_name():
    ran = run(["-m", "tools.proofs.inputs.fuzz", "--cases", "45", "--seed", "1", "--kinds", *CHEAP])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, whole = ran.stdout.strip().splitlines()
    drawn, taken, refused, *rest = (int(x) for x in whole.split("|")[2:9])
    assert drawn == 45
    assert taken > 5
    assert refused > 20
    assert sum(rest) == 0


def test_drawn_lines_of_commands_are_taken_or_refused_and_ignore_no_flag():
    drawn = run(["-m", "tools.proofs.inputs.commands", "--cases", "24", "--seed", "0", "--commands", *QUICK])
    assert drawn.returncode == 0, drawn.stdout + drawn.stderr
    lines, taken, refused, *rest = (int(x) for x in drawn.stdout.strip().splitlines()[-1].split("|")[2:9])
    assert lines == 24
    assert taken > 5
    assert refused > 10
    assert sum(rest) == 0


def test_a_flag_that_changes_nothing_is_found_and_one_that_does_is_not(monkeypatch):
    """A command of which --idle is ignored and --loud is not."""

    options = {name: Option(name, "none", ()) for name in ("--idle", "--loud")}
    monkeypatch.setattr(commands.Scene, "own", lambda scene, words: options)
    scene = commands.Scene("some", "some", shared={"values": {}, "most": {}, "silent": {}})

    def ran(groups):
        said = "loud" if ["--loud"] in groups else "quiet"
        return commands.Outcome(0, said, {"line 0": said})

    line = [[], ["--idle"], ["--loud"]]
    first = ran(line)
    assert commands.silent(ran, commands.Line(scene, line, ["--loud", "--idle"], 0), first) == "--idle"
    assert commands.silent(ran, commands.Line(scene, line[:1] + line[2:], ["--loud"], 0), first) is None
    excused = replace(scene, silent={"--idle": "is read by nobody yet"})
    assert commands.silent(ran, commands.Line(excused, line, ["--idle"], 0), first) is None


def test_every_command_of_the_help_has_lines_that_work_and_no_line_is_drawn_twice():
    scenes = read_scenes()
    assert {scene.command for scene in scenes.values() if scene.lines} == DOORS.keys()
    draw = Random(0)
    for name in ("plan", "schedules"):
        command(name)
        assert len({str(draw_line(scenes[name], draw)) for _ in range(100)}) > 80


@pytest.mark.parametrize(
    "code, text, verdict",
    [
        (0, "a table", "accepted"),
        (2, "megapipe plan: error: --pp 0 must be at least 1", "refused"),
        (2, "a: error: x\nb: error: y", "unclear"),
        (2, "--pp 0 is wrong", "unclear"),
        (2, "megapipe plan: error: it is wrong", "unclear"),
        (1, "megapipe plan: error: x", "unclear"),
        (0, "x.py:3: UserWarning: this is deprecated", "unclear"),
        (1, "Traceback (most recent call last):", "traceback"),
        (None, "", "too slow"),
    ],
)
def test_what_becomes_of_a_line_is_told_apart(code, text, verdict):
    assert commands.judge(read_scenes()["plan"], commands.Outcome(code, text), ["--pp", "0"]) == verdict


@pytest.mark.parametrize(
    "code, text, verdict",
    [
        (2, "x.py: error: --costs c.json is none", "refused"),
        (2, "x.py: error: it is none", "unclear"),
        (1, "Traceback (most recent call last):\n --costs c.json", "traceback"),
        (101, "thread panicked at --costs c.json", "traceback"),
        (-11, "--costs c.json", "unclear"),
        (None, "--costs c.json", "too slow"),
        (0, "", "accepted"),
    ],
)
def test_what_becomes_of_a_draw_is_told_apart(code, text, verdict):
    assert judge(code, text, frozenset({"c.json"})) == verdict


def test_every_draw_differs_from_what_it_damages():
    draw = Random(0)
    words = b"--pp 4 --costs c.json"
    assert sum(damage_text(words, draw) != words for _ in range(200)) > 180
    text = '{"f": 1, "b": [1, 2, {"x": null}]}'
    assert len({damage_json(text, draw) for _ in range(200)}) > 100
    assert len({damage_bytes(text.encode(), draw) for _ in range(200)}) > 100


def test_every_scene_has_lines_or_files_that_can_be_damaged():
    for scene in read_scenes().values():
        assert scene.lines or scene.damaged
        assert scene.files or not scene.damaged
