"""Add pages to docs/ in `mkdocs build`: README as the first page, a page for each schedule, every
flag, the API.

A schedule's page is made of what stands elsewhere: its entry of the catalogue, its section of
docs/schedules.md with picture, formula, paper and when to take it, and its numbers from the clock.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from megapipe.errors import ScheduleError  # noqa: E402
from megapipe.flags.table import table  # noqa: E402
from megapipe.schedule import SCHEDULES, Costs, build  # noqa: E402
from megapipe.schedule.views.compare import measure  # noqa: E402
from megapipe.schedule.views.scene import short  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.structure.files import File, Files

API = {
    "The library": [f"megapipe.library.{name}" for name in ("schedules", "runs")],
    "Schedules": [
        *(
            f"megapipe.schedule.{name}"
            for name in ("catalogue", "passes", "costs", "text", "generators.recorder")
        ),
        *(
            f"megapipe.schedule.{name}"
            for name in ("simulate.simulate", "simulate.Timeline", "verify.verify")
        ),
    ],
    "Transforms of a schedule": [
        *(f"megapipe.schedule.shapes.{name}" for name in ("slices.slices", "pairs.pairs")),
        *(
            f"megapipe.schedule.families.{name}"
            for name in ("vocabulary.shares", "offload.copies", "step.optimizer")
        ),
        *(
            f"megapipe.schedule.families.{name}"
            for name in ("offload.solve.solve", "sharding.sharded.sharded_within")
        ),
    ],
    "Schedules compared and drawn": [
        *(
            f"megapipe.schedule.views.{name}"
            for name in ("compare", "terminal", "draw", "timeline", "perfetto")
        )
    ],
    "A run": ["megapipe.training.pretrain", "megapipe.training.hooks"],
    "Data sets and batches": [
        *(
            f"megapipe.data.{name}"
            for name in ("build.Datasets", "gpt_dataset.TokenDataset", "loader.Batch")
        )
    ],
    "Models": [
        *("megapipe.models.provider", "megapipe.models.gpt"),
        *("megapipe.config.model.ModelConfig", "megapipe.partition.spans.LayerSpan"),
    ],
    "Optimizers": ["megapipe.optim.rule"],
    "Megatron's step": ["megapipe.pipeline_parallel.contracts.forward_backward"],
    "Errors and tests": ["megapipe.errors", "megapipe.testing"],
}
"""What programs of users import, by title."""
POINTS = [(4, 8), (8, 16), (8, 64)]
COSTS = {
    "F = B = W": Costs(),
    "10:11:8": Costs(10, 11, 8),
    "10:11:8, message 1": Costs(10, 11, 8, comm=1),
}


def on_config(config: Any) -> Any:
    """Name the schedules' pages in the table of contents."""
    for part in config.nav:
        if isinstance(part, dict) and "Choose a schedule" in part:
            pages = [f"schedule/{name}.md" for name in SCHEDULES]
            part["Choose a schedule"].append({"Each schedule": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and the files that pages link to."""
    from mkdocs.structure.files import File

    made = {"index.md": readme(), "flags.md": flags(), "api.md": api()}
    made |= {f"schedule/{name}.md": page(name) for name in SCHEDULES}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for path in sorted({path for file in files.documentation_pages() for path in outside(file)}):
        files.append(File.generated(config, f"source/{path}.txt", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside of docs/ lead to a copy of the file, as text."""
    here = posixpath.dirname(page.file.src_uri)

    def copied(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", here, found[1]))
        if path.startswith("docs/"):
            return found[0]
        return f"]({posixpath.relpath(f'source/{path}.txt', here or '.')})"

    return _OUTSIDE.sub(copied, markdown)


# A copy as text has no headings.
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+(?!docs/)[\w./-]+)(?:#[\w-]+)?\)")


def outside(file: File) -> list[str]:
    """Return the files outside of docs/ that a page links to."""
    here = posixpath.dirname(file.src_uri)
    paths = (
        posixpath.normpath(posixpath.join("docs", here, x))
        for x in _OUTSIDE.findall(file.content_string)
    )
    return [path for path in paths if not path.startswith("docs/")]


def readme() -> str:
    """README as it would link within docs/."""
    text = re.sub(
        r"\]\((?!https?:|#|docs/)", "](../", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    return text.replace("](docs/", "](")


def page(name: str) -> str:
    """All that is known of a schedule."""
    entry, docs = SCHEDULES[name], (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    section = re.search(rf"^### {re.escape(name)}\n(.*?)(?=^##)", docs, re.M | re.S)
    assert section, f"docs/schedules.md has no section ### {name}"
    facts = {
        "stages of a rank": f"{entry.chunks or 'v, as --chunks says'}; placed as {entry.placement}",
        "backward": "B and W apart" if entry.split else "whole",
        "copies of the parameters": entry.copies,
    }
    text = re.sub(r"\]\((?!https?:|#)", "](../", section[1]).replace("](#", "](../schedules.md#")
    lines = [f"# {name}", entry.about + ".", text.strip(), "## In short", "| | |\n|---|---|"]
    lines[-1] += "".join(f"\n| {what} | {said} |" for what, said in facts.items())
    if not entry.searched:
        lines += ["## In numbers", numbers(name)]
    lines += [
        "## Try it",
        f"```\nmegapipe schedules show {name} --pp 4 --microbatches 8\n```",
        "[Symbols](../schedules.md#symbols), [all of them compared](../schedules.md#the-table).",
    ]
    return "\n\n".join(lines) + "\n"


def numbers(name: str) -> str:
    """Return the makespan next to 1F1B's, the bubble and the peak at a few points."""
    head = "| p | m | F:B:W | makespan | 1f1b | bubble | of the period | peak activation |"
    lines = [head, "|---:|---:|---|---:|---:|---:|---:|---:|"]
    for p, m in POINTS:
        for said, costs in COSTS.items():
            try:
                row, plain = (measure(build(x, p, m, costs=costs), costs) for x in (name, "1f1b"))
            except ScheduleError:
                continue
            cells = (row.makespan, plain.makespan, row.bubble)
            shown = " | ".join(map(short, cells))
            lines.append(
                f"| {p} | {m} | {said} | {shown} | {row.bubble_share:.1%} | {short(row.peak)} |"
            )
    return "\n".join(lines)


def flags() -> str:
    """Every flag of a run: what it does, or what happens instead."""
    return f"# Every flag\n\n{table()}"


def api() -> str:
    """Return a page of the names that programs import, from the docstrings."""
    parts = [
        f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names)
        for title, names in API.items()
    ]
    return "# API\n\n" + "\n\n".join(part.replace("# ", "## ", 1) for part in parts) + "\n"
