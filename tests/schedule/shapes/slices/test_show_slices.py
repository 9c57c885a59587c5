"""`show --slices`: what it prints and writes, and what it refuses."""

import json
from types import SimpleNamespace

import pytest
import torch

from megapipe.commands import schedules
from megapipe.errors import ScheduleError
from megapipe.schedule import Kind
from megapipe.schedule.views.features import sliced
from tools.bench.emulate.device import Shared

ASKED = ["show", "1f1b", "--pp", "4", "--microbatches", "4", "--slices", "2", "--attention-share", "0.6"]


def test_show_writes_slices_and_their_lengths(tmp_path, capsys):
    assert schedules.main([*ASKED, "--json", str(tmp_path / "a.json"), "--svg", str(tmp_path / "a.svg")]) == 0
    said = capsys.readouterr().out
    assert "makespan 16.5" in said  # 4 microbatches of 3, and ramps of 3 x 3 / 2
    assert "slices, work: 63.8% 36.2% of the sequence" in said
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["ranks"][2][0] == ["2F0.0"]
    assert sum(written["cuts"]) == pytest.approx(1)
    assert ">0.1<" in (tmp_path / "a.svg").read_text()
    # And back, of a file that is cut already.
    assert schedules.main(["show", str(tmp_path / "a.json")]) == 0
    assert "rank 3" in capsys.readouterr().out
    with pytest.raises(ScheduleError, match="is cut in 2 slices already"):
        schedules.main(["show", str(tmp_path / "a.json"), "--slices", "2"])


def test_show_says_what_keys_and_values_take_beside_one_document_and_the_undivided(capsys):
    asked = "show 1f1b --pp 8 --microbatches 8 --slices 4 --documents 4 --attention-share 0.6"
    assert schedules.main(asked.split()) == 0
    # Of eight documents under way each is a quarter; whole microbatches under way are eight too.
    assert capsys.readouterr().out.splitlines()[-1] == (
        "keys and values: a rank holds at most 2 of a microbatch, with their gradients 2; in one document 3.0316 and "
        "3.6701, this is 0.66 and 0.54 of these; undivided 8 and 8, this is 0.25 and 0.25 of these"
    )
    assert schedules.main([*asked.split(), "--copy-ratio", "0.5"]) == 0
    assert "at most 0.5 of a microbatch, with their gradients 0.5; in one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--pairs", "--comm-share", "0.2"], "--slices cuts a table of F, B and W: leave out --pairs"),
        (["--vocabulary", "1,1"], "--slices cuts a table of F, B and W: leave out --vocabulary"),
        (["--memory", "1"], "1f1b in 2 slices holds 2.63849, over the memory limit of 1"),
    ],
)
def test_what_slices_do_not_go_with_is_refused(more, said):
    with pytest.raises(ScheduleError) as error:
        schedules.main([*ASKED, *more])
    assert said in str(error.value)


@pytest.mark.parametrize("flags", ["--cuts equal", "--attention-share 0.3", "--documents 1"])
@pytest.mark.parametrize("slices, remedy", [("", "add --slices 4"), ("--slices 1 ", "give --slices 4 in place of 1")])
def test_flags_of_slices_need_several(slices, flags, remedy):
    """They were ignored in silence (found by drawn command lines)."""
    with pytest.raises(ScheduleError, match=f"are of slices: {remedy}, or leave them out"):
        schedules.main([*ASKED[:6], *f"{slices}{flags}".split()])


def test_lengths_of_slices_are_as_many_as_slices_and_are_of_show():
    """They were ignored in silence (found by drawn command lines)."""
    with pytest.raises(ScheduleError, match=r"--cuts gives 1 length.s., and --slices 2 needs 2"):
        schedules.main([*ASKED[:6], "--slices", "2", "--cuts", "0.5"])
    with pytest.raises(ScheduleError, match="compare cuts every schedule the same way: give --cuts equal"):
        schedules.main(["compare", *ASKED[2:6], "--slices", "2", "--cuts", "3,2"])


