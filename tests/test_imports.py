"""Who may import whom: the arrows of the architecture, read from the source."""

import ast
import importlib
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.docs import wings

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megapipe"

# unit -> what it may import besides itself. Not transitive: models import config, and never see a schedule.
MAY_IMPORT = {
    "__main__": "commands",
    "doors": "",
    "errors": "",
    "compiled": "",
    "kernels": "compiled",
    "named": "errors",
    "notebook": "",  # which names what shows a value: see the test below
    "moved": "",
    "schedule": "compiled errors moved named notebook",
    "config": "errors schedule",
    "flags": "config doors errors schedule",
    "partition": "errors schedule",
    "distributed": "config errors",
    "tensor_parallel": "distributed errors kernels",
    "pipeline_parallel": "config distributed errors schedule tensor_parallel",
    "models": "config distributed errors kernels named partition tensor_parallel",
    "data": "config distributed errors",
    "optim": "config distributed errors kernels named tensor_parallel.fp8",
    "plan": "config errors notebook optim partition schedule",
    "checks": "config data errors models.transformer_engine optim partition plan schedule",
    "checkpoint": "config distributed errors optim",
    "training": "checkpoint checks config convert data distributed errors flags kernels models optim "
    "partition pipeline_parallel plan schedule tensor_parallel",
    "convert": "checkpoint checks config data distributed errors models optim partition schedule tensor_parallel",
    "testing": "checkpoint config data distributed errors models partition pipeline_parallel schedule tensor_parallel "
    "training",
    "library": "checks config data distributed errors plan schedule training",
    "commands": "checkpoint checks config convert data distributed doors errors flags library models named optim "
    "partition pipeline_parallel plan schedule tensor_parallel testing training",
}


def unit_of(module: str) -> str:
    """The most particular unit that a module, named without `megapipe.`, belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in MAY_IMPORT), parts[0])


@cache
def import_nodes(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a file. Half of this file's tests ask for those of the whole package."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(source: str) -> list[tuple[int, str]]:
    """(line, module) of each import of ours, also inside functions."""
    found = []
    for node in import_nodes(source):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            if node.module == "megapipe":
                found += [(node.lineno, alias.name) for alias in node.names]
            elif (node.module or "").startswith("megapipe."):
                found.append((node.lineno, str(node.module).removeprefix("megapipe.")))
        else:
            found += [
                (node.lineno, a.name.removeprefix("megapipe.")) for a in node.names if a.name.startswith("megapipe")
            ]
    return found


def imported(source: str) -> Iterator[tuple[int, str]]:
    """`imports`, and each name of a `from` as if it were a module: the graph knows which are."""
    for node in import_nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megapipe"):
            room = str(node.module).removeprefix("megapipe").lstrip(".")
            yield from ((node.lineno, f"{room}.{alias.name}".lstrip(".")) for alias in node.names)
    yield from imports(source)


def broken(module: str, source: str) -> list[str]:
    unit = unit_of(module)
    allowed = [unit, *MAY_IMPORT[unit].split()]
    return [
        f"{module.replace('.', '/')}.py:{line} imports {name}, which {unit} may not"
        for line, name in imports(source)
        # A unit of one file of a package, such as tensor_parallel.weight_grad, is allowed alone.
        if not any(name == a or name.startswith(f"{a}.") for a in allowed)
    ]


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


def dotted(path: Path) -> str:
    """Return the name of a module without `megapipe.`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def test_arrows_never_turn_back():
    named = {dotted(path): path for path in modules()}
    assert [module for module in named if unit_of(module) not in MAY_IMPORT] == [], "these have no place in MAY_IMPORT"
    assert [line for module, path in named.items() for line in broken(module, path.read_text())] == []


def test_two_arrows_alone_lead_into_a_room_and_not_to_all_of_it():
    assert [unit for units in MAY_IMPORT.values() for unit in units.split() if "." in unit] == [
        "tensor_parallel.fp8",  # weights that are gathered in eight bits are given to the products that read them so
        "models.transformer_engine",  # checks ask whether the library is there, and know nothing else of models
    ]


def test_no_files_import_each_other_in_a_circle():
    names = {dotted(path): path for path in modules()}
    graph = {
        name: {m for _, m in imported(path.read_text()) if m in names and m != name} for name, path in names.items()
    }
    TopologicalSorter(graph).prepare()  # a CycleError names the files


def test_the_rule_is_broken_on_the_line_that_breaks_it():
    source = "import os\n\ndef f():\n    from megapipe.schedule import build\n"
    assert broken("models.gpt", source) == ["models/gpt.py:4 imports schedule, which models may not"]
    assert broken("config", "import megapipe.flags.parse") == ["config.py:1 imports flags.parse, which config may not"]
    assert not broken("training.step", source)


def shown_by(path: Path) -> list[str]:
    """What shows values of a file in a notebook, as `notebook.shown_by` names it."""
    return re.findall(r'shown_by\("([\w.]+:\w+)"\)', path.read_text())


