"""What ranks compare at start sees contents, not names: one test for each kind of content."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megapipe.config import Config, DataConfig
from megapipe.data.indexed import IndexedWriter
from megapipe.flags.parse import parse
from megapipe.models.provider import find_provider, gpt_provider
from megapipe.plan import make_plan
from megapipe.schedule import build, to_json
from megapipe.training.same import facts

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
            writer.add_document([token] * length)


def now(config: Config) -> dict[str, str]:
    make_plan.cache_clear()  # another process would read the file
    from megapipe.plan.split import _build

    _build.cache_clear()
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
    assert changed(config, before) == ["tokens.idx (SHA-256)", "tokens.bin (bytes)"]
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


def test_another_checkout_of_megapipe_is_seen(tmp_path):
    """The function itself, loaded from a copy of the package in which one line differs."""
    import megapipe

    package = Path(str(megapipe.__file__)).parent

    def digest(root: Path) -> str:
        spec = importlib.util.spec_from_file_location("copied", root / "training" / "same.py")
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