def test_an_order_of_slices_is_searched(capsys, monkeypatch):
    monkeypatch.setattr(sliced, "_EFFORT", 0.3)
    asked = ["show", "zb-auto", "--pp", "2", "--microbatches", "2", "--slices", "2", "--chunks", "1"]
    assert schedules.main(asked) == 0
    assert "zb-auto: makespan 6.5," in capsys.readouterr().out  # 6 of work, and a slice before the second rank begins
    with pytest.raises(ScheduleError, match=r"zb-auto finds no order of 2 slices in memory 0\.7\. Allow more, or take"):
        schedules.main([*asked, "--memory", "0.7"])


def test_an_emulated_device_takes_what_its_slice_takes():
    slept, held = [], []
    device = SimpleNamespace(compute=slept.append, hold=held.append)
    stage = Shared(
        device, [({Kind.F: 1.0, Kind.B: 2.0, Kind.W: 3.0}, 0.75), ({Kind.F: 0.5}, 0.25)], torch.zeros(1), None
    )
    stage.forward(0, None)
    stage.forward(1, None)
    stage.backward(2, None, weights=True)
    assert slept == [1.0, 0.5, 2.0, 3.0]
    assert held == [0.75, 0.25, -0.75]


def test_compare_has_schedules_in_slices_beside_the_whole_ones(capsys):
    asked = ["compare", "--pp", "8", "--microbatches", "2", "--slices", "4", "--attention-share", "0.6"]
    assert schedules.main([*asked, "--only", "zb-h1"]) == 0
    said = capsys.readouterr().out
    rows = [line.split("  ") for line in said.splitlines()[1:5]]
    first = {name: float(next(filter(None, cells))) for name, *cells in rows}
    assert first == {"zb-h1 in 4": 8.5, "1f1b in 4": 11.25, "zb-h1": 19, "1f1b": 27}
    assert "Take zb-h1 in 4: makespan 8.5" in said
    with pytest.raises(ScheduleError, match="leave out --pairs or --slices"):
        schedules.main([*asked, "--pairs", "--comm-share", "0.2"])


def test_tables_of_the_literature_are_shown_in_their_own_slices_or_in_those_asked_for(capsys):
    assert schedules.main(["show", "slimpipe", "--pp", "4", "--microbatches", "2"]) == 0
    assert "peak 1.75" in capsys.readouterr().out
    asked = ["show", "terapipe", "--pp", "4", "--microbatches", "2", "--slices", "6", "--attention-share", "0.5"]
    assert schedules.main(asked) == 0
    assert "slices, work: 26.4% 19.4% 16.1% 14.0% 12.6% 11.6% of the sequence" in capsys.readouterr().out
    with pytest.raises(ScheduleError, match=r"slimpipe takes a multiple of 4 slices, .* got 6\. Use 8\."):
        schedules.main(["show", "slimpipe", "--pp", "4", "--microbatches", "2", "--slices", "6"])
    with pytest.raises(ScheduleError, match=r"slimpipe has slices of its own\. Leave out --documents"):
        schedules.main(["show", "slimpipe", "--pp", "4", "--microbatches", "2", "--slices", "8", "--documents", "2"])


@pytest.mark.parametrize("copies", [{"o": 0.1, "l": 0.1, "mem_o": 0.8, "mem_k": 0.2}, {}])
def test_costs_of_equal_stages_hold_the_keys_that_plain_costs_do(copies, tmp_path, capsys):
    """Copies by stage, as `plan --save-costs` writes them, were refused, and --copy-ratio with any costs by stage."""
    plain = {"f": 1.0, "b": 2.0, "w": 1.5, "mem_b": 1.0, "mem_w": 0.5, **copies}
    asked = ["show", "1f1b", "--pp", "4", "--microbatches", "8", "--slices", "2", "--costs"]
    more = [] if copies else ["--copy-ratio", "0.5"]
    printed = []
    for name, costs in {"plain": plain, "stages": {key: [x] * 4 for key, x in plain.items()}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(costs))
        assert schedules.main([*asked, str(tmp_path / f"{name}.json"), *more]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
