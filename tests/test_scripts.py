"""The shipped scripts as users call them, sizes overridden; what they start is forked, by scripts/nightly.sh real."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from programs import ROOT, forked_python, run_ranks

from megapipe.checks.run import flag_problems
from megapipe.commands.plan import main as plan
from megapipe.commands.plan.parts import parts
from megapipe.commands.start import quickstart
from megapipe.config import Config
from megapipe.flags.parse import parse, parse_among
from megapipe.schedule.measured.traces import read
from tools.deepseek_v3 import ended, shares

SMALL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --eval-iters 0 --log-interval 1 --lr-decay-iters 10"
)


@pytest.fixture
def forked(tmp_path_factory, monkeypatch):
    if os.environ.get("MEGAPIPE_NIGHTLY"):
        yield
        return
    with forked_python(tmp_path_factory.mktemp("forked")) as bin:
        monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
        yield


def run_script(name: str, run: Path, flags: str, **env: str) -> str:
    """Standard output of a script that must succeed."""
    done = subprocess.run(
        ["bash", f"scripts/{name}", *f"{SMALL} {flags}".split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RUN": str(run)} | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_its_ranks(name: str, run: Path, flags: str) -> str:
    """All that the ranks print of a script that ends in torchrun: the ranks that it asks for, forked at once."""
    (run / "torchrun").write_text("""#!/bin/sh\nprintf '%s\\n' "$@"\n""")
    (run / "torchrun").chmod(0o755)
    said = run_script(name, run, flags, PATH=f"{run}:{os.environ['PATH']}")
    _, ranks, *command = said[said.index("--nproc-per-node") :].splitlines()
    return run_ranks(int(ranks), command)


