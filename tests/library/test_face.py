"""`import megapipe`: one lazy module, typed, whose names are those that its own help lists."""

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import megapipe
from megapipe.moved import MODULES

ROOT = Path(__file__).parents[2]
NAMES = [
    "build",
    "Recipe",
    "Costs",
    "simulate",
    "verify",
    "draw",
    "compare",
    "load",
    "save",
    "Config",
    "parse",
    "pretrain",
    "make_plan",
    "check",
    "get_forward_backward_func",
    "P2PCommunicator",
    "ProcessMesh",
    "Schedule",
    "Comparison",
    "Plan",
]


def run(code: str) -> str:
    """What a Python of its own prints; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_heavy_is_imported_before_it_is_used():
    seen = "import sys, megapipe; print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'numpy'}))"
    assert run(seen) == "[]\n"
    tables = "megapipe.compare(2, 4, ['zb-h1'])._repr_html_(); megapipe.build('1f1b', 2, 4)._repr_svg_()"
    assert run(f"{seen.replace('print', f'{tables}; print')}") == "[]\n"


def test_every_name_is_there_and_comes_from_where_type_checkers_read_it():
    source = ast.parse(Path(megapipe.__file__).read_text(encoding="utf-8"))
    (typed,) = (x for x in source.body if isinstance(x, ast.If) and ast.unparse(x.test) == "typing.TYPE_CHECKING")
    read = {x.names[0].name: x.module for x in typed.body if isinstance(x, ast.ImportFrom)}
    assert set(read) == set(NAMES)
    for name, module in read.items():
        assert getattr(megapipe, name) is getattr(importlib.import_module(str(module)), name)
    assert {*NAMES, "__version__"} <= set(dir(megapipe))
    assert re.match(r"\d+\.\d+\.\d+|of a clone", megapipe.__version__)


def test_a_name_that_is_not_there_says_where_to_look():
    with pytest.raises(AttributeError, match=r"'biuld'; a part of it is imported by name, such as megapipe\.schedule"):
        _ = megapipe.biuld


def test_help_is_a_page_with_every_name():
    page = pydoc.plain(pydoc.render_doc(megapipe))
    assert len(page.splitlines()) <= 80
    own = inspect.getdoc(megapipe)
    assert all(re.search(rf"\b{name}\b", own) for name in NAMES)
    for name in NAMES:
        assert inspect.getdoc(getattr(megapipe, name)), name


@pytest.mark.parametrize("former", MODULES)
def test_a_module_that_moved_still_imports_with_a_warning(former):
    new = importlib.import_module(f"megapipe.{MODULES[former]}")
    sys.modules.pop(f"megapipe.{former}", None)
    with pytest.warns(FutureWarning, match=rf"megapipe\.{former} is {new.__name__} now"):
        old = importlib.import_module(f"megapipe.{former}")
    public = [name for name in vars(new) if not name.startswith("_")]
    assert all(getattr(old, name) is getattr(new, name) for name in public)
    room, _, name = former.rpartition(".")
    said = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"megapipe\.{room}\b|`\.{room.rpartition('.')[2]}\b|\b{name}\b", said)


def test_names_that_changed_are_the_new_ones():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megapipe.schedule.views.study import Comparison, Point
        from megapipe.training.hooks import Hooks
        from megapipe.training.seams import Seams
    assert Point is Comparison
    assert Seams is Hooks
    with pytest.raises(ImportError):
        importlib.import_module("megapipe.schedule.nothing")
