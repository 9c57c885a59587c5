"""What ranks compare at start sees contents, not names: one test for each kind of content."""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from token_files import add_document

from megapipe.config import Config, DataConfig
from megapipe.data.indexed import IndexedWriter
from megapipe.flags.parse import parse
from megapipe.models.provider import find_provider, gpt_provider
from megapipe.plan import make_plan
from megapipe.schedule import build, to_json
from megapipe.training.guards.ranks import RANGE, RANGES, _tokens, facts
from tools.proofs.tables.members import meet, swapped

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3 --padded-vocab-size 128 "
    "--pipeline-model-parallel-size 2 --pipeline-schedule s.json --mock-data --data-path"
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    write([5, 7])
    Path("s.json").write_text(to_json(build("1f1b", 2, 2)).replace("1f1b", "mine"))
    Path("t.model").write_text("one")
    Path("model.py").write_text(
        "from megapipe.models.provider import gpt_provider as base\ndef provider(*a): return base(*a)\n"
    )
    data = DataConfig(data_path=("tokens",), tokenizer_model="t.model")
    return replace(parse(Config, [*FLAGS.split(), "tokens"]), world_size=2, data=data)


def write(lengths: list[int], token: int = 1) -> None:
    with IndexedWriter("tokens", np.uint16) as writer:
        for length in lengths:
            add_document(writer, [token] * length)


def now(config: Config) -> dict[str, str]:
    make_plan.cache_clear()  # another process would read the file
    return facts(config, make_plan(config), [gpt_provider, find_provider("model.py:provider")])


def changed(config: Config, before: dict[str, str]) -> list[str]:
    after = now(config)
    return [name for name in before if before[name] != after[name]]


def test_the_same_twice_is_the_same(config):
    assert changed(config, now(config)) == []


def test_each_content_is_seen(config):
    before = now(config)
    write([7, 5])
    assert changed(config, before) == ["tokens.idx (SHA-256)"]
    write([5, 8])
    drawn = "tokens.bin (SHA-256 of 64 ranges)"
    assert changed(config, before) == ["tokens.idx (SHA-256)", "tokens.bin (bytes)", drawn]
    write([5, 7], token=2)  # a pipeline would train inputs of one file against labels of another
    assert changed(config, before) == [drawn]
    write([5, 7])
    Path("s.json").write_text(to_json(build("gpipe", 2, 2)).replace("gpipe", "mine"))
    assert changed(config, before) == ["the schedule (SHA-256 of its table)"]
    Path("s.json").write_text(to_json(build("1f1b", 2, 2)).replace("1f1b", "mine"))
    Path("t.model").write_text("two")
    assert changed(config, before) == ["t.model of the tokenizer (SHA-256)"]
    Path("t.model").write_text("one")
    Path("c.json").write_text('{"f": 1}')
    costed = replace(config, parallel=replace(config.parallel, pipeline_costs="c.json"))
    timed = now(costed)
    Path("c.json").write_text('{"f": 2}')
    assert changed(costed, timed) == ["c.json of --pipeline-costs (SHA-256)"]
    with Path("model.py").open("a") as file:
        file.write("# another line\n")
    assert changed(config, before) == ["model.py (SHA-256)"]


@pytest.mark.parametrize("size", [1, RANGE, RANGE + 1, RANGES * RANGE, 3 * RANGES * RANGE + 7])
def test_a_digest_sees_every_byte_of_a_small_file_and_a_sixteenth_of_any(tmp_path, size):
    path, draw = tmp_path / "t.bin", np.random.default_rng(size)
    tokens = draw.integers(0, 256, size, np.uint8)

    def digest() -> str:
        tokens.tofile(path)
        return _tokens(str(tmp_path / "t"))

    before = digest()
    assert digest() == before
    span = 1 if size <= RANGES * RANGE else size // 16
    for begin in (0, size - span, int(draw.integers(size - span + 1))):
        tokens[begin : begin + span] ^= 1
        assert digest() != before
        tokens[begin : begin + span] ^= 1


def test_a_digest_reads_megabytes_of_terabytes(tmp_path, monkeypatch):
    with (tmp_path / "t.bin").open("wb") as file:
        file.truncate(1 << 42)
    read = [0]

    class Counted(io.FileIO):
        def read(self, size=-1):
            read[0] += size
            return super().read(size)

    monkeypatch.setattr("builtins.open", lambda path, mode, buffering: Counted(path, "r"))
    assert _tokens(str(tmp_path / "t"))
    assert read[0] == RANGES * RANGE


def test_another_checkout_of_megapipe_is_seen(tmp_path):
    """The function itself, loaded from a copy of the package in which one line differs."""
    import megapipe

    package = Path(str(megapipe.__file__)).parent

    def digest(root: Path) -> str:
        spec = importlib.util.spec_from_file_location("copied", root / "training" / "guards" / "ranks.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return str(module._package())

    copy = tmp_path / "megapipe"
    for path in package.rglob("*.py"):
        target = copy / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert digest(copy) == digest(package)
    with (copy / "optim" / "lr.py").open("a") as file:
        file.write("# an edit that nobody committed\n")
    assert digest(copy) != digest(package)


def test_a_group_whose_member_has_two_steps_of_a_row_swapped_is_refused_before_a_step():
    """Members meet in collectives by the order of the row alone. tools/proofs/tables/members.py has 300 of them."""
    dice = Random(0)
    drawn = filter(None, (swapped(dice) for _ in range(100)))
    for table, other in islice(drawn, 8):
        said = meet([table, other, table])
        assert len(said) == 3
        for problems in said:
            (problem,) = problems
            name = re.escape("the schedule (SHA-256 of its table) differs between ranks: ")
            assert re.fullmatch(name + r"\w{16} on rank 0; \w{16} on rank 1", problem)
    assert meet([table, table]) == [[], []]
