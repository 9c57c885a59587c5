"""A run that is killed, held up, short of disk and damaged at random heals itself, to the bits of an unbroken one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from programs import ROOT, Program

from megapipe.commands.chaos import broken_run
from megapipe.commands.chaos import main as chaos
from megapipe.data.indexed import IndexedWriter
from megapipe.errors import ConfigError

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --split 1,0,0 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --global-batch-size 2 --num-workers 0 "
    "--train-iters 1000 --lr 1e-3 --eval-iters 0 --save-interval 10 --save-keep-last 3 --save-failure continue"
)


class Forked(Program):
    """As a Popen of `python SCRIPT ARGUMENTS...`, without the seconds of its imports; what it prints goes to a pipe."""

    def __init__(self, command, **_):
        pipe = Path(f"pipe-{len(list(Path().glob('pipe-*')))}").resolve()
        os.mkfifo(pipe)
        super().__init__(command[1:], pipe, cwd=Path.cwd())
        self.stdout = pipe.open(errors="replace")

    def wait(self):
        return super().wait(60)


def test_a_run_that_is_broken_at_random_ends_on_the_bits_of_an_unbroken_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(broken_run.subprocess, "Popen", Forked)
    monkeypatch.setattr(broken_run.Launched, "pids", lambda run: [run.process.pid] if run.poll() is None else [])
    with IndexedWriter("data", np.uint16) as writer:
        writer.add_documents(np.arange(20_000) % 127, np.full(200, 100))
    how = ["--minutes", "0.4", "--every", "1", "--kinds", "kill,delay,disk,damage", "--folder", "runs"]
    line = [
        sys.executable,
        ROOT / "tests" / "support" / "slow_steps.py",
        *FLAGS.split(),
        "--data-path",
        tmp_path / "data",
    ]
    assert chaos.main([*how, "--", *map(str, line)]) == 0
    said = capsys.readouterr().out
    assert ", 0 differ" in said, said
    assert int(said.split(" faults and ")[0].split()[-1]) >= 1, said


def test_a_launch_line_without_dashes_before_it_is_answered_with_the_line_to_type():
    """It was `unexpected torchrun: values follow a flag`."""
    with pytest.raises(ConfigError, match=r"^give the command to run after --, as in megapipe chaos .* -- torchrun"):
        chaos.main(["--minutes", "1", "torchrun", "pretrain_gpt.py", "--save-interval", "5"])


@pytest.mark.parametrize("flag", [["--save-interval=5"], ["--save-interval", "5"]])
def test_a_launch_line_names_its_save_interval_in_either_form(flag, tmp_path):
    (tmp_path / "broken").mkdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        chaos.main(["--folder", str(tmp_path), "--", "torchrun", "pretrain_gpt.py", *flag])
    with pytest.raises(ConfigError, match="has no --save-interval"):
        chaos.main(["--folder", str(tmp_path), "--", "torchrun", "pretrain_gpt.py"])


def test_a_second_full_disk_lasts_until_a_save_of_its_own_has_ended(tmp_path):
    """With --save-failure continue it ended at once, as a save of the same launch had failed before."""
    (tmp_path / "broken" / "iter_0000010").mkdir(parents=True)
    (tmp_path / "broken" / "iter_0000010" / "model.safetensors").write_bytes(b"1234")
    over = []
    run = SimpleNamespace(saves=1, failed_saves=1, ranks=list, sees=lambda what, limit_s: over.append(what()))
    chaos.Chaos(chaos.Options(), [], tmp_path).disk(run)
    assert over == [False]
