"""The schedule page in a browser, its script in node too, beside this library: numbers, words on tables, commands."""

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
from megapipe.schedule import SCHEDULES, Costs, Schedule, ScheduleError, build, from_csv, simulate, to_csv
from megapipe.schedule.core.cuts import Cutting
from megapipe.schedule.costs import ATTENTION, SHARES
from megapipe.schedule.ingredients import FixedCosts
from megapipe.schedule.shapes.slices.slices import slices
from megapipe.schedule.views.compare import measure
from megapipe.schedule.views.features.sliced import in_slices
from megapipe.schedule.views.lanes import communication
from megapipe.schedule.views.page import Case, to_page

ROOT = Path(__file__).resolve().parents[3]
FIXED = [name for name in SCHEDULES if name != "zb-auto"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NODE = shutil.which("node")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome to open the page in")

STATE = "#p=4&m=8&costs=10,11,8,1.5&a=zb-v&b=interleaved:4&messages"
COUNTS = """
const told = run => {
  try { return run(); } catch (error) { if (error instanceof Refusal) return error.message; throw error; }
};
const count = ({cases, texts}) => ({
  numbers: cases.map(([name, v, p, m, c, n]) => told(() => {
    const t = build(name, p, m, v, c, n);
    const {makespan, period, bubble, share, idle, peak, sent, parameters} = measure(t, c);
    return {makespan, period, bubble, share, idle, peak, sent, parameters, exposed: exposed(t, c)};
  })),
  told: texts.map(text => told(() => { readCsv(text, "mine"); return null; })),
});
"""
PROBE = """
<script>
COUNTS
const probe = asked => ({
  ...count(asked),
  csv: ["a", "b"].map(side => toCsv(shown[side].t)),
  page: ["a", "b"].map(side => document.getElementById(side).innerText),
  rows: [...document.querySelectorAll("#all tr")].map(row => [...row.cells].map(cell => cell.innerText)),
});
ready.then(() => JSON.stringify(probe(ASKED))).catch(error => error.stack)
  .then(text => { document.body.textContent = text; });
</script>
"""


def drawn_cases() -> list[tuple[Case, Costs, int]]:
    """Tables, costs and numbers of slices."""
    draw = random.Random(19)
    cases = {}
    while len(cases) < 250:
        name = draw.choice(FIXED)
        v = SCHEDULES[name].chunks or draw.choice((2, 3, 4))
        p, m = draw.randint(2, 6), draw.randint(1, 14)
        f, b, w = (draw.choice([draw.randint(1, 12), draw.uniform(0.1, 12)]) for _ in "fbw")
        comm, overhead = draw.choice([0, 1, draw.uniform(0, 3)]), draw.choice([0, 0, draw.uniform(0, 1)])
        n = draw.choice([1, 1, 2, 3]) if m <= 4 else 1
        shares = dict.fromkeys(SHARES, draw.choice([0, draw.uniform(0, 1)])) if n == 1 else {}
        shares |= dict.fromkeys(ATTENTION, draw.choice([0, draw.uniform(0, 1)])) if n > 1 else {}
        cases[Case(name, v, p, m)] = replace(Costs(f, b, w, comm=comm, overhead=overhead), **shares), n
    return [
        *((case, costs, n) for case, (costs, n) in cases.items()),
        *(
            (Case(name, 4 if name == "interleaved" else SCHEDULES[name].chunks, 4, 8), Costs(), 1)
            for name in ("zb-v", "interleaved", "1f1b")
        ),
    ]


def asked() -> dict[str, Any]:
    names = ("f", "b", "w", "comm", "overhead")
    cases = [
        [*case, {x: getattr(costs, x) for x in names} | {"share": costs.link_f, "attention": costs.attention_f}, n]
        for case, costs, n in drawn_cases()
    ]
    return {"cases": cases, "texts": spoilt_tables()}


def page() -> str:
    """The page with the tables that the cases are made of."""
    needed = {case._replace(microbatches=case.microbatches * n): None for case, _, n in drawn_cases()}
    return to_page([*needed])


def spoilt_tables() -> list[str]:
    """Tables with one to three mistakes, and a few without."""
    draw = random.Random(4)
    wholes = [
        to_csv(build(*size), torch=torch)
        for size in (("1f1b", 2, 3), ("zb-h1", 3, 4), ("zb-v", 2, 4), ("dualpipe", 4, 8))
        for torch in (False, True)[: 1 + (size[0] != "dualpipe")]
    ]
    wholes += [to_csv(slices(partial(build, name, 2), 2, (1, 1))) for name in ("1f1b", "zb-h1")]
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
        "0F0.0,0F0.1,0BW0.0,0BW0.1",
        "0F0.0,0F0,0BW0.1,0BW0.0",
        "0F9.9,0B9.9",
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
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's script computes, in node: all of it but the view needs no browser."""
    if NODE is None:
        pytest.skip("no node to run the page's script in")
    script = re.search(r"<script>(.*?)// ---- The view ----", page(), re.DOTALL)[1]
    path = tmp_path_factory.mktemp("script") / "page.js"
    run = "unpackTables().then(tables => { TABLES = tables; console.log(JSON.stringify(count(ASKED))); });"
    told = run.replace("ASKED", json.dumps(asked()))
    path.write_text(f"let TABLES;{script}{COUNTS}{told}", encoding="utf-8")
    done = subprocess.run([NODE, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page has and computes, in one start of the browser."""
    folder = tmp_path_factory.mktemp("page")
    probe = PROBE.replace("COUNTS", COUNTS).replace("ASKED", json.dumps(asked()))
    (folder / "index.html").write_text(page().replace("</html>", probe), encoding="utf-8")
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


@pytest.fixture(params=["node", pytest.param("browser", marks=needs_browser)])
def port(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue("counted" if request.param == "node" else "seen")


def made(name: str, v: int, p: int, m: int, costs: Costs, n: int) -> Schedule:
    if n == 1:
        return build(name, p, m, chunks=v, costs=costs)
    return in_slices(name, p, m, costs, cutting=Cutting(n), chunks=v).build(FixedCosts(costs)).table


def test_the_page_counts_as_the_library_does(port):
    compared = 0
    for (case, costs, n), numbers in zip(drawn_cases(), port["numbers"], strict=True):
        (name, v, p, m), schedule = case, or_refusal(partial(made, *case, costs, n))
        if isinstance(schedule, str):
            assert numbers == schedule
            continue
        time = simulate(schedule, costs)
        for key in ("makespan", "period", "bubble", "idle", "peak", "sent", "parameters"):
            assert numbers[key] == pytest.approx(getattr(time, key), rel=1e-9, abs=1e-9), (name, v, p, m, n, costs, key)
        assert numbers["exposed"] == pytest.approx(communication(schedule, costs).share)
        assert numbers["share"] == pytest.approx(measure(schedule, costs).bubble_share)
        compared += 1
    assert compared >= 200


def test_the_page_says_of_a_pasted_table_what_the_library_says(port):
    right = 0
    for text, told in zip(spoilt_tables(), port["told"], strict=True):
        read = or_refusal(partial(from_csv, text, "mine"))
        assert told == (read if isinstance(read, str) else None), text
        right += told is None
    assert right < len(port["told"]) / 3


@needs_browser
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


@needs_browser
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
    assert interleaved.batch.global_batch_size // interleaved.batch.micro_batch_size == 8


@needs_browser
def test_the_csv_of_the_page_is_the_schedule(seen):
    assert from_csv(seen["csv"][1]).ranks == build("interleaved", 4, 8, chunks=4).ranks


@needs_browser
def test_all_schedules_stand_in_the_pages_table(seen):
    assert {row[0].split()[0] for row in seen["rows"][1:]} == set(SCHEDULES)


def test_the_command_writes_the_page(tmp_path: Path):
    said = tool("site", tmp_path / "site", "--pp", "2", "--microbatches", "2", "4")
    assert said == f"{tmp_path / 'site' / 'index.html'}\n"
    page = (tmp_path / "site" / "index.html").read_text()
    assert '"p": [2], "m": [2, 4]' in page
    assert not re.search(r"(src|href)=|https?://", page)  # no network
