"""What a user reads of flags that cannot be parsed: refusals.toml has the sentences."""

import shlex
from pathlib import Path

import pytest
import refusals

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse

ROWS = refusals.read(Path(__file__).with_name("refusals.toml"))


@pytest.mark.parametrize("flags, ranks, lines", ROWS, ids=[flags for flags, _, _ in ROWS])
def test_flags_that_cannot_be_parsed_are_refused_in_these_lines(flags, ranks, lines):
    with pytest.raises(ConfigError) as caught:
        parse(Config, shlex.split(flags))
    assert list(caught.value.problems) == lines
