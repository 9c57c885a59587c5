"""Megatron's layout string: its own results, what it refuses, and reading back what we write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.partition.layout import layout_string, parse_layout
from megapipe.partition.spans import spans
from megapipe.schedule import loop, mirror, vee


def letters(text: str, placement) -> list[list[str]]:
    """What each stage of each rank holds, as letters."""
    held = ["E" * s.embedding + "t" * s.count + "L" * s.loss for s in spans(parse_layout(text), placement)]
    return [[held[stage] for stage in placement.stages_on(rank)] for rank in range(placement.num_ranks)]


def test_megatrons_example_on_four_ranks_and_on_two():
    text = "Ett|(ttt|)*2,ttL"
    assert letters(text, loop(4)) == [["Ett"], ["ttt"], ["ttt"], ["ttL"]]
    assert letters(text, loop(2, 2)) == [["Ett", "ttt"], ["ttt", "ttL"]]


def test_a_stage_may_be_empty_or_hold_an_end_alone():
    assert letters("E|tt||tL", loop(4)) == [["E"], ["tt"], [""], ["tL"]]
    assert letters("E|t|t|L", loop(4)) == [["E"], ["t"], ["t"], ["L"]]
    assert letters("EL", loop(1)) == [["EL"]]


def test_the_same_string_goes_down_a_v_and_both_ways_through_a_mirror():
    assert letters("Et|tt|ttt|L", vee(2)) == [["Et", "L"], ["tt", "ttt"]]
    assert letters("Et|ttL", mirror(2)) == [["Et", "ttL"], ["ttL", "Et"]]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("E(t|t)*3L", "Et|tt|tt|tL"),
        ("Et,(tt|)*2,L", "Ettt|tt|L"),
        ("E(|tt)*2,tL", "E|tt|ttt" + "L"),
        ("Et*3|tL", "Ettt|tL"),
        ("Et|*3L", "Et|||L"),
        ("E t*0 | t L", "E|tL"),
        ("Et*12L", "E" + "t" * 12 + "L"),
    ],
)
def test_repetitions_and_commas_unroll_as_megatrons(text, plain):
    assert parse_layout(text) == parse_layout(plain)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tE|tL", "E, the embedding, comes after other stages or layers; it must be the first letter."),
        ("|Et|tL", "E, the embedding, comes after other stages or layers; it must be the first letter."),
        ("Et|Lt", "L, the loss, comes before other stages or layers; it must be the last letter."),
        ("EtL|", "L, the loss, comes before other stages or layers; it must be the last letter."),
        ("t|tL", "E, the embedding, stands there 0 times; it must be the first letter, once."),
        ("Et|EtL", "E, the embedding, stands there 2 times; it must be the first letter, once."),
        ("Et|t", "L, the loss, stands there 0 times; it must be the last letter, once."),
        ("EtL|tL", "L, the loss, stands there 2 times; it must be the last letter, once."),
        ("Et|dL", "d means nothing here."),
        ("E(t|t)L", "( ) means nothing here."),
        ("Et*L", "* means nothing here."),
        ("Et*99999999999L", "t*99999999999 is more than 100000 stages and layers."),
        # All digits count, not the first nine, and int() refuses to read more than 4300 of them.
        (f"Et*{'0' * 9}{'9' * 5000}L", f"t*{'0' * 9}{'9' * 5000} is more than 100000 stages and layers."),
        (f"Et()*{'9' * 5000}L", f"()*{'9' * 5000} is more than 100000 stages and layers."),
    ],
)
def test_what_megatron_refuses_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_layout(text)
    (only,) = caught.value.problems
    assert only.startswith(f"--pipeline-model-parallel-layout {text}: ")
    assert sentence in only


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_layout("tx|t")
    assert len(caught.value.problems) == 3


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40))
def test_every_split_reads_back(counts):
    assert parse_layout(layout_string(counts)) == tuple(counts)


@given(st.text("EtL|()*,0123 ", max_size=20))
def test_any_text_is_a_split_or_refused(text):
    try:
        counts = parse_layout(text)
    except ConfigError:
        return
    assert parse_layout(layout_string(counts)) == counts


def test_quotes_that_came_out_of_a_file_are_named():
    """Flags that a search printed for a shell were kept in a file, with the quotes."""
    with pytest.raises(ConfigError) as caught:
        parse_layout("'Et|tL'")
    assert caught.value.problems[0].endswith("Quotes are for a shell: a file of flags has none.")
