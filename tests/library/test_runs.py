"""check and make_plan of a Config, without a command line."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import megapipe as mp
from megapipe.commands.plan import main as plan
from megapipe.commands.pretrain import check
from megapipe.errors import ConfigError
from megapipe.plan.table import cells_of

FLAGS = [
    "--num-layers",
    "8",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "255",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "8",
    "--train-iters",
    "4",
    "--lr",
    "1e-3",
    "--distributed-backend",
    "gloo",
    "--pipeline-model-parallel-size",
    "4",
    "--pipeline-schedule",
    "zb-h1",
]


@pytest.fixture(scope="module")
def config():
    return mp.parse(mp.Config, FLAGS)


def test_a_plan_is_the_commands_and_a_table_in_a_notebook(config, capsys):
    found = mp.make_plan(config)
    plan.main(FLAGS)
    table = capsys.readouterr().out.splitlines()
    page = ElementTree.fromstring(f"<page>{found._repr_html_()}</page>")
    rows = [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    assert rows == [list(cells) for cells in cells_of(found)]
    assert [" ".join(row).split() for row in rows] == [
        line.split() for line in table if re.match(r" *(stage|\d) ", line)
    ]
    assert page.find("table/caption").text.startswith("zb-h1: predicted bubble ")


def test_as_many_processes_as_a_replica_needs_unless_more_are_named(config):
    assert "4 processes = 1 tensor x 4 pipeline x 1 data parallel" in mp.check(config)
    assert "8 processes" in mp.check(replace(config, world_size=8))
    assert "12 processes" in mp.check(mp.parse(mp.Config, [*FLAGS, "--world-size", "12", "--global-batch-size", "24"]))


def test_check_says_what_the_command_prints_and_refuses_what_it_refuses(config, capsys):
    flags = [*FLAGS, "--world-size", "4"]
    check(flags)
    assert capsys.readouterr().out == mp.check(mp.parse(mp.Config, flags)) + "\n"
    wrong = config.with_fields(num_layers=7, lr=None)
    for ask in (mp.check, mp.make_plan):
        with pytest.raises(ConfigError) as error:
            ask(wrong)
        assert len(error.value.problems) == 2
        assert "--num-layers 7" in str(error.value)
        assert "--lr" in str(error.value)
