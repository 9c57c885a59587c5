"""Every flag of Megatron-LM acts, is accepted because it is always so, or is refused in a line that helps."""

import re

import pytest

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.known import MEGATRON_FLAGS
from megapipe.flags.parse import flags_of, parse
from megapipe.flags.rules import _REASONS, ACCEPTED, KNOWN, reason
from megapipe.flags.table import PAGE, table, with_table


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Config, argv)
    (only,) = caught.value.problems
    return only


def test_a_flag_that_asks_for_what_is_always_so_is_accepted():
    assert parse(Config, ["--use-mcore-models", "--context-parallel-size", "1", "--no-rope-fusion"]) == Config()


def test_an_accepted_flag_with_another_value_is_refused():
    assert problem("--context-parallel-size", "2") == (
        "--context-parallel-size 2: only 1 is implemented (there is no context parallelism yet)"
    )
    assert problem("--use-mcore-models", "true") == "--use-mcore-models takes no value, got true"
    assert problem("--rerun-mode") == "--rerun-mode takes one value, got none"


def test_a_known_flag_we_lack_says_so():
    assert problem("--skip-train") == "--skip-train is a Megatron-LM flag that megapipe does not implement yet"
    assert problem("--moe-grouped-gemm") == (
        "--moe-grouped-gemm is a Megatron-LM flag that megapipe does not implement yet "
        "(there are no mixture-of-experts layers)"
    )
    assert problem("--batch-size", "4").endswith("(an old name; use --micro-batch-size)")


def test_a_typo_of_a_flag_we_lack_is_still_a_typo():
    assert problem("--moe-grouped-gem") == "unknown flag --moe-grouped-gem; did you mean --moe-grouped-gemm?"


def test_zero_bubble_switches_lead_to_the_schedule(monkeypatch):
    start = "--zero-bubble-v-schedule is a switch of sail-sg/zero-bubble-pipeline-parallelism; "
    monkeypatch.setattr("megapipe.flags.rules.SCHEDULES", {"1f1b": None, "zb-v": None})
    assert problem("--zero-bubble-v-schedule") == (start + "here the schedule has a name: --pipeline-schedule zb-v")
    monkeypatch.setattr("megapipe.flags.rules.SCHEDULES", {"gpipe": None, "1f1b": None})
    assert problem("--zero-bubble-v-schedule").endswith(
        "--pipeline-schedule zb-v, which this version does not have yet (it has gpipe, 1f1b)"
    )


def test_every_field_but_our_own_is_a_megatron_flag():
    assert set(flags_of(Config)) - MEGATRON_FLAGS == {
        "--pipeline-schedule",
        "--per-layer-overrides",
        "--model-provider",
        "--memory-limit-gib",
        "--num-microbatches-with-partial-activation-checkpoints",
        "--compile",
    }


def test_a_field_is_not_also_accepted_or_reasoned_about():
    assert not set(ACCEPTED) & set(flags_of(Config))
    assert set(ACCEPTED) <= KNOWN


def test_every_reason_fits_some_flag_that_is_refused():
    refused = MEGATRON_FLAGS - set(flags_of(Config)) - set(ACCEPTED)
    assert {why for _, why in _REASONS} == {reason(name) for name in refused} - {""}


def test_the_table_in_the_docs_is_up_to_date():
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python -m megapipe.flags.table"


def test_the_table_names_every_flag_of_megatron_once():
    cells = re.findall(r"`(--[^`]+)`", table())
    assert {*cells} | {"--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"} >= MEGATRON_FLAGS
    assert len(cells) == len({*cells})
