"""The schedule page in a real browser, beside this library: its numbers, its words on pasted tables, its commands."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.schedule import SCHEDULES, Costs, ScheduleError, build, from_csv, simulate, to_csv
from megapipe.schedule.costs import SHARES
from megapipe.schedule.views.compare import measure
from megapipe.schedule.views.lanes import communication
from megapipe.schedule.views.page import Case, to_page

ROOT = Path(__file__).resolve().parents[3]
FIXED = [name for name in SCHEDULES if name != "zb-auto"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome to open the page in")

STATE = "#p=4&m=8&costs=10,11,8,1.5&a=zb-v&b=interleaved:4&messages"
PROBE = """
<script>
const told = run => {
  try { return run(); } catch (error) { if (error instanceof Refusal) return error.message; throw error; }
};
const probe = ({cases, texts}) => ({
  numbers: cases.map(([name, v, p, m, c]) => told(() => {
    const t = build(name, p, m, v, c), {makespan, period, bubble, share, idle, peak, sent, parameters} = measure(t, c);
    return {makespan, period, bubble, share, idle, peak, sent, parameters, exposed: exposed(t, c)};
  })),
  told: texts.map(text => told(() => { readCsv(text, "mine"); return null; })),
  csv: ["a", "b"].map(side => toCsv(shown[side].t)),
  page: ["a", "b"].map(side => document.getElementById(side).innerText),
  rows: [...document.querySelectorAll("#all tr")].map(row => [...row.cells].map(cell => cell.innerText)),
});
ready.then(() => JSON.stringify(probe(ASKED))).catch(error => error.stack)
  .then(text => { document.body.textContent = text; });
</script>
"""


def drawn_cases() -> list[tuple[Case, Costs]]:
    draw = random.Random(19)
    cases = {}
    while len(cases) < 250:
        name = draw.choice(FIXED)
        v = SCHEDULES[name].chunks or draw.choice((2, 3, 4))
        p, m = draw.randint(2, 6), draw.randint(1, 14)
        f, b, w = (draw.choice([draw.randint(1, 12), draw.uniform(0.1, 12)]) for _ in "fbw")
        comm, overhead = draw.choice([0, 1, draw.uniform(0, 3)]), draw.choice([0, 0, draw.uniform(0, 1)])
        links = dict.fromkeys(SHARES, draw.choice([0, draw.uniform(0, 1)]))
        cases[Case(name, v, p, m)] = replace(Costs(f, b, w, comm=comm, overhead=overhead), **links)
    return [
        *cases.items(),
        *(
            (Case(name, 4 if name == "interleaved" else SCHEDULES[name].chunks, 4, 8), Costs())
            for name in ("zb-v", "interleaved", "1f1b")
        ),
    ]


def spoilt_tables() -> list[str]:
    """Tables with one to three mistakes, and a few without."""
    draw = random.Random(4)
    wholes = [
        to_csv(build(*size), torch=torch)
        for size in (("1f1b", 2, 3), ("zb-h1", 3, 4), ("zb-v", 2, 4), ("dualpipe", 4, 8))
        for torch in (False, True)
    ]
    texts = [
        *wholes,
        "",
        ",\n",
        "0SEND_F0\n0F0,0BW0\n",
        "0F0,0BW0\n\n1F0,1BW0",
        "0F0;0BW0",
        "0F0,2BW0",
        "0F999999,0B999999",
        "0F0,(;0B0)OVERLAP_F_B,(0B0;0F0)OVERLAP_F_B",
    ]
    for _ in range(160):
        rows = [line.split(",") for line in draw.choice(wholes).splitlines()]
        for _ in range(draw.randint(1, 3)):
            row, other = draw.choice(rows), draw.choice(rows)
            i, j = draw.randrange(len(row)), draw.randrange(len(other))
            change = draw.randrange(7)
            if change == 0:
                del row[draw.choice([i, slice(i, None)])]
            elif change == 1:
                row[i], other[j] = other[j], row[i]
            elif change == 2:
                row.insert(i, other[j])
            elif change == 3:
                row[i] = re.sub(r"\d+$", lambda n: str(int(n[0]) + 1), row[i])
            elif change == 4:
                row[i] = row[i].replace(draw.choice("FBWI"), draw.choice(["F", "B", "W", "BW", "I", "Q", "f"]))
            elif change == 5:
                row.insert(i, draw.choice(["", "x", "0SEND_F1", "(0F0;0BW0)OVERLAP_F_B"]))
            else:
                row[i : i + 2] = row[i : i + 2][::-1]
            rows = [row or [""] for row in rows]
        texts.append("\n".join(map(",".join, rows)))
    return texts


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page has and computes, in one start of the browser."""
    folder = tmp_path_factory.mktemp("page")
    asked = {
        "cases": [
            [*case[:4], {x: getattr(costs, x) for x in ("f", "b", "w", "comm", "overhead")} | {"share": costs.link_f}]
            for case, costs in drawn_cases()
        ],
        "texts": spoilt_tables(),
    }
    page = to_page([case for case, _ in drawn_cases()]).replace("</html>", PROBE.replace("ASKED", json.dumps(asked)))
    (folder / "index.html").write_text(page, encoding="utf-8")
    quiet = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --window-size=1600,1000"
    )
    command = [
        BROWSER,
        *quiet.split(),
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=60000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, (folder / "index.html").as_uri() + STATE], capture_output=True, text=True, timeout=300
    )
    text = html.unescape(re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)[1])
    assert text.startswith("{"), text
    return json.loads(text)


