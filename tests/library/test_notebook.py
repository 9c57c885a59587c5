"""examples/schedules.ipynb runs, and shows what it says that it shows."""

import json
import re

import pytest

from tools.docs import notebook as tool


def test_every_cell_gives_the_output_that_stands_below_it(monkeypatch):
    monkeypatch.chdir(tool.ROOT)
    notebook = json.loads(tool.NOTEBOOK.read_text(encoding="utf-8"))
    names = {}
    kinds = set()
    for count, cell, code in tool.code_cells(notebook):
        assert cell["outputs"] == tool.outputs(code, count, names), code
        kinds |= {kind for output in cell["outputs"] for kind in output.get("data", [output["output_type"]])}
    assert kinds == {"stream", "text/plain", "text/html", "image/svg+xml"}


def test_the_programs_of_the_page_print_what_stands_below_them():
    page = (tool.ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    names = {}
    assert len(programs) == 3
    for program, printed in programs:
        assert tool.run(program, names) == (printed, {})


def test_the_notebook_is_one_that_jupyter_reads():
    notebook = json.loads(tool.NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert {cell["cell_type"] for cell in notebook["cells"]} == {"code", "markdown"}
    assert all(isinstance(line, str) for cell in notebook["cells"] for line in cell["source"])
    links = re.findall(r"\]\(([^)]+)\)", "".join(line for cell in notebook["cells"] for line in cell["source"]))
    assert links
    assert all((tool.NOTEBOOK.parent / link).is_file() for link in links)


def test_a_cell_shows_its_last_line_and_what_it_prints():
    names = {}
    assert tool.run("x = 2\nprint(x)", names) == ("2\n", {})
    assert tool.run("print(x)\nx + 1", names) == ("2\n", {"text/plain": "3"})
    with pytest.raises(ZeroDivisionError):
        tool.run("x / 0", names)