def test_the_local_script_trains_a_step(tmp_path):
    flags = "--micro-batch-size 1 --global-batch-size 4 --lr-warmup-iters 1 --train-iters 1 --split 1,0,99"
    assert "iteration        1/       1 |" in run_its_ranks("pretrain_gpt_local.sh", tmp_path, flags)


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
highest=0; started=()
for ((r = 0; r < SLURM_NTASKS; r++)); do SLURM_PROCID=$r SLURM_LOCALID=$r "$@" & started+=($!); done
for task in "${started[@]}"; do code=0; wait "$task" || code=$?; ((code > highest)) && highest=$code; done
exit $highest
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$RUN/requeued"; fi
"""


def slurm(run: Path, flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script in a job of two ranks; what Slurm would do is a few lines of ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (run / name).write_text(text)
        (run / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here"}
    env = os.environ | job | {"OMP_NUM_THREADS": "1", "PATH": f"{run}:{os.environ['PATH']}", "PORT": str(port)} | env
    command = ["bash", "scripts/pretrain_gpt_slurm.sh", *f"{SMALL} {flags}".split()]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.usefixtures("forked")
def test_a_slurm_job_that_is_told_to_stop_saves_and_is_queued_again(tmp_path):
    flags = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --global-batch-size 4 --lr-warmup-iters 1"
    done = slurm(tmp_path, f"{flags} --split 1,0,99 --exit-duration-in-mins 0.0001", RUN=str(tmp_path), MOCK="1")
    assert done.returncode == 75, done.stdout + done.stderr
    assert "pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline" in done.stdout.splitlines()[0]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert (tmp_path / "checkpoints/iter_0000001/manifest.json").exists()


def test_a_slurm_job_does_not_train_on_mock_data_nor_without_save_by_accident(tmp_path):
    assert "set DATA to the prefix of a .bin/.idx pair, or MOCK=1" in slurm(tmp_path, "", RUN="x", DATA="").stderr
    assert "set RUN to a folder for checkpoints" in slurm(tmp_path, "", RUN="", MOCK="1").stderr


def test_a_slurm_job_from_another_folder_names_its_program_and_its_python(tmp_path):
    away = {"RUN": str(tmp_path), "MOCK": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    assert (
        f"no pretrain_gpt.py in {tmp_path}: submit from the repository, or set PROGRAM"
        in slurm(tmp_path, "", **away).stderr
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\necho "its python runs $1"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    program = str(ROOT / "pretrain_gpt.py")
    assert f"its python runs {program}\n" in slurm(tmp_path, "", **away, PROGRAM=program, VENV=str(tmp_path)).stdout


def test_a_mistake_of_the_user_is_not_queued_again_and_a_failure_a_few_times(tmp_path):
    # Slurm's own count has the requeues at the time limit too: after five of those a failure still is the first.
    for code, failures, expected in ((2, 0, 0), (17, 0, 0), (1, 0, 1), (137, 4, 1), (3, 5, 0)):
        (tmp_path / "failures-7").write_text(f"{failures}\n")
        (tmp_path / "requeued").write_text("")
        (tmp_path / "python").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / "python").chmod(0o755)
        done = slurm(tmp_path, "", RUN=str(tmp_path), MOCK="1", SLURM_RESTART_COUNT="5")
        assert done.returncode == code
        assert (tmp_path / "requeued").read_text() == "requeue 7\n" * expected, code


IP = """#!/usr/bin/env bash
if [ "$1 $2" = "netns exec" ]; then host="$3" bash -c "${!#}"; else echo "$@" >> "$LOG"; fi
"""


@pytest.mark.parametrize("codes", [(0, 0), (0, 3), (4, 0), (4, 3)])
def test_two_hosts_end_with_the_status_of_one_that_failed_once_both_are_over(tmp_path, codes):
    """The second host's status was forgotten, and the script did not wait for it where the first one failed."""
    (tmp_path / "ip").write_text(IP)
    (tmp_path / "ip").chmod(0o755)
    command = f"n=${{host#megapipe}}; sleep $n; codes=({codes[0]} {codes[1]}); echo over; exit ${{codes[$n]}}"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    with open(tmp_path / "said", "w") as said:  # a pipe would be read until the last process has closed it
        ended = ["bash", "scripts/two_hosts.sh", "run", command]
        done = subprocess.run(ended, cwd=ROOT, env=env, stdout=said, timeout=60, check=False)
    assert (tmp_path / "said").read_text() == "host0: over\nhost1: over\n"
    assert (done.returncode != 0) == any(codes)
    assert done.returncode in codes


def test_the_857m_script_runs_3_warm_up_forwards_5_pairs_and_3_cool_down_backwards(tmp_path):
    """Its pipeline as it is: 4 stages, global batch 16, micro batch 2."""
    profile = f"--tensorboard-dir {tmp_path}/tb --profile --use-pytorch-profiler --profile-step-start 1"
    flags = f"--train-iters 2 --lr-warmup-fraction 0.1 --split 1,0,99 {profile} --profile-step-end 2"
    output = run_its_ranks("pretrain_gpt3_857m.sh", tmp_path, flags)
    assert "global batch size:    16" in output
    order = [str(item.label) for item in read(tmp_path / "torch_profile" / "rank-0.json.gz").steps[0]]
    assert order[:3] == ["0F0", "0F1", "0F2"]
    assert order[3:13] == [label for n in range(5) for label in (f"0F{3 + n}", f"0BW{n}")]
    assert order[13:] == ["0BW5", "0BW6", "0BW7"]


