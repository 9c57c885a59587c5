"""Plain English in docstrings, comments and messages of the package.

A reader knows PyTorch and pipeline parallelism, and none of this project's own words.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# But for the page of help(), whose columns are no sentences.
FILES = sorted({*(ROOT / "megapipe").rglob("*.py")} - {ROOT / "megapipe" / "__init__.py"})
# A phrase that may not stand -> what to write instead.
WORDS = {
    r"beside": "next to, in addition to, besides",
    r"behind": "after",
    r"so (many|much)\b(?! (that|as))": "n, the number of",
    r"told|tells? of": "reported, given",
    r"of (which|whom|whose)": "a new sentence with its noun",
    r"those (that|of|who|which)": "the noun",
    r"that of|that is there|that are there|that is here": "the noun",
    r"what is|what are|what was": "name the thing",
    r"as of": "at, for",
    r"alike": "equal, the same",
    r"whole for a while": "gathered",
    r"shares of weights": "shards",
    r"the bits of": "bitwise equal to",
    r"for ?ever": "deadlocks, for the whole run",
    r"lent|lends?|lender": "shared, tied, borrowed: say what happens",
    r"lanes?": "stream, message channel",
    r"sight": "mask, what a query attends to",
    r"patience": "timeout",
    r"(?<!far )apart(?! from)": "separately",
    r"heed(s|ed)?": "respect, follow",
    r"taste": "preference",
    r"of it all|by them both": "the noun",
    r"whether so": "say what",
    r"no number": "not finite, NaN",
    r"comes? home": "return to the owning rank",
}
FORBIDDEN = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in WORDS.items()]
# A first line that begins so is no whole statement.
RIDDLES = re.compile(r"(Those|That|Of|What|How|When|For|Its|Theirs|The one|It|They|As)\b")
MOST_WORDS = 25


def prose(source: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring, block of comments, and string of three words or more."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.lineno, node.value
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or "type: ignore" in token.string or "noqa" in token.string:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield start, "\n".join(block)
            block = []
        if not block:
            start = line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield start, "\n".join(block)


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of modules, classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in nodes:
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. A paragraph, or an argument with its colon, begins a new one."""
    text = re.sub(r"\n\s*\n|\n\s*(?=[\w, ]{1,40}: )", ". ", text)
    yield from re.split(r"[.:;!?](?=\s)", " ".join(text.split()))


def findings(source: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(source)))
    for line, text in prose(source, nodes):
        for pattern, instead in FORBIDDEN:
            if found := pattern.search(text):
                yield f"line {line}: {found.group()!r}; write {instead}: {text[:60]!r}"
    for line, text in docstrings(nodes):
        if RIDDLES.match(text):
            yield f"line {line}: not a whole statement: {text[:60]!r}"
        for sentence in sentences(text):
            without_shapes = re.sub(r"\[[^]]*\]", "", sentence)
            if (words := len(re.findall(r"[A-Za-z][\w'-]*", without_shapes))) > MOST_WORDS:
                yield f"line {line}: {words} words: {sentence[:60]!r}"


def test_the_package_uses_the_words_of_the_field():
    found = {str(path): list(findings(path.read_text())) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_rules_find_what_they_are_for():
    assert len(list(findings('"""Of a rank, beside others."""'))) == 2
    assert len(list(findings("x = 1  # waits for ever"))) == 1
    assert len(list(findings('raise ValueError(f"{n} ranks lie behind it")'))) == 1
    assert len(list(findings('"""' + "word " * 26 + '."""'))) == 1
    assert not list(findings('"""Return the bubble.\n\nArgs:\n    x: [s, b].\n"""\nx = "so many"  # so that\n'))
