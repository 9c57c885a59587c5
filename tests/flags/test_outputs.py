"""Where commands write: what can be no file or folder is said before the work, and any name can be printed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.commands import compare, convert, preprocess, schedules, tokenizer, traces
from megapipe.commands.chaos import main as chaos
from megapipe.commands.gpu import main as gpu
from megapipe.commands.plan import main as plan
from megapipe.commands.start import corpus, init
from megapipe.flags import stop
from megapipe.schedule import build
from megapipe.schedule.costs import Costs
from megapipe.schedule.text import to_json
from megapipe.schedule.views.compare import Row, advise
from megapipe.schedule.views.compare import compare as rows_of
from megapipe.training.report.stdout import stdout_may_break
from tools.bench import schedules as emulated

SIZE = "--pp 2 --microbatches 4"
FILES = {
    "schedules.py --json": (schedules.main, f"show 1f1b {SIZE} --json"),
    "schedules.py --csv": (schedules.main, f"show 1f1b {SIZE} --csv"),
    "schedules.py --svg": (schedules.main, f"show 1f1b {SIZE} --svg"),
    "schedules.py --perfetto": (schedules.main, f"show 1f1b {SIZE} --perfetto"),
    "schedules.py compare --csv": (schedules.main, f"compare {SIZE} --csv"),
    "schedules.py compare --svg": (schedules.main, f"compare {SIZE} --svg"),
    "plan.py": (plan.main, "--save-costs"),
    "merge_traces.py --pdf": (traces.main, "--traces nowhere --pdf"),
    "merge_traces.py": (traces.main, "--traces nowhere --output"),
    "train_tokenizer.py": (tokenizer.main, "--input nowhere --output"),
    "corpus": (corpus.main, "--output"),
    "bench/schedules.py": (emulated.main, "--json"),
}
FOLDERS = {
    "schedules.py site": (schedules.main, "site"),
    "megapipe init": (init.main, "init"),
    "compare_runs.py": (compare.main, "--out"),
    "gpu_check.py": (gpu.main, "--device cpu --output"),
    "preprocess_data.py": (preprocess.main, "--input nowhere --output-prefix"),
    "convert_checkpoint.py --save": (convert.main, "--from-huggingface . --save"),
    "convert_checkpoint.py --to-huggingface": (convert.main, "--load . --to-huggingface"),
    "convert_checkpoint.py --to-megatron": (convert.main, "--load . --to-megatron"),
    "chaos.py": (chaos.main, "-- pretrain_gpt.py --save-interval 1 ## --folder"),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command says that is refused."""

    def run(main: Callable[[list[str]], int | None], words: str, path: object) -> str:
        behind, _, line = words.rpartition(" ## ")
        argv = [*line.removeprefix("init").split(), str(path), *behind.split()]
        monkeypatch.setattr(sys, "argv", ["x.py", *argv])
        with pytest.raises(SystemExit) as end:
            stop.run(main)
        assert end.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("command", [*FILES, *FOLDERS])
def test_no_output_lies_below_a_file(command: str, said: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    main, words = (FILES | FOLDERS)[command]
    text = said(main, words, file / "x")
    assert f"{words.split()[-1]} {file}/x" in text
    assert f": {file} is a file, not a folder. Give another name." in text


@pytest.mark.parametrize("command", FILES)
def test_a_folder_is_no_file_to_write(command: str, said: Callable[..., str], tmp_path: Path) -> None:
    """`schedules.py show ... --svg ''` said "Is a directory: '.'", and of no flag."""
    main, words = FILES[command]
    flag = words.split()[-1]
    assert f"{flag} {tmp_path} is a folder. Name a file in it: {flag} {tmp_path}/NAME" in said(main, words, tmp_path)
    assert flag in said(main, words, "")


def test_a_name_that_is_no_text_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r"""JSON can say "\ud83d", and a file's name can be bytes of another encoding."""
    table, picture = tmp_path / "s.json", tmp_path / "s.svg"
    table.write_text(to_json(build("1f1b", 2, 4)).replace("1f1b", r"\ud83d\u00e9"))
    for words in ("show", str(table), "--svg", str(picture)), ("compare", *SIZE.split(), "--only", "1f1b", str(table)):
        monkeypatch.setattr(sys, "argv", ["schedules.py", *words])
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown := io.BytesIO(), "ascii"))
        stop.run(schedules.main)
        sys.stdout.flush()
        assert b"s.json" in shown.getvalue() or rb"\ud83d\xe9: makespan" in shown.getvalue()
    assert rb"\ud83d" in picture.read_bytes()


@pytest.mark.parametrize("through", [stop.run, lambda main: stdout_may_break()(main)([])])
def test_any_name_can_be_printed(through: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown := io.BytesIO(), "utf-8"))
    through(lambda argv: print("data\udcff", flush=True))
    assert shown.getvalue() == b"data\\udcff\n"


@pytest.mark.parametrize("costs", [Costs(0, 0, 0), Costs(mem_b=0, mem_w=1), Costs(1, 0, 0, mem_b=0, mem_w=0)])
def test_costs_of_nothing_divide_nothing(costs: Costs) -> None:
    rows = rows_of(4, 8, costs, names=["zb-h1", "zb-v", "dualpipe-v"])
    text = " ".join(advise([row for row in rows if isinstance(row, Row)], 4, 8, costs))
    assert text.startswith(("Nothing takes time by these costs", "Take ", "Stay with "))
