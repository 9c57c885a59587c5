"""docs/tutorial.md says what its commands print: each of them is run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from programs import ROOT, run_ranks

from megapipe.commands import schedules
from megapipe.commands.plan import main as plan

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^`(\w+\.py)`\n```python\n(.*?)```", PAGE, re.M | re.S))
COMMANDS = re.findall(r"^```\n\$ ([^\n]+)\n(.*?)```", PAGE, re.M | re.S)


def output(command: str, folder: Path) -> str:
    """What a command of the page prints; ranks' lines in rank order."""
    words = shlex.split(command)
    if words[0] == "cat":
        return (folder / words[1]).read_text()
    if words[0] == "torchrun":
        return run_ranks(int(words[2]), [folder / words[3]], folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.chdir(folder)
        patch.setattr(sys, "argv", words[1:])
        if words[:2] == ["megapipe", "schedules"]:
            assert schedules.main(words[2:]) == 0
        elif words[:2] == ["megapipe", "plan"]:
            plan.main(words[2:])
        else:
            exec(PROGRAMS[words[1]], {})
    return said.getvalue()


def test_every_command_of_the_tutorial_prints_what_the_page_says(tmp_path):
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    assert len(COMMANDS) == 16
    for command, said in COMMANDS:
        found = output(command, tmp_path)
        assert [x.rstrip() for x in found.splitlines()] == [x.rstrip() for x in said.splitlines()], command


def test_every_picture_of_the_tutorial_is_there():
    for picture in re.findall(r"\]\((schedules/[\w-]+\.svg)\)", PAGE):
        assert (ROOT / "docs" / picture).exists()
