"""What keeps the code small enough to read: no long file, no long function, nothing global that changes."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.schedule import SCHEDULES

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for room in ("megapipe", "tools", "examples") for path in (ROOT / room).rglob("*.py"))
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 80
FILES_OF_A_FOLDER = 15


def findings(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    if (lines := len(source.splitlines())) > LINES_OF_A_FILE:
        yield f"{lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > LINES_OF_A_FUNCTION:
                yield f"line {node.lineno}: {node.name} has {lines} lines"
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and waits_to_be_filled(node.value):
            yield f"line {node.lineno}: {ast.unparse(node)} changes"


def waits_to_be_filled(value: ast.expr) -> bool:
    """Is it an empty container, or an object whose only use is to change?"""
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        return name in (
            "Lock",
            "RLock",
            "local",
            "WeakKeyDictionary",
            "WeakValueDictionary",
            "defaultdict",
            "deque",
        ) or (name in ("list", "dict", "set") and not value.args and not value.keywords)
    return (isinstance(value, ast.List) and not value.elts) or (isinstance(value, ast.Dict) and not value.keys)


def test_a_reader_can_hold_each_file_and_function():
    found = {str(path.relative_to(ROOT)): list(findings(path.read_text())) for path in SOURCES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_rules_find_what_they_are_for():
    assert list(findings("\n" * 401)) == ["401 lines"]
    assert list(findings("def f():\n" + "    x = 1\n" * 81)) == ["line 1: f has 82 lines"]
    assert list(findings("def f():\n    global a")) == ["line 2: global a"]
    changing = ["a = {}", "b: list[int] = []", "c = threading.local()", "d = dict()"]
    assert len(list(findings("\n".join(changing)))) == len(changing)
    assert not list(findings("A = {1: 2}\nB = [1]\nC = ()\nD = dict(x=1)"))


def test_a_reader_finds_a_file_among_fifteen():
    files = [path for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")) if path.name != "__init__.py"]
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in files)
    assert {folder: n for folder, n in folders.items() if n > FILES_OF_A_FOLDER} == {}


NAMES = {*SCHEDULES, "adam", "sgd", "muon"}
FORMATS = ROOT / "megapipe" / "convert"  # whose checkpoints have Adam's moments


def compared_names(source: str) -> Iterator[str]:
    """Names of schedules and optimizers that a comparison spells, or a question about how a text begins."""
    for node in ast.walk(ast.parse(source)):
        texts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            texts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "with" in node.func.attr:
            texts = node.args
        for text in texts:
            for part in text.elts if isinstance(text, ast.Tuple | ast.List | ast.Set) else [text]:
                if isinstance(part, ast.Constant) and str(part.value).lower() in NAMES:
                    yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("room", ["megapipe", "tools"])
def test_what_a_name_means_stands_in_the_catalogue_and_in_the_rule(room):
    files = [path for path in (ROOT / room).rglob("*.py") if FORMATS not in path.parents]
    spelled = {str(path.relative_to(ROOT)): list(compared_names(path.read_text())) for path in files}
    assert {name: found for name, found in spelled.items() if found} == {}


def test_a_name_in_a_comparison_is_found():
    spelled = ['name == "zb-auto"', '"interleaved" in name', 'name.startswith("dualpipe")', 'x in ("sgd", "own")']
    assert all(len(list(compared_names(source))) == 1 for source in spelled)
    assert not list(compared_names('build("1f1b", 4, 8)'))
