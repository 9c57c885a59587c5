"""The docs lead somewhere: each relative link and anchor exists, each command line is one that its program takes."""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megapipe.config import Config
from megapipe.doors import DOORS
from megapipe.errors import ConfigError
from megapipe.flags import parse
from megapipe.schedule import SCHEDULES
from tools.docs import hooks

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PROGRAM = re.compile(
    r"(?:.*\s)?(?:python3?|torchrun)\s.*?((?:tools|scripts)/[\w/]+\.py|pretrain_gpt\.py|megapipe \w[\w-]*)\b\s?(.*)"
    r"|(megapipe \w[\w-]*)\s?(.*)"
)


class Parsed(Exception):
    """A program has read its command line; what it would do then is left out."""


def slug(heading: str) -> str:
    """An anchor, as GitHub and the site make it of a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower()).replace(" ", "-")


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    return {slug(line) for line in re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.M)}


def dead_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"\w+://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(page):
    assert list(dead_links(page)) == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.md").write_text(
        "# A `b`: c\n[1](#a-b-c) [2](a.md#a-b-c) [3](x.md) [4](a.md#d)\n```\n[5](y.md)\n```\n"
    )
    assert list(dead_links(tmp_path / "a.md")) == ["x.md: no such file", "a.md#d: no such heading"]


def typed(fence: str) -> Iterator[str]:
    """The lines of a fence that somebody types: the ones after a $, or all if no line has one."""
    lines = fence.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    yield from prompted or lines


def command_lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """(program, its words) of every command in a fence or in `code`; what only stands for something is left out."""
    fences = [code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if kind in ("", "bash")]
    # `megapipe plan` alone only names the command.
    inline = re.findall(r"`((?:python|torchrun|megapipe) [^`]+)`", prose(text))
    inline = [" ".join(code.split()) for code in inline]
    inline = [code for code in inline if not re.fullmatch(r"megapipe \w[\w-]*", code)]
    # A fence of flags alone is the file that commands of this page read by $(cat FILE).
    flags = next((" ".join(fence.split()) for fence in fences if fence.startswith("--")), "")
    fences = [re.sub(r"\$\(cat [\w.]+\)", flags, fence) for fence in fences]
    for line in [*(line for fence in fences for line in typed(fence)), *inline]:
        if (found := PROGRAM.match(line)) and "NAME" not in line:
            # Behind three blanks stands what it is for; [...] may be left out; `...` and <flags> are yours, N a number.
            words = re.split(r"\s{3,}(?=\w)|\s+[|>#&;]|\s\(", found[2] or found[4] or "")[0]
            words = re.sub(r"<[^>]+>|\[[^]]*\]|(--[\w-]+ )?(?<!\S)\.\.\.(?!\S)", "", words)
            yield found[1] or found[3], [re.sub(r"^N$", "8", word) for word in shlex.split(words.rstrip(")"))]


def main_of(program: str) -> tuple[ModuleType, Callable[..., object]]:
    """The module that reads a program's flags, and its function. Raises: Parsed if the program has none."""
    door = (
        re.search(r"^    door\(\"([\w-]+)\"\)$", (ROOT / program).read_text("utf-8"), re.M) if "/" in program else None
    )
    named = door[1] if door else program.removeprefix("megapipe ")
    if named in DOORS:
        name, _, function = f"megapipe.commands.{DOORS[named].module}".partition(":")
    else:
        name, function = program.removesuffix(".py").replace("/", "."), ""
    if not re.search(
        r"\b(parse|read)(_among|_args)?\(", ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8")
    ):
        raise Parsed
    module = importlib.import_module(name)
    return module, getattr(module, function or "main")


