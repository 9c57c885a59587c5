"""--check: one process tells what would run, and what becomes of each flag."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece

import pretrain_gpt
from megapipe.checkpoint import commit
from megapipe.checkpoint.lock import Lock
from megapipe.checks.machine import on_cpus
from megapipe.commands.main import command
from megapipe.config import Config
from megapipe.data.indexed import IndexedWriter
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.training.check import settled, start_block

RUN = (
    "--check --check-paths no --world-size 16 --num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 32 --lr 1e-3 --train-iters 20 --bf16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --data-path no/where --tokenizer-model no.model "
    "--tokenizer-type SentencePieceTokenizer --async-save --save-interval 5 --distributed-backend nccl"
)


def test_a_check_lists_what_holds_and_what_is_missing_and_plans(capsys):
    pretrain_gpt.main(RUN.split())
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "16 processes = 2 tensor x 4 pipeline x 2 data parallel; a batch of 32 = 8 microbatches of 2 each" in text
    assert " --async-save nothing is saved, without --save\n" in text
    assert " --save-interval 5 nothing is saved, without --save\n" in text
    (flags,) = (line for line in text.splitlines() if line.startswith("flags: "))
    assert "--save-interval" not in flags
    assert "--num-layers 8 " in flags
    assert "missing: --data-path no/where: no file" in text
    assert "missing: --tokenizer-model no.model: No such file" in text
    assert "the plan assumes 32000 ids" in text
    assert "pipeline schedule 1f1b: predicted bubble" in text


def test_flags_of_a_check_are_text_for_a_shell(capsys):
    """A layout has the | and ( of a shell, and the line could not be pasted."""
    layout = "Et*3|(t|)*2tttL"
    flags = f"--num-layers 8 --pipeline-model-parallel-layout {layout}"
    pretrain_gpt.main([*RUN.split(), *flags.split()])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("flags: "))
    words = line.removeprefix("flags: ")
    pasted = subprocess.run(["bash", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True, check=True)
    assert layout in pasted.stdout.splitlines()


@pytest.mark.parametrize(
    "backend, text",
    [
        ("nccl", "after 3 step(s) a stage's forward is one CUDA graph for each microbatch in flight"),
        ("gloo", "nothing is captured: CUDA graphs need a GPU"),
    ],
)
def test_a_check_says_what_becomes_of_cuda_graphs_on_the_machines_to_come(capsys, backend, text):
    flags = "--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --tensor-model-parallel-size 1"
    pretrain_gpt.main(f"{RUN} {flags} --distributed-backend {backend}".split())
    assert f"\n--cuda-graph-impl local: {text}" in capsys.readouterr().out


def test_a_run_says_that_flags_of_its_layers_have_nothing_to_act_on():
    """They were taken from the configuration before it was told what is idle, and not a word was said."""
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --bf16 --fp8-format hybrid"
    given = parse(Config, f"{flags} --fp8-param-gather --tp-comm-overlap".split())
    block = start_block(settled(given, replace(given.model, padded_vocab_size=128)))
    assert [line.split()[0] for line in block.splitlines()[1:]] == ["--fp8-param-gather", "--tp-comm-overlap"]


def test_the_kubernetes_manifest_asks_for_a_run_that_checks_out(capsys):
    text = Path(pretrain_gpt.__file__).with_name("scripts").joinpath("pretrain_gpt_kubernetes.yaml").read_text()
    pretrain_gpt.main(["--check", "--check-paths", "no", "--world-size", "16", *re.findall(r"- (--\S+)", text)])
    assert "16 processes = 2 tensor x 4 pipeline x 2 data parallel" in capsys.readouterr().out


def test_a_check_that_finds_a_problem_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        pretrain_gpt.main(RUN.replace("--num-layers 8", "--num-layers 9").split())
    assert stopped.value.code == 2
    assert "--num-layers 9 does not fill 4 stages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain_gpt.main(RUN.replace("--check-paths no", "--check-paths yes").split())
    assert "no.model: No such file" in capsys.readouterr().err


TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 15 --num-workers 0 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 4 --eval-iters 0 --save-interval 2 --log-interval 100 --data-path"
)


def flags(folder: Path, rest: str) -> list[str]:
    return f"{TINY} {folder}/d --split 1,0,0 {rest}".replace(" F/", f" {folder}/").split()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with data, and a run of two steps that has been saved."""
    folder = tmp_path_factory.mktemp("saved")
    with IndexedWriter(folder / "d", np.uint16) as writer:
        writer.add_documents(np.arange(40) % 15, np.full(4, 10))
    pretrain_gpt.main(flags(folder, "--save F/c --exit-interval 2"))
    return folder


def refusal(given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        pretrain_gpt.main(given)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "more, text",
    [
        ("--save F/c", "--save F/c has checkpoints of iterations 2 already, and this run starts at 0"),
        ("--save F/locked", "--save F/locked belongs to another run: process "),
        ("--load F/c --seed 7", "--seed is 7, and was 1234"),
        ("--load F/c --hidden-size 16", "--hidden-size is 16, but iter_0000002 has 8"),
        ("--load F/c --min-lr 1e-4", "iter_0000002 was trained with other settings"),
        ("--load F/c --train-iters 40", "--train-iters is 40, and was 4: data that is read more than once is shuffled"),
        ("--load F/c --ckpt-step 1", "--ckpt-step 1: F/c has no such checkpoint"),
        ("--eval-interval 1 --eval-iters 1 --split 98,1,1", "--split 98,1,1 leaves no tokens for validation"),
        ("--model-provider F/none.py:provider", "F/none.py"),
        ("--save F/full", "--save F/full: a checkpoint takes "),
    ],
)
def test_a_check_refuses_what_the_launch_refuses(saved, capsys, monkeypatch, more, text):
    if "full" in more:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=7))
        (saved / "full").mkdir(exist_ok=True)
    lock = Lock(saved / "locked") if "locked" in more else None
    given = flags(saved, more)
    launched = refusal(given, capsys)
    assert text.replace("F/", f"{saved}/") in launched
    checked = refusal([*given, "--check"], capsys)
    number = r"[\d,]+ bytes"  # of a checkpoint as planned, and of its tensors
    assert re.sub(number, "", checked) == re.sub(number, "", launched)
    if lock is not None:
        lock.release()