def test_what_shows_a_value_is_in_its_own_room():
    """Values name it and do not import it, so that no arrow turns back."""
    found = {str(path.relative_to(PACKAGE)): shown_by(path) for path in modules() if shown_by(path)}
    assert {path: [name.partition(".")[0] for name in names] for path, names in found.items()} == {
        "plan/plan.py": ["plan"],
        "schedule/passes.py": ["schedule"],
    }
    for module, _, function in (name.partition(":") for names in found.values() for name in names):
        assert callable(getattr(importlib.import_module(f"megapipe.{module}"), function))


FREE = ["megapipe", "megapipe.schedule", "megapipe.config", "megapipe.flags.parse", "megapipe.library.schedules"]


@pytest.mark.parametrize("module", FREE)
def test_what_needs_no_torch_works_without_it(module):
    code = f"import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", ["megapipe.plan", "megapipe.commands.plan.main"])
def test_a_search_of_plans_does_not_wait_for_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("folder", ["tools", "examples"])
def test_a_package_of_the_same_name_elsewhere_hides_none_of_ours(tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "__init__.py").touch()
    names = [f"{folder}.{path.stem}" for path in sorted((ROOT / folder).glob("*.py"))]
    find = f"import importlib.util; print([n for n in {names} if importlib.util.find_spec(n) is None])"
    # As scripts that insert the repository: it is first on the path, and what is installed comes behind.
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", find], check=True, cwd=ROOT, env=env, capture_output=True, text=True)
    assert said.stdout == "[]\n"


def test_only_one_module_touches_cuda():
    def touches(path):
        if "cuda" not in (source := path.read_text()):
            return False
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
        return any(ast.unparse(node).startswith("torch.cuda") for node in calls)

    of_runs = [path for path in modules() if PACKAGE / "commands" not in path.parents]  # which ask what is there
    assert [path.name for path in of_runs if touches(path)] == ["device.py"]


def spine() -> list[Path]:
    """The files that docs/architecture.md lists, in reading order."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## The spine")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [PACKAGE / room / f"{name}.py" for room, names in rows for name in re.findall("`([^`]+)`", names)]


def of_families(source: str) -> list[str]:
    """Modules of one family or shape, or of graphs, that are imported; the lists and the protocol are no family's."""
    found = [name for _, name in imports(source) if re.search(r"\.(families|shapes|graphs)\.", name)]
    return [name for name in found if not name.endswith(".families.family")]


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def size(source: str) -> int:
    """The tokens of code. Lines would count what helps the reader: comments, docstrings and short lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT for token in tokens)


def test_a_day_is_enough_for_the_spine():
    files = spine()
    assert len(set(files)) == len(files) <= 40
    assert sum(size(path.read_text()) for path in files) <= 53_000


def test_the_spine_knows_no_family_and_no_shape():
    known = {str(path.relative_to(PACKAGE)) for path in spine() if of_families(path.read_text())}
    assert known == set()
    assert of_families("from megapipe.schedule.families.offload.rules import MOVES") == [
        "schedule.families.offload.rules"
    ]


@pytest.mark.parametrize("floor", ["schedule", "pipeline_parallel", "plan"])
def test_families_know_each_other_by_nothing(floor):
    """A family is read alone."""
    folder = PACKAGE / floor / "families"
    for path in folder.rglob("*.py"):
        inside = path.relative_to(folder).with_suffix("").parts
        own = f"{floor}.families.{inside[0]}"
        others = [name for name in of_families(path.read_text()) if name.startswith(f"{floor}.families.")]
        assert inside[0] in ("__init__", "family") or all(f"{name}.".startswith(f"{own}.") for name in others), path


def test_recipes_alone_call_transforms_of_tables():
    """Whoever else calls one writes down the order of transforms a second time."""
    rooms = [PACKAGE / "schedule" / room for room in ("core", "generators", "families", "shapes", "search")]
    own = [PACKAGE / "schedule" / name for name in ("recipe.py", "ingredients.py")]
    found = set()
    for path in modules():
        if path in own or any(room in path.parents for room in rooms):
            continue
        for node in import_nodes(path.read_text()):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = (node.module or "").removeprefix("megapipe.schedule.")
            names = {alias.name for alias in node.names}
            if module.startswith("shapes.") and not module.endswith(".searched"):
                found |= names
            if module.startswith("families."):
                found |= {name for name in names if name.startswith("with_")}
            found |= names & {"solve", "sharded_within"}
    assert found == set()


# A wing of schedule/ imports no other wing: the core combines what two wings have, such as an order
# of passes and slices of the sequence.
def test_wings_of_schedule_meet_in_its_core():
    assert wings.between(wings.imports()) == {}


def test_an_import_between_wings_is_found_and_drawn(tmp_path):
    (tmp_path / "views").mkdir()
    (tmp_path / "views" / "lines.py").write_text(
        "def f():\n    from megapipe.schedule.families.offload.rules import MOVES\n"
    )
    (tmp_path / "verify.py").write_text("from megapipe.schedule.families import FAMILIES\n")
    found = wings.imports(tmp_path)
    assert found == {("views", "families"): [("views/lines.py:2", "families.offload.rules")]}
    assert wings.drawing(found).endswith(
        "views -> families\n  views/lines.py:2                     families.offload.rules"
    )
