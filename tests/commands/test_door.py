"""`megapipe NAME`: the table of commands, their help, the scripts of a clone, what a wheel has beside modules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from programs import ROOT, run, run_ranks

import megapipe
from megapipe import doors
from megapipe.commands import main as shell
from megapipe.commands.start import completion, init
from megapipe.doors import DOORS, as_called
from megapipe.errors import ConfigError

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and errors of `megapipe WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["/bin/megapipe", *words])
    code = 0
    try:
        shell.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_help_names_every_command_and_imports_no_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; sys.argv = ['megapipe']\n"
    code += "from megapipe.commands.main import main; main()"
    said = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert re.findall(r"^  (\w[\w-]*) ", said, re.M) == [*DOORS]


@pytest.mark.parametrize("name", DOORS)
def test_every_command_has_a_help_that_names_it(name, monkeypatch, capsys):
    code, said, errors = called(monkeypatch, capsys, name, "--help")
    assert (code, errors) == (0, "")
    assert said.startswith(f"usage: megapipe {name}")


def test_a_command_that_is_not_there_is_told_with_the_nearest(monkeypatch, capsys):
    said = called(monkeypatch, capsys, "shedules")
    assert said == (2, "", "megapipe: error: unknown command shedules; did you mean schedules?\n")
    assert (
        "emulate. Schedules on emulated devices are run in a clone: python" in called(monkeypatch, capsys, "emulate")[2]
    )
    assert (
        called(monkeypatch, capsys, "zzz")[2] == "megapipe: error: unknown command zzz. megapipe --help lists them.\n"
    )
    assert "\n  unknown flag --steps\n" in called(monkeypatch, capsys, "plan", "--steps")[2]


def test_the_scripts_of_a_clone_are_the_same_commands_under_their_own_names():
    scripts = {path.stem: path.read_text() for path in (ROOT / "tools").glob("[!_]*.py")}
    assert {door.script for door in DOORS.values()} - {None} == scripts.keys()
    for name, door in DOORS.items():
        assert door.script is None or f'    door("{name}")\n' in scripts[door.script]
    done = run(["tools/train_tokenizer.py", "--vocab-size", "9"])
    assert done.returncode == 2
    assert done.stderr.startswith("train_tokenizer.py: error: 3 problems\n  --input is missing")


def test_messages_name_the_command_that_the_reader_has(monkeypatch):
    text = "Write it again with megapipe preprocess; megapipe check tells more. megapipe pretrain --nproc 2 --lr 1"
    monkeypatch.setattr(sys, "argv", ["tools/plan.py"])
    assert as_called(text) == (
        "Write it again with python tools/preprocess_data.py; python -m megapipe check tells more. "
        "torchrun --nproc-per-node 2 pretrain_gpt.py --lr 1"
    )
    monkeypatch.setattr(sys, "argv", ["megapipe plan"])
    assert as_called(text) == text
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(doors, "ROOT", Path("/site-packages"))
    assert as_called(text) == text


def test_the_package_names_no_script_of_a_clone():
    """A wheel has none; `as_called` puts them where they are."""
    sources = [path for path in (ROOT / "megapipe").rglob("*") if path.suffix in (".py", ".html")]
    assert [path.name for path in sources if re.search(r"tools/\w+\.py", path.read_text())] == ["doors.py"]


def test_pretrain_starts_processes_that_train(tmp_path, monkeypatch, capsys):
    flags = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --lr 1e-3"
    )
    flags += " --mock-data --split 1,0,99 --tokenizer-type NullTokenizer --vocab-size 15 --num-workers 0"
    flags += " --micro-batch-size 1"
    flags += " --global-batch-size 2 --train-iters 1 --eval-iters 0 --log-interval 1 --pipeline-model-parallel-size 2"
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: became.append(words) or sys.exit(0))
    started = (0, "", "starting 2 processes\n")
    assert called(monkeypatch, capsys, "pretrain", "--nproc", "2", *flags.split()) == started
    (words,) = became
    assert words[:6] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "iteration        1/       1 |" in run_ranks(2, words[6:])
    golden = (
        f"--load {ROOT}/tests/golden/format-1-first --use-checkpoint-args --mock-data --micro-batch-size 1 --lr 1e-3"
    )
    sizes = "--global-batch-size 2 --train-iters 1 --seq-length 8 --tokenizer-type NullTokenizer --vocab-size 15"
    assert called(monkeypatch, capsys, "pretrain", "--nproc", "2", *f"{golden} {sizes}".split())[0] == 0
    code, _, errors = called(monkeypatch, capsys, "pretrain", "--nproc", "3", *flags.split())
    assert code == 2, "told by one process, before any other is started"
    assert errors.startswith("megapipe pretrain: error: 3 processes")


def test_init_writes_a_program_that_trains_with_the_loss_and_model_beside_it(tmp_path):
    init.main([str(tmp_path / "my")])
    launch = (tmp_path / "my" / "pretrain.sh").read_text()
    line = launch[launch.index("FLAGS=(") : launch.index('"${TOKENS')]
    line = line.replace("FLAGS=(", "pretrain_gpt.py ").replace('"${CPU[@]}"', "")
    tokens = (
        "--mock-data --split 1,0,99 --tokenizer-type NullTokenizer --vocab-size 255 --hidden-size 16 --seq-length 16"
    )
    tokens += " --num-workers 0 --global-batch-size 8 --train-iters 5 --eval-iters 0 --lr-warmup-iters 1"
    tokens += " --pipeline-schedule zb-v --num-attention-heads 2"
    loss = tmp_path / "my" / "forward_step.py"
    loss.write_text(loss.read_text().replace('"lm loss"', '"my loss"'))
    said = run_ranks(2, [*line.split(), *tokens.split()], tmp_path / "my")
    assert re.search(r"iteration        5/       5 \|.* my loss: 5\.", said)
    with pytest.raises(ConfigError, match=r"my already has README.md, .*\. Name a new folder: megapipe init .*my-2"):
        init.main([str(tmp_path / "my")])


def test_a_wheel_has_every_file_that_is_no_module():
    packed = PROJECT["tool"]["setuptools"]["package-data"]
    kept = {f"{package.replace('.', '/')}/{name}" for package, names in packed.items() for name in names}
    files = [path.relative_to(ROOT) for path in (ROOT / "megapipe").rglob("*") if path.is_file()]
    of_tools = "ruff.toml"  # the style of a room; nothing reads it at run time
    others = [path for path in files if path.suffix not in (".py", ".pyc") and path.name != of_tools]
    assert [str(path) for path in others if not any(path.match(name) for name in kept)] == []
    assert PROJECT["project"]["scripts"] == {"megapipe": "megapipe.commands.main:main"}


def test_files_that_init_copies_are_the_ones_of_the_project():
    """A copy would go its own way; a script that writes through a link makes one."""
    files = ROOT / "megapipe" / "commands" / "start" / "files"
    originals = ("megapipe/training/forward_step.py", "examples/own_provider.py", "pretrain_gpt.py")
    linked = {path.resolve().relative_to(ROOT).as_posix() for path in files.glob("*.py")}
    assert linked == set(originals)


def test_bash_completes_commands_and_flags(tmp_path, capsys):
    completion.main(["bash"])
    (tmp_path / "megapipe").write_text(f'#!/bin/sh\nexec {sys.executable} -m megapipe "$@"\n')
    (tmp_path / "megapipe").chmod(0o755)
    ask = 'COMP_WORDS=(megapipe {}); COMP_CWORD={}; _megapipe; echo "${{COMPREPLY[@]}}"\n'
    script = capsys.readouterr().out + ask.format("re", 1) + ask.format("traces --o", 2)
    command = ["bash", "-c", f"PATH={tmp_path}:$PATH; {script}"]
    said = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert said == "rehearse\n--output\n"


def test_the_package_says_its_version_and_what_is_in_it():
    said = subprocess.run([sys.executable, "-m", "megapipe", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"megapipe {megapipe.__version__}\n"
    assert "megapipe.schedule" in megapipe.__doc__
    with pytest.raises(AttributeError, match="a part of it is imported by name"):
        _ = megapipe.biuld


def test_a_mistake_in_a_new_folder_is_said_in_a_line_by_its_script(tmp_path):
    """It was the last of 25 lines of torchrun's report."""
    init.main([str(tmp_path / "my")])
    model = tmp_path / "my" / "model.py"
    model.write_text(model.read_text().replace("span: LayerSpan, tp: Axis)", "span: LayerSpan)"))
    here = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "pretrain.sh"], cwd=tmp_path / "my", env=os.environ | here, capture_output=True, text=True
    )
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert line.startswith("pretrain_gpt.py: error: --model-provider model.py:provider takes (config: ")