def test_the_quickstart_goes_from_text_to_a_sample(tmp_path, monkeypatch, capsys):
    """With 25 modules of the standard library for its corpus and a schedule that a visitor swaps in."""

    def train(flags, log):
        assert flags[:2] == ["--nproc", "2"]
        print(said := run_ranks(2, ["-m", "megapipe", "pretrain", *flags[2:]]))
        log.write_text(said)

    folder = Path(json.__file__).parents[1]
    lines = (
        json.dumps({"text": path.read_text("utf-8"), "path": path.name}) for path in sorted(folder.glob("*.py"))[:25]
    )
    (tmp_path / "stdlib.jsonl").write_text("\n".join(lines))
    flags = "--eval-iters 1 --eval-interval 2 --train-iters 4 --lr-warmup-iters 1 --save-interval 4"
    flags += " --pipeline-schedule zb-v --profile-step-start 2 --profile-step-end 3"
    if os.environ.get("MEGAPIPE_NIGHTLY"):
        output = run_script("quickstart.sh", tmp_path, f"--split 90,10,0 {flags}", VOCAB_SIZE="500")
    else:
        monkeypatch.setattr(quickstart, "train", train)
        quickstart.main(["--folder", str(tmp_path), "--ids", "500", "--split", "90,10,0", *f"{SMALL} {flags}".split()])
        output = capsys.readouterr().out
    assert output.count("stdlib.jsonl: up to date") == 1
    assert "iteration        4/       4 |" in output
    assert re.search(r"Unigram entropy of \d+ validation tokens: [3-6]\.\d+ nats", output)
    assert re.search(r"loss at iteration 4 on validation set .*lm loss value", output)
    assert "def main(" in output.split("== 5/5")[1]
    names = ("log.txt", "tensorboard", "torch_profile/rank-1.json.gz", "checkpoints/iter_0000004/manifest.json")
    assert [name for name in names if not (tmp_path / name).exists()] == []


@pytest.mark.parametrize(
    ("theirs", "save", "load"),
    [("", "f/checkpoints", "f/checkpoints"), ("--save x", "x", "x"), ("--save x --load y", "x", "y")],
)
def test_a_quickstart_goes_on_from_where_it_saves(theirs, save, load):
    """It made corpus, tokenizer and tokens, and then loaded from a folder that `--save x` had left empty."""
    run = quickstart.flags_of_run({"--save": Path("f/checkpoints")}, theirs.split())
    found = parse(Config, run).checkpoint
    assert (found.save, found.load) == (save, load)


