"""The comparison of real runs counts what the table says: the same loss, bytes held and sent."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from megapipe.commands import compare
from megapipe.data.build import build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import make_plan
from megapipe.schedule import build, simulate
from megapipe.schedule.views.figure import Files

SMALL = "--layers 4 --hidden 32 --seq 16 --microbatches 4"


def test_rows_of_real_runs_count_what_is_predicted():
    flags = parse(compare.Flags, SMALL.split())
    configs = [compare._config(name, 2, flags) for name in ("gpipe", "zb-v")]
    data = build_datasets(configs[0], build_tokenizer(configs[0].data))
    rows = []
    for config in configs:
        plan = make_plan(config)
        ranks = run_threads(lambda mesh, c=config, p=plan: compare._train(mesh, c, p, data, 1), pp=2)
        assert ranks[0].loss == ranks[1].loss
        rows.append(ranks[0])
    assert rows[0].loss == rows[1].loss
    for row in rows:
        assert row.mib == pytest.approx(row.mib_predicted, rel=0.1)
        messages = sum(simulate(build(row.schedule, 2, 4)).sent)
        assert row.sent_mib * 2**20 == messages * 16 * 32 * 4
        assert 0 < row.bubble < 1
        assert row.most == pytest.approx(row.table + row.stages + row.messages + row.host)
        assert 0 <= row.table < 1
    assert "| 2 | gpipe |" in compare.to_markdown(rows)
    head, _, *shown = compare.to_markdown(rows, compare.COLUMNS | compare.WHY).splitlines()
    assert head.endswith("| MiB sent | waits most | table | stages | messages | host |")
    assert {line.count("|") for line in (head, *shown)} == {16}
    pytest.importorskip("matplotlib")
    (picture,) = compare.draw(rows, Files(svg="a.svg")).values()
    said = " ".join(ElementTree.fromstring(picture).itertext())
    assert all(word in said for word in ("2 ranks", "gpipe", "zb-v", "ms a step", "wait", "predicted"))


def test_a_comparison_says_what_its_columns_mean(monkeypatch, capsys):
    row = compare.Row(2, "1f1b", *range(13))
    monkeypatch.setattr(compare, "run_ranks", lambda *given, **named: [[row]])
    compare.main(["--pp", "2", "--schedules", "1f1b", "--why"])
    said = capsys.readouterr().out
    table, legend = said.split("\n\n")
    columns = ["step ms", "tokens/s", "bubble", "MiB held", "MiB sent", *compare.WHY.values()]
    assert [name for name in columns if name not in table or name not in legend] == []
