"""Draw who imports whom between the folders of megapipe/schedule.

    python -m tools.docs.wings            # the table, and each import from one wing to another

A *wing* is a folder of schedule/. The core is everything that wings may import: the files of
schedule/ itself and of schedule/core/, the memory that its clock counts, and the list and protocol
of families. A wing that needs another gets it from the core, so that a reader can leave out all
other wings.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SCHEDULE = Path(__file__).parents[2] / "megapipe" / "schedule"
CORE = "core"
_OF_CORE = ("families", "families.family")
"""Modules of the core in the folder of a wing. `families` is the list alone, not a family."""


class Import(NamedTuple):
    """An import: the file and line that has it, and the module below schedule/ that it names."""

    place: str
    module: str


def wing_of(module: str) -> str:
    """Return the wing of a module that is named from schedule/ on, such as `search.auto`."""
    wing = module.split(".")[0]
    # A module of the core is a file, and the name of a wing's file has a dot.
    if module in _OF_CORE or wing in (CORE, "memory") or not (SCHEDULE / wing).is_dir():
        return CORE
    return wing


def imports(root: Path = SCHEDULE) -> dict[tuple[str, str], list[Import]]:
    """Return the imports from wing to wing, also inside functions, by (importer, imported)."""
    found = defaultdict[tuple[str, str], list[Import]](list)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        wing = wing_of(".".join(parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            ours, _, module = node.module.partition("megapipe.schedule.")
            if ours or not module:
                continue
            other = wing_of(module)
            if other != wing:
                place = f"{path.relative_to(root)}:{node.lineno}"
                found[wing, other].append(Import(place, module))
    return dict(found)


def between(found: dict[tuple[str, str], list[Import]]) -> dict[tuple[str, str], list[Import]]:
    """Return the imports that do not begin or end in the core."""
    return {arrow: those for arrow, those in found.items() if CORE not in arrow}


def drawing(found: dict[tuple[str, str], list[Import]]) -> str:
    """Return a table with a row for each importer, followed by the imports between wings."""
    names = sorted({name for arrow in found for name in arrow} - {CORE})
    columns = [CORE, *names]
    width = max(map(len, columns))
    lines = [f"{'imports':<{width}}  " + "  ".join(columns)]
    for row in columns:
        cells = []
        for column in columns:
            count = len(found.get((row, column), ()))
            text = str(count) if count else "."
            cells.append(f"{text:>{len(column)}}")
        lines.append(f"{row:<{width}}  " + "  ".join(cells))
    for (wing, other), those in sorted(between(found).items()):
        lines += ["", f"{wing} -> {other}"]
        lines += [f"  {place:<36} {module}" for place, module in those]
    return "\n".join(lines)


if __name__ == "__main__":
    print(drawing(imports()))