def test_a_cluster_is_planned_on_a_machine_whose_disk_has_no_room_for_its_checkpoints(saved, capsys, monkeypatch):
    """--check-paths no was refused for the free bytes of a laptop."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=7))
    given = flags(saved, "--check --save F/elsewhere --save-interval 4")
    pretrain_gpt.main([*given, "--check-paths", "no"])
    assert re.search(
        r"on this machine: --save \S+: a checkpoint takes \S+ GiB, and 6.519e-09 are free", capsys.readouterr().out
    )


def test_a_check_of_what_goes_on_makes_nothing(saved, capsys):
    before = sorted(saved.rglob("*"))
    pretrain_gpt.main(flags(saved, "--check --load F/c --save F/c"))
    text = capsys.readouterr().out
    assert f"starts from {saved}/c/iter_0000002\n" in text
    pretrain_gpt.main(flags(saved, "--check --save F/new/folder"))
    assert sorted(saved.rglob("*")) == before


def test_a_check_names_a_folder_that_this_user_may_not_write_to(saved, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(saved))
    given = flags(saved, "--check --save F/new/folder")
    assert f"--save {saved}/new/folder: {saved} may not be written to by this user" in refusal(given, capsys)


def test_wrong_flags_their_values_files_and_the_folder_are_told_at_once(saved, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(saved))
    more = "--save F/new/folder --num-layers 3 --load F/none --swiglo --train-samples x "
    more += "--pipeline-model-parallel-size 2"
    with pytest.raises(ConfigError) as caught:
        command("check")([*flags(saved, more), "--world-size", "2"])
    said = str(caught.value)
    for text in (
        "unknown flag --swiglo; did you mean --swiglu?",
        "--train-samples x: expected an integer",
        "--num-layers 3 does not fill 2 stages",
        f"--load {saved}/none: no such folder",
        f"--save {saved}/new/folder: {saved} may not be written to by this user",
    ):
        assert text in said
    assert "5 problems" in said


def test_a_disk_without_room_is_told_with_the_files_that_are_missing(saved, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=7))
    said = refusal(flags(saved, "--check --save F/new/folder --save-interval 1 --load F/none"), capsys)
    assert f"--save {saved}/new/folder: a checkpoint takes " in said
    assert f"--load {saved}/none: no such folder" in said


def test_a_torch_without_cuda_runs_a_clusters_flags_and_says_how():
    flags = "--transformer-impl transformer_engine --attention-backend fused --distributed-backend nccl"
    config = on_cpus(parse(Config, flags.split()))
    assert (config.model.transformer_impl, config.model.attention_backend) == ("local", "auto")
    assert config.parallel.distributed_backend == "gloo"
    assert [flag for flag, _ in config.noop_flags] == [f"--{flag}" for flag in flags.removeprefix("--").split(" --")]
    assert on_cpus(Config()) == Config()


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Path]:
    """First arguments of each call from here on."""
    calls, original = list[Path](), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given[0]) or original(*given))
    return calls


@pytest.mark.parametrize("way", ["", "--check"])
def test_a_start_reads_its_tokenizer_once(way, saved, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("\n".join(f"{n} words of text" for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "t"), vocab_size=32, minloglevel=2
    )
    given = flags(saved, f"--train-iters 1 --tokenizer-type SentencePieceTokenizer {way}")
    read = counted(monkeypatch, Path, "read_bytes")
    pretrain_gpt.main([*given, "--tokenizer-model", str(tmp_path / "t.model")])
    assert read.count(tmp_path / "t.model") == 1


@pytest.mark.parametrize("way, times", [("", 2), ("--check", 1)])
def test_a_start_looks_once_for_its_checkpoint_and_once_when_the_folder_is_its_own(way, times, saved, monkeypatch):
    looked = counted(monkeypatch, commit, "newest")
    pretrain_gpt.main(flags(saved, f"--load F/c --use-checkpoint-args {way}"))
    assert looked == [saved / "c"] * times


def test_missing_files_come_with_the_flag_that_checks_the_rest(capsys):
    """The flag stood in the refusals of `plan` alone."""
    with pytest.raises(SystemExit):
        pretrain_gpt.main(RUN.replace("--check-paths no ", "").split())
    said = capsys.readouterr().err
    assert "--check-paths no checks the rest without these files." in said
    # The sentence is no problem of its own.
    assert said.count("--data-path") + said.count("--tokenizer-model") == 2
    assert "2 problems" in said


def test_a_flag_of_the_plan_is_not_taken_for_a_flag_of_a_run(capsys):
    """A wrong flag was proposed for it, one that changes the schedule."""
    with pytest.raises(SystemExit):
        pretrain_gpt.main([*RUN.split(), "--memory-gib", "80"])
    assert "unknown flag --memory-gib: plans alone have it." in capsys.readouterr().err


def test_the_seconds_of_the_first_save_are_those_of_the_disk_or_said_to_be_unknown(tmp_path, capsys):
    line = f"{RUN} --save {tmp_path / 'saved'}"
    pretrain_gpt.main(line.split())
    assert "seconds of the first save: not known, as --rates has no disk" in capsys.readouterr().out
    rates = tmp_path / "rates.json"
    rates.write_text('{"disk": 1000}')
    pretrain_gpt.main([*line.split(), "--rates", str(rates)])
    said = capsys.readouterr().out
    size = float(re.search(r"a checkpoint has (\S+) GiB", said)[1]) * 2**30
    seconds = float(re.search(r"seconds of the first save: (\S+) to write", said)[1])
    assert seconds == pytest.approx(size / 1000, rel=0.01)


@pytest.mark.parametrize("share, verdict", [(0.5, "fits with"), (0.95, "tight, needs"), (1.25, "does not fit")])
def test_a_check_says_whether_a_plan_fits_a_device_in_the_words_of_a_launch(saved, capsys, monkeypatch, share, verdict):
    """Only `plan --memory-gib` said it. A launch goes on whatever the line says."""
    given = flags(saved, "--train-iters 1")
    pretrain_gpt.main([*given, "--check", "--distributed-backend", "gloo"])
    said = capsys.readouterr().out
    assert "memory of " not in said  # the host's memory, which other programs use too
    peak = float(re.search(r"peak (\S+) GiB on a rank", said)[1]) * 2**30
    monkeypatch.setattr("megapipe.training.room.memory_here", lambda: peak / share)
    pretrain_gpt.main([*given, "--check"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("memory of this GPU"))
    assert f"GiB: {verdict}" in line
    monkeypatch.setattr("megapipe.training.build.memory_of", lambda device: peak / share)
    pretrain_gpt.main(given)
    assert capsys.readouterr().out.splitlines().count(line) == 1


@pytest.mark.parametrize(
    "rates, says",
    [
        ("h200", "memory of a device by --rates (H200's data sheet), 141 GiB, 14.1 reserved: peak "),
        (
            "a100",
            "the memory of a device is not known: --rates (A100's data sheet) has no capacity (bytes). "
            "Give --rates a100-40 or --rates a100-80; ",
        ),
        # No A100 is meant here, of which the same line spoke.
        (
            '{"flops": 1e12, "source": "mine"}',
            "the memory of a device is not known: --rates (mine) has no capacity (bytes). Add it to the file; ",
        ),
        (
            '{"capacity": 1073741824, "source": "a phone"}',
            "memory of a device by --rates (a phone), 1 GiB, 0.1 reserved: peak ",
        ),
    ],
)
def test_rates_say_the_memory_of_a_device_that_is_not_here(capsys, monkeypatch, tmp_path, rates, says):
    monkeypatch.setattr("megapipe.training.room.memory_here", lambda: 7)
    if rates.startswith("{"):
        (tmp_path / "rates.json").write_text(rates)
        rates = str(tmp_path / "rates.json")
    pretrain_gpt.main([*RUN.split(), "--rates", rates])
    said = capsys.readouterr().out
    assert f"\n{says}" in said
    assert re.search(r"\npredicted step .*, by --rates \(.*\): with communication", said)


def test_a_check_says_of_a_full_host_what_a_plan_says(capsys, tmp_path):
    """It counted a rank alone, and was silent on the ranks of a node together."""
    rates = tmp_path / "rates.json"
    line = [*RUN.split(), "--rates", str(rates)]
    for host, full in ((2**20, True), (2**40, False)):
        rates.write_text(json.dumps({"host": host, "node": 8, "source": "a laptop"}))
        pretrain_gpt.main(line)
        checked = capsys.readouterr().out
        assert ("memory of a host by --rates (a laptop), 0.0009766 GiB: on a host 8 ranks" in checked) == full
        words = [x for x in line if x != "--check"]
        command("plan")(words)
        said = re.search(r"on a host 8 ranks need .* more than it has", capsys.readouterr().out)
        assert (said is not None) == full
        assert said is None or said[0] in checked
