"""Run the code cells of examples/schedules.ipynb in one namespace, and write what they show into
it.

python tools/docs/notebook.py            no jupyter is needed; the test runs the cells the same way
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "schedules.ipynb"
KINDS = {"_repr_svg_": "image/svg+xml", "_repr_html_": "text/html"}
"""Methods that Jupyter asks of a value, and the kind of what they return."""


def shown(value: Any) -> dict[str, str]:
    """Return what Jupyter shows of the value of a cell's last line, by kind."""
    found = {"text/plain": repr(value)}
    for method, kind in KINDS.items():
        text = getattr(value, method, lambda: None)()
        if text is not None:
            found[kind] = text
    return found


def run(code: str, names: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Run a cell. Return what it prints, and what its last line shows, if that is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return said.getvalue(), {} if value is None else shown(value)


def outputs(code: str, count: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell, and return its outputs in the notebook's format. count: its number among code
    cells.
    """
    printed, value = run(code, names)
    found: list[dict[str, Any]] = []
    if printed:
        found.append(
            {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
        )
    if value:
        data = {kind: text.splitlines(keepends=True) for kind, text in value.items()}
        found.append(
            {
                "data": data,
                "execution_count": count,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return found


def code_cells(notebook: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield (number, cell, its code) of each code cell."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for count, cell in enumerate(cells, 1):
        yield count, cell, "".join(cell["source"])


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for count, cell, code in code_cells(notebook):
        cell["execution_count"] = count
        cell["outputs"] = outputs(code, count, names)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    main()