def commands_of(name: str, run: Path, *flags: str, **env: str) -> list[list[str]]:
    """Words behind `python` of what a script starts; nothing of it runs."""
    lines = [
        "#!/bin/sh",
        f'case "$1 $2" in "-c import sys; print(sys.prefix)") exec echo {run};; "-m pip") exit;; esac',
        f'[ "$1" != -c ] || exec {shutil.which("python")} "$@"',
        f'printf "%s\\037" "$@" >> {run}/started',
    ]
    (run / "python").write_text("\n".join([*lines, f"echo >> {run}/started", ""]))
    (run / "python").chmod(0o755)
    env = os.environ | {"RUN": str(run), "PATH": f"{run}:{os.environ['PATH']}"} | env
    done = subprocess.run(
        ["bash", f"scripts/{name}", *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("\037")[:-1] for line in (run / "started").read_text().splitlines()]


def test_the_deepseek_script_trains_samples_and_tells_loads_and_costs(tmp_path, monkeypatch, capsys):
    """All of its flags, in a model of 4 layers and 8 experts on 12 modules of the standard library."""
    small = (
        "--num-layers 4 --hidden-size 16 --ffn-hidden-size 32 --seq-length 16 --max-position-embeddings 16 "
        "--moe-layer-freq [0,1,1,1] --num-experts 8 --moe-ffn-hidden-size 8 --moe-shared-expert-intermediate-size 8 "
        "--global-batch-size 16 --train-iters 3 --lr-warmup-iters 1 --log-interval 1 --split 90,10,0 --eval-iters 1 "
        "--eval-interval 3 --save-interval 3 --profile-step-start 1 --profile-step-end 2 "
        "--pipeline-model-parallel-layout Et|tm|t|tL"
    )
    found = commands_of("pretrain_deepseek_v3_local.sh", tmp_path, *small.split(), VOCAB_SIZE="400")
    texts = [path.read_text("utf-8") for path in sorted(Path(json.__file__).parents[1].glob("*.py"))[:12]]
    (tmp_path / "stdlib.jsonl").write_text("\n".join(json.dumps({"text": x, "path": "a"}) for x in texts))

    def train(flags, log):
        assert flags[:2] == ["--nproc", "4"]
        print(said := run_ranks(4, ["-m", "megapipe", "pretrain", *flags[2:]]))
        log.write_text(said)

    def alone(argv):
        assert "--overlap-moe-expert-parallel-comm" not in argv
        row = {"exposed_communication": 0.2, "passes_ms": 10.0, "ranks_ms": [{"busy": 8.0}, {"busy": 8.0}]}
        Path(argv[argv.index("--metrics-file") + 1]).write_text(json.dumps(row) + "\n")

    monkeypatch.setattr(quickstart, "train", train)
    starts = {"pretrain": alone, "quickstart": lambda argv: quickstart.main(argv[1:])}
    doors = {"megapipe": lambda argv: starts[argv[0]](argv), "tools.deepseek_v3.ended": ended.main}
    doors["tools.deepseek_v3.shares"] = shares.main
    for words in found:
        (doors[words[1]](words[2:]) if words[0] == "-m" else plan.main(words[1:]))
    output = capsys.readouterr().out
    assert "iteration        3/       3 |" in output
    assert "communication is 25.0% of what passes take" in output
    assert "bubble: predicted" in output.split("== 5/5")[1]
    assert re.search(r"nothing ran beside: \d+\.\d% of the passes, predicted \d+\.\d% of the passes", output)
    loads = [[int(n) for n in line.split()[2:-1]] for line in output.splitlines() if line.startswith("  layer")]
    assert [sum(load) for load in loads] == [16 * 16 * 4] * 4, "256 tokens have four experts in 3 layers and a depth"
    assert "mtp_1 loss: " in output.split("== 5/5")[1]
    assert re.search(r"latent attention +4 ", output)
    assert re.search(r"router and experts +3 ", output)


def test_a_job_takes_the_bucket_size_of_a_searched_plan(tmp_path):
    """The script had --ddp-num-buckets, next to which a run refuses the --ddp-bucket-size of each such plan."""
    env = {"ONLY": "python", "PROGRAM": "tools/plan.py", "MOCK": "1", "SAVE": "no"}
    added = ["--world-size", "8", "--ddp-bucket-size", "30000000"]
    ((_, *flags),) = commands_of("pretrain_gpt_slurm.sh", tmp_path, *added, **env)
    _, config = parse_among(plan.Flags, flags)
    assert config.parallel.ddp_bucket_size == 30_000_000
    assert not [x for x in flag_problems(config) if "bucket" in x]


def test_deepseek_v3_at_full_size_has_the_parameters_that_are_published(tmp_path):
    """671B in all, 37B of them for a token (DeepSeek-AI 2024, section 4.2), on 2,048 GPUs."""
    env = {"ONLY": "python", "PROGRAM": "tools/plan.py", "MOCK": "1", "SAVE": "no"}
    ((program, *flags),) = commands_of("pretrain_deepseek_v3_slurm.sh", tmp_path, "--world-size", "2048", **env)
    _, config = parse_among(plan.Flags, flags)
    assert program == "tools/plan.py"
    config = replace(config, model=replace(config.model, padded_vocab_size=129_280))
    found = {part.name: part.work for part in parts(config)}
    depth = found.pop("predicts 1 further")
    whole = sum(work.parameters for work in found.values())
    assert whole == 671_026_404_352
    assert whole - sum(work.unused for work in found.values()) == 37_552_282_624
    # With copies of embedding and head, which the published files have: 685B.
    assert whole + depth.parameters + 2 * 129_280 * 7168 == 684_489_830_400
    assert found["router and experts"].experts == 58 * 256 * 3 * 7168 * 2048
