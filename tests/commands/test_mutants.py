"""The mutants that are drawn: what a line becomes, and what is left alone because it does nothing."""

from __future__ import annotations

import ast

import pytest

from tools.proofs.mutants import __main__ as judging
from tools.proofs.mutants import draw as mutants

SOURCE = '''\
"""A docstring of 1 word."""
from __future__ import annotations
Names = dict[str, int]

@cache(size=16)
def f(a: int = 1, *, b: str = "word") -> bool:
    """Of 2 words."""
    assert a < 3, "cannot be"
    a.x = -a
    for pair in zip(a, b, strict=True):
        a += 1.5
    if b and a is not None:
        raise ValueError(f"{a + 1} of {b!r} in a sentence")
    return not (a <= 2 or b in ("x y",)) if f(a) else [n for n in a if n[0]]
'''
BECOMES = """
def f(a: int = 2, *, b: str = "word") -> bool:
def f(a: int = 1, *, b: str = "not_word") -> bool:
    pass
    a.x = a
        pass
        a += 2.5
    if b or a is not None:
    if b and a is None:
        pass
        raise ValueError(f"{a - 1} of {b!r} in a sentence")
        raise ValueError(f"{a + 2} of {b!r} in a sentence")
    pass
    return (a <= 2 or b in ("x y",)) if f(a) else [n for n in a if n[0]]
    return not (a < 2 or b in ("x y",)) if f(a) else [n for n in a if n[0]]
    return not (a > 2 or b in ("x y",)) if f(a) else [n for n in a if n[0]]
    return not (a <= 3 or b in ("x y",)) if f(a) else [n for n in a if n[0]]
    return not (a <= 2 and b in ("x y",)) if f(a) else [n for n in a if n[0]]
    return not (a <= 2 or b not in ("x y",)) if f(a) else [n for n in a if n[0]]
    return not (a <= 2 or b in ("x y",)) if not (f(a)) else [n for n in a if n[0]]
    return not (a <= 2 or b in ("x y",)) if f(a) else [n for n in a if not (n[0])]
    return not (a <= 2 or b in ("x y",)) if f(a) else [n for n in a if n[1]]
"""


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    (tmp_path / "megapipe" / "room").mkdir(parents=True)
    (tmp_path / "megapipe" / "room" / "file.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for module in (mutants, judging):
        monkeypatch.setattr(module, "ROOMS", {"room": ("room: file", "room: file")})
    return mutants.draw(["room"], 0)


def test_every_operator_constant_and_condition_has_its_mutants(drawn):
    assert sorted(m.after for m in drawn) == sorted(BECOMES.strip("\n").splitlines())
    for m in drawn:
        lines = SOURCE.splitlines()
        assert lines[m.line - 1] == m.before
        lines[m.line - 1] = m.after
        assert ast.dump(ast.parse("\n".join(lines))) != ast.dump(ast.parse(SOURCE))


def test_a_seed_draws_the_same_mutants_in_the_same_order(drawn):
    assert mutants.draw(["room"], 0) == drawn
    assert mutants.draw(["room"], 1) != drawn


def test_survivors_are_shown_with_their_lines_and_counted_by_room(drawn):
    judged = [drawn[n]._asdict() | {"result": result} for n, result in enumerate(["killed", "survived", "hangs"])]
    text = judging.report(judged)
    assert text.startswith(
        f"{drawn[1].path}:{drawn[1].line}\n- {drawn[1].before.strip()}\n+ {drawn[1].after.strip()}\n"
    )
    assert text.endswith("| room | 3 | 2 | 1 | 1 |\n| all | 3 | 2 | 1 | 1 |")
