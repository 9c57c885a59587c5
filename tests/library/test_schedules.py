"""build, compare, draw, save and load: the same as the parts that the commands put together."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import megapipe as mp
from megapipe.errors import DataError, ScheduleError
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.views.draw import to_svg
from megapipe.schedule.views.screen import MOST_PASSES
from megapipe.schedule.views.terminal import to_terminal

COSTS = mp.Costs(f=10, b=11, w=8)
COPIES = replace(COSTS, o=4, l=4)


def test_a_recipe_is_built_as_the_name_is():
    assert mp.build(mp.Recipe("zb-h1", 4, 8)) == mp.build("zb-h1", 4, 8)
    fitted = mp.Recipe("zb-h1", 4, 8, fitted=COSTS)
    assert mp.build(fitted, costs=COSTS) == mp.build("zb-h1", 4, 8, costs=COSTS)
    assert mp.build("interleaved", 2, 4, chunks=4).placement.num_stages == 8


def test_a_recipe_of_a_searched_order_searches_under_the_costs_given():
    found = mp.build(mp.Recipe("zb-auto", 2, 4, options=(("effort", 0.1),)), costs=COSTS, memory=2.0)
    assert max(mp.simulate(found, COSTS).peak) <= 2.0
    assert mp.simulate(found, COSTS).makespan < mp.simulate(mp.build("1f1b", 2, 4), COSTS).makespan


def test_a_recipe_within_a_memory_limit_keeps_to_it():
    recipe = mp.Recipe("1f1b", 4, 8, offload=Offload("fits"))
    table = mp.build(recipe, costs=COPIES, memory=3.0)
    assert max(mp.simulate(table, COPIES).peak) <= 3.0 < max(mp.simulate(mp.build("1f1b", 4, 8), COPIES).peak)
    with pytest.raises(ScheduleError, match="over the memory limit"):
        mp.build(mp.Recipe("1f1b", 4, 8), memory=2.0)
    with pytest.raises(ScheduleError, match=r"Recipe\.cuts cuts a table of F, B and W: leave out Recipe\.vocabulary"):
        mp.build(mp.Recipe("1f1b", 4, 8, vocabulary=True, cuts=(1.0, 1.0)))


@pytest.mark.parametrize("order, size", [("1f1b", ()), ("1f1b", (4,)), (mp.Recipe("1f1b", 4, 8), (4, 8))])
def test_a_size_is_given_once(order, size):
    with pytest.raises(TypeError, match=r"ranks"):
        mp.build(order, *size)


def test_a_comparison_takes_names_tables_and_recipes():
    mine = replace(mp.build("gpipe", 4, 8), name="mine")
    recipe = mp.Recipe("1f1b", 4, 8, vocabulary=True)
    other = replace(mp.build("naive", 4, 8), name="mine")
    found = mp.compare(4, 8, ["zb-h1", mine, other, recipe, mp.build("1f1b", 2, 8)], costs=COSTS)
    assert [row.label for row in found] == ["1f1b", "zb-h1", "mine", "mine (2)", "1f1b --vocabulary", "1f1b (2)"]
    assert found["mine"].makespan == mp.simulate(mine, COSTS).makespan
    assert found["mine (2)"].makespan == 4 * 8 * 29  # one microbatch after the other on four ranks
    assert found["zb-h1"].bubble == mp.simulate(mp.build("zb-h1", 4, 8, costs=COSTS), COSTS).bubble
    assert len(found) == 6
    assert found[:2] == found.rows[:2]
    with pytest.raises(KeyError, match="is of 2 ranks and 8 microbatches, not of 4 and 8"):
        found["1f1b (2)"]
    with pytest.raises(KeyError, match="there are 1f1b, zb-h1"):
        found["zb-h9"]
    with pytest.raises(ScheduleError, match="did you mean zb-h2 or zb-h1"):
        mp.compare(4, 8, ["zb-h3"])


def test_a_comparison_is_a_table_in_a_notebook_and_in_print():
    found = mp.compare(4, 8, ["zb-h1", "dualpipe"], memory=3.0)
    text = str(found).splitlines()
    page = ElementTree.fromstring(f"<page>{found._repr_html_()}</page>")
    rows = [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    assert [row[0] for row in rows] == [line.split()[0] for line in text[: len(rows)]]
    assert " ".join(rows[1]).split() == text[1].split()
    assert page.find("table/caption").text == "p = 4, m = 8, F:B:W = 1:1:1"
    assert [line.text for line in page.iter("p")] == found.advice
    refused = mp.compare(4, 6, ["dualpipe"])  # which needs at least two microbatches for each rank
    assert "<p>dualpipe: " in refused._repr_html_()


def test_a_schedule_shows_its_picture_whose_styles_are_its_own():
    tables = [mp.build("1f1b", 2, 4), mp.build("zb-v", 2, 4)]
    shown = [table._repr_svg_() for table in tables]
    for table, text in zip(tables, shown, strict=True):
        name = re.match('<svg id="(p[0-9a-f]{12})"', text)[1]
        style = re.search("<style>(.*?)</style>", text)[1]
        assert all(rule.startswith(f"#{name} ") for rule in style.split("}") if rule)
        plain = text.replace(f'id="{name}" ', "").replace(f"#{name} ", "")
        assert plain == to_svg(table)
        ElementTree.fromstring(text)
    assert shown[0].split()[1] != shown[1].split()[1]


def test_a_table_too_large_for_a_browser_shows_its_line_alone():
    table = mp.build("gpipe", 8, 1250)
    assert sum(map(len, table.steps())) == MOST_PASSES
    assert table._repr_svg_() is not None
    assert mp.build("gpipe", 8, 1251)._repr_svg_() is None


def test_a_picture_has_costs_and_is_text_where_it_is_printed(tmp_path):
    table = mp.build("zb-h1", 4, 8)
    drawn = mp.draw(table, COSTS, 3.0, file=tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == to_svg(table, COSTS, 3.0)
    assert "of 3" in drawn._repr_svg_()
    assert repr(drawn) == str(drawn) == to_terminal(table, COSTS)
    mp.draw(table, file=tmp_path / "a.PDF")
    assert (tmp_path / "a.PDF").read_bytes().startswith(b"%PDF")
    with pytest.raises(ScheduleError, match=r"a\.jpg: a picture ends in \.svg, \.png or \.pdf"):
        mp.draw(table, file=tmp_path / "a.jpg")


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_a_schedule_comes_back_from_its_file(tmp_path, ending):
    table = mp.build("dualpipe-v", 2, 4)
    mp.save(table, tmp_path / f"a.{ending}")
    assert mp.load(tmp_path / f"a.{ending}").ranks == table.ranks
    assert mp.build(str(tmp_path / f"a.{ending}"), 2, 4).ranks == table.ranks


def test_json_alone_has_costs_and_recipe(tmp_path):
    recipe = mp.Recipe("1f1b", 2, 4)
    table = mp.build(recipe)
    mp.save(table, tmp_path / "a.json", costs=COSTS, recipe=recipe)
    text = (tmp_path / "a.json").read_text()
    assert '"recipe": "1f1b --pp 2 --microbatches 4"' in text
    assert '"makespan": 145' in text  # (m + p - 1)(F + B + W)
    with pytest.raises(ScheduleError, match="CSV has no costs and no recipe"):
        mp.save(table, tmp_path / "a.csv", costs=COSTS)
    with pytest.raises(ScheduleError, match=r"ends in \.json or \.csv"):
        mp.save(table, tmp_path / "a.txt")
    with pytest.raises(DataError, match="cannot be written"):
        mp.save(table, tmp_path / "a.json" / "b.json")
