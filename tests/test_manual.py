"""The manual is short and plain: its size, the length of its sentences, and the words that it avoids.

The manual is README and docs, without docs/log. `python -m tests.test_manual` prints the numbers of every page.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from megapipe.commands import schedules
from megapipe.commands.plan import main as plan
from megapipe.errors import UserError
from megapipe.flags.table import table
from tests.test_words import FORBIDDEN

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOST_BYTES = 200_000
MEAN_WORDS = 16
MOST_WORDS = 30


def manual() -> list[Path]:
    """Return the pages of the manual."""
    pages = [path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] != "log"]
    return [ROOT / "README.md", *sorted(pages)]


def paragraphs(text: str) -> Iterator[tuple[bool, str]]:
    """Yield (is running text, its words) of each paragraph, item of a list, heading, and cell of a table.

    Code in a fence or an indented block is left out. `code` within a sentence is one word.
    """
    text = re.sub(r"^(```).*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)", text):
        line = block.strip()
        if not line or block.startswith("    "):
            continue
        if line.startswith(("|", "#")):
            for cell in re.split(r"\s*\|\s*", line.strip("|# ")):
                yield False, cell
        else:
            yield True, re.sub(r"^(?:[-*]|\d+\.) ", "", line)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph. A colon or a semicolon does not end one."""
    text = re.sub(r"\b(al|sec|vs|etc|e\.g|i\.e)\.", r"\1", " ".join(text.split()))
    yield from filter(None, re.split(r"[.!?](?=[)\"*]*(?:\s|$))", text))


def words(sentence: str) -> int:
    """Count the words of a sentence. A formula without blanks is one."""
    return len(re.findall(r"\S*\w\S*", sentence))


def lengths(text: str) -> tuple[list[int], list[tuple[int, str]]]:
    """Return the words of each sentence of running text, and the sentences that are too long, cells included."""
    running, long = [], []
    for is_running, paragraph in paragraphs(text):
        for sentence in sentences(paragraph):
            count = words(sentence)
            if is_running:
                running.append(count)
            if count > MOST_WORDS:
                long.append((count, sentence.strip()[:70]))
    return running, long


def avoided(text: str) -> list[str]:
    """Return the phrases of a page that test_words forbids, each with its surroundings."""
    found = []
    for _, paragraph in paragraphs(text):
        plain = " ".join(paragraph.split())
        for pattern, instead in FORBIDDEN:
            for match in pattern.finditer(plain):
                around = plain[max(0, match.start() - 20) : match.end() + 20]
                found.append(f"{around!r}; write {instead}")
    return found


def test_the_manual_is_at_most_so_large():
    assert sum(len(page.read_bytes()) for page in manual()) <= MOST_BYTES


@pytest.mark.parametrize("page", manual(), ids=lambda page: page.name)
def test_a_page_has_short_sentences_in_the_words_of_the_field(page):
    text = page.read_text(encoding="utf-8")
    running, long = lengths(text)
    assert long == []
    assert mean(running) <= MEAN_WORDS
    assert avoided(text) == []


# Flags of pip, Docker and Slurm.
OF_OTHERS = {"--index-url", "--shm-size", "--gpus-per-task"}


@pytest.mark.parametrize("page", manual(), ids=lambda page: page.name)
def test_a_flag_of_the_manual_is_one_that_a_program_takes(page):
    sources = [path for folder in ("megapipe", "tools", "scripts") for path in (ROOT / folder).rglob("*.[ps][yh]")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    known = set(re.findall(r"--[\w-]+", table() + text)) | OF_OTHERS
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text(encoding="utf-8")))
    # A field of a dataclass is a flag, and so is a name that a program puts after the hyphens itself.
    names = {flag: flag[2:].replace("-", "_") for flag in named - known}
    unknown = {flag for flag, name in names.items() if not re.search(rf"\b{name}: |[\"']{name}[\"']", text)}
    assert unknown == set()


def printed() -> dict[str, str]:
    """Return the commands of the manual that only compute, and what their pages say that they print.

    test_tutorial.py runs the commands of the tutorial. A search may use a minute, and its table has a test of its own.
    """
    pages = [page.read_text(encoding="utf-8") for page in manual() if page.name != "tutorial.md"]
    command = r"megapipe (?:plan|schedules show (?!zb-auto))(?:.*\\\n)*.*"
    return {
        " ".join(found[1].replace("\\\n", " ").split()): found[2]
        for page in pages
        for found in re.finditer(rf"^```\n\$ ({command})\n((?s:.*?))^```$", page, re.M)
    }


@pytest.mark.parametrize("command", printed())
def test_a_command_of_the_manual_prints_what_its_page_says(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    _, name, *words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [f"megapipe {name}", *words])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            schedules.main(words) if name == "schedules" else plan.main(words)
        except UserError as error:
            said.write(f"megapipe {name}: error: {error}")
    expected = [line.rstrip() for line in printed()[command].splitlines()]
    assert [line.rstrip() for line in said.getvalue().splitlines()] == expected


def test_sentences_are_found_and_counted():
    text = "# A b\n\nOne two `x y z`, see [four](five.md). Li et al. 2021,\nsec. 3: p ranks.\n\n- a (b)! c\n\n"
    text += "```\nno\n```\n"
    assert lengths(text)[0] == [5, 8, 2, 1]
    assert lengths("| " + "word " * 31 + "|\n")[1] != []
    page = "a\nrank\nbehind\nit, `behind` [it](behind.md)"
    assert avoided(page) == ["'a rank behind it, code it'; write after"]


if __name__ == "__main__":
    for path in manual():
        content = path.read_text(encoding="utf-8")
        average, too_long = lengths(content)
        print(
            f"{path.relative_to(ROOT)!s:36} {len(content.encode()):6} bytes  mean {mean(average):5.1f}  "
            f"{len(too_long):3} above {MOST_WORDS}  {len(avoided(content)):3} avoided words"
        )
    print(sum(len(path.read_bytes()) for path in manual()), "bytes")
