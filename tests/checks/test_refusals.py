"""What a user reads of flags that cannot be: refusals.toml has the sentences."""

import re
from pathlib import Path

import pytest
import refusals

from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.config.notes import Refused
from megapipe.errors import ConfigError
from megapipe.flags.idle import noted
from megapipe.flags.parse import flags_of

from .sound import config

ROWS = refusals.read(Path(__file__).with_name("refusals.toml"))
NAMES = {flag.field: name for name, flag in flags_of(Config).items()}
NOTES = [(flag.name, NAMES.get(other, ""), note.text) for flag, note in noted(Refused) for other in note.others or [""]]


@pytest.mark.parametrize("flags, ranks, lines", ROWS, ids=[flags for flags, _, _ in ROWS])
def test_flags_that_cannot_be_are_refused_in_these_lines(flags, ranks, lines):
    try:
        validate(config(flags, ranks), has_cuda=False)
        told = []
    except ConfigError as error:
        told = list(error.problems)
    assert told == lines


@pytest.mark.parametrize("name, other, text", NOTES, ids=[f"{name} {other}: {text}" for name, other, text in NOTES])
def test_each_note_that_refuses_has_a_line_there(name, other, text):
    sentence = ".+".join(map(re.escape, text.split("{}")))
    assert any(re.search(sentence, line) and name in line and other in line for *_, lines in ROWS for line in lines)