def read(program: str, words: list[str]) -> None:
    """Give a program its command line, up to where it has read it. Raises: Parsed, or what it says is wrong."""
    if program == "pretrain_gpt.py":
        parse.parse(Config, words)
        raise Parsed
    module, main = main_of(program)

    def reads(real):
        def call(*given, **named):
            found = real(*given, **named)
            # `read` and `read_among` return problems, which `parse` raises.
            halves = found if isinstance(found, tuple) else (found,)
            if problems := [line for half in halves for line in getattr(half, "problems", ())]:
                raise ConfigError(problems)
            raise Parsed

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in ("parse", "parse_among", "read", "read_among"):
            # Another function may have the short name `read`.
            if getattr(module, name, None) is getattr(parse, name):
                patched.setattr(module, name, reads(getattr(module, name)))
        patched.setattr(argparse.ArgumentParser, "parse_args", reads(argparse.ArgumentParser.parse_args))
        patched.setattr(sys, "argv", [program, *words])
        main(words) if inspect.signature(main).parameters else main()


COMMANDS = sorted(
    {
        (program, *words)
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for program, words in command_lines(page.read_text("utf-8"))
    }
)


def test_every_command_of_the_docs_is_one_that_its_program_takes():
    assert len(COMMANDS) > 60
    wrong = []
    for program, *words in COMMANDS:
        try:
            read(program, words)
        except Parsed:
            continue
        except (Exception, SystemExit) as error:
            wrong.append(f"{program} {shlex.join(words)}: {error!r}")
        else:
            wrong.append(f"{program} {shlex.join(words)}: ran without reading its flags")
    assert wrong == []


def test_a_schedules_page_of_the_site_has_picture_paper_and_numbers():
    text = hooks.page("zb-v")
    assert "![zb-v](../schedules/zb-v.svg)" in text
    assert "Qi et al. 2023, sec. 6" in text
    assert "| 8 | 16 | 10:11:8 | 502.5 | 667 | 21 | 4.3% | 8 |" in text  # as the table of docs/schedules.md
    docs = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert [name for name in SCHEDULES if f"\n### {name}\n" not in docs] == []


def test_the_sites_first_page_links_within_docs_and_to_files_beside_them():
    text = hooks.readme()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_page_stands_in_the_sites_table_of_contents():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    manual = {name for name in pages if not name.startswith("log/")}
    assert set(re.findall(r"[\w/]+\.md", nav)) == manual | {"index.md", "api.md", "flags.md"}


def test_the_menu_names_what_a_reader_looks_for():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    looked_for = {
        "First run": "first_run.md",
        "Schedules, with pictures": "schedules.md",
        "From Megatron-LM": "megatron.md",
        "Train experts": "experts.md",
        "Long sequences": "long_sequences.md",
        "Fit in memory": "memory.md",
        "Run on a cluster": "cluster.md",
        "Watch and profile": "watch.md",
        "Survive faults": "troubleshooting.md",
        "Extend": "extending.md",
        "Use as a library": "",  # its first page
    }
    for title, page in looked_for.items():
        assert re.search(rf"^ +- {title}: \[?{page}", nav, re.M), title


def test_the_api_page_has_what_a_model_and_a_data_set_need_and_each_name_is_there():
    """An own data set needs the fields of Datasets, which stood in no page."""
    names = re.findall(r"^::: (\S+)$", hooks.api(), re.M)
    for name in names:
        assert pkgutil.resolve_name(name)
    assert {"Datasets", "Batch", "ModelConfig", "LayerSpan"} <= {name.rpartition(".")[2] for name in names}


def test_a_docstring_of_the_api_wraps_its_errors_as_plain_text():
    """The site takes indented lines below `Raises: ...` for a list of exceptions, and `--strict` refuses it."""
    wrapped = {}
    for name in re.findall(r"^::: (\S+)$", hooks.api(), re.M):
        found = pkgutil.resolve_name(name)
        for docstring in documented(found):
            if match := re.search(r"^( *)Raises: .+\n\1 +\S.*", docstring, re.M):
                wrapped[name] = match[0]
    assert wrapped == {}


def documented(found: object) -> Iterator[str]:
    """The docstrings of a module, class or function, and of what it defines."""
    yield inspect.getdoc(found) or ""
    home = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", "")
    for member in vars(found).values() if hasattr(found, "__dict__") else ():
        if getattr(member, "__module__", None) == home and (inspect.isclass(member) or inspect.isroutine(member)):
            yield from documented(member)