def tool(*args: object) -> str:
    program = [sys.executable, ROOT / "tools" / "schedules.py", *args]
    return subprocess.run([*map(str, program)], capture_output=True, text=True, timeout=120, check=True).stdout


def or_refusal(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ScheduleError as error:
        return str(error)


def test_the_page_counts_as_the_library_does(seen):
    compared = 0
    for ((name, v, p, m), costs), numbers in zip(drawn_cases(), seen["numbers"], strict=True):
        schedule = or_refusal(partial(build, name, p, m, chunks=v, costs=costs))
        if isinstance(schedule, str):
            assert numbers == schedule
            continue
        time = simulate(schedule, costs)
        for key in ("makespan", "period", "bubble", "idle", "peak", "sent", "parameters"):
            assert numbers[key] == pytest.approx(getattr(time, key), rel=1e-9, abs=1e-9), (name, v, p, m, costs, key)
        assert numbers["exposed"] == pytest.approx(communication(schedule, costs).share)
        assert numbers["share"] == pytest.approx(measure(schedule, costs).bubble_share)
        compared += 1
    assert compared >= 200


def test_the_page_says_of_a_pasted_table_what_the_library_says(seen):
    right = 0
    for text, told in zip(spoilt_tables(), seen["told"], strict=True):
        read = or_refusal(partial(from_csv, text, "mine"))
        assert told == (read if isinstance(read, str) else None), text
        right += told is None
    assert right < len(seen["told"]) / 3


def test_what_the_page_shows_is_what_show_prints(seen):
    for text in seen["page"]:
        show = re.search(r"megapipe schedules (show .*)", text)[1]
        said = tool(*show.split())
        makespan, period, bubble, share = re.search(
            r"makespan ([\d.]+), period ([\d.]+), bubble ([\d.]+) \((.*?%)", said
        ).groups()
        assert f"makespan\n{makespan}\n" in text
        assert f"bubble\n{bubble}\n{share} of the period {period}\n" in text
        for shown, line in (("peak", r"activation: peak .*by rank (.*)"), ("sends", r"sent by rank (.*)")):
            assert re.findall(rf"{shown} ([\d.]+)", text) == re.search(line, said)[1].split()


def test_the_flags_of_the_page_ask_for_what_it_shows(seen):
    zb_v, interleaved = (
        parse(Config, re.search(r"pretrain --nproc \d+ (.*)", text.replace("\\\n", ""))[1].split())
        for text in seen["page"]
    )
    for config in (zb_v, interleaved):  # nothing is missing of a run
        assert flag_problems(replace(config, world_size=config.parallel.pipeline_model_parallel_size)) == []
    assert zb_v.parallel.pipeline_schedule == "zb-v"
    assert (interleaved.parallel.pipeline_schedule, interleaved.parallel.num_virtual_stages_per_pipeline_rank) == (
        "interleaved",
        4,
    )
    assert interleaved.parallel.pipeline_model_parallel_size == 4
    assert interleaved.train.global_batch_size // interleaved.train.micro_batch_size == 8


def test_the_csv_of_the_page_is_the_schedule(seen):
    assert from_csv(seen["csv"][1]).ranks == build("interleaved", 4, 8, chunks=4).ranks


def test_all_schedules_stand_in_the_pages_table(seen):
    assert {row[0].split()[0] for row in seen["rows"][1:]} == set(SCHEDULES)


def test_the_command_writes_the_page(tmp_path: Path):
    said = tool("site", tmp_path / "site", "--pp", "2", "--microbatches", "2", "4")
    assert said == f"{tmp_path / 'site' / 'index.html'}\n"
    page = (tmp_path / "site" / "index.html").read_text()
    assert '"p": [2], "m": [2, 4]' in page
    assert not re.search(r"(src|href)=|https?://", page)  # no network
