"""Train a small GPT in minutes: corpus, tokenizer, tokens, pretraining and a sample.

The corpus is the Python standard library, so that nothing is downloaded.

megapipe quickstart --pipeline-schedule zb-v
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.commands import preprocess, tokenizer
from megapipe.commands.start import corpus, entropy
from megapipe.config import Config
from megapipe.flags.parse import parse, parse_among, split_among
from megapipe.flags.stop import say

RUN = (
    "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --num-layers 8 --hidden-size 192 "
    "--num-attention-heads 6 --seq-length 256 --max-position-embeddings 256 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --global-batch-size 32 "
    "--train-iters 120 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 "
    "--weight-decay 0.1 --adam-beta2 0.95 --split 969,30,1 --eval-interval 60 --eval-iters 10 "
    "--log-interval 10 --save-interval 60 --profile --use-pytorch-profiler --profile-step-start 10 "
    "--profile-step-end 12"
)
"""The flags of the training; the flags of its files depend on --folder."""


@dataclass(frozen=True)
class Flags:
    """Train a small GPT on the source text of Python's standard library, on two pipeline stages.

    All other flags go to megapipe pretrain and win over the quickstart's. Run again, it reuses the
    corpus, the tokenizer and the tokens, and continues from its checkpoint.
    """

    folder: str = "runs/quickstart"
    """The folder for all files."""
    ids: int = 4096
    """Size of the tokenizer's vocabulary."""


def main(argv: Sequence[str]) -> int:
    """Run the five steps. Return the exit status of the training."""
    flags, _ = parse_among(Flags, argv)
    folder = Path(flags.folder)
    text = folder / "stdlib.jsonl"
    model = folder / "tokenizer.model"
    files = {
        "--data-path": folder / "stdlib_text_document",
        "--tokenizer-model": model,
        "--tensorboard-dir": folder / "tensorboard",
        "--save": folder / "checkpoints",
    }
    _, theirs = split_among(Flags, argv)
    run = flags_of_run(files, theirs)
    # Wrong flags are reported before the minutes of work.
    config = parse(Config, run)
    saved = str(config.checkpoint.save)
    folder.mkdir(parents=True, exist_ok=True)
    say("== 1/5 Corpus: the source text of the Python standard library")
    corpus.main(["--output", str(text), "--reuse"])
    say(f"== 2/5 Tokenizer: a SentencePiece model of {flags.ids} ids")
    # --reuse keeps the files of an earlier call, if their flags were the same.
    made = ["--input", str(text), "--reuse"]
    tokenizer.main([*made, "--output", str(model), "--vocab-size", str(flags.ids)])
    say("== 3/5 Tokens: Megatron's .bin/.idx")
    prefix = ["--output-prefix", str(folder / "stdlib"), "--tokenizer-model", str(model)]
    preprocess.main([*made, *prefix, "--append-eod", "--workers", "2"])
    ranks = config.parallel.least_ranks
    say(f"== 4/5 Pretraining: {ranks} processes, {config.parallel.pipeline_schedule}")
    if code := train(["--nproc", str(ranks), *_device(ranks), *run], folder / "log.txt"):
        return code
    say("== 5/5 What it learned")
    # A blend of several data sets has no single entropy.
    if len(config.data.data_path) == 1:
        entropy.main(["--data-path", *config.data.data_path, "--split", str(config.data.split)])
    lines = (folder / "log.txt").read_text().splitlines()
    validated = [line for line in lines if "on validation set" in line]
    say("\n".join(validated[-1:]))
    # torch's import takes a second, which wrong flags should not wait for.
    from megapipe.commands import generate

    generate.main(["--load", saved, "--prompt", "def main(", "--num-tokens", "80"])
    say(_NEXT.format(folder=folder, saved=saved))
    return 0


def flags_of_run(files: Mapping[str, Path], theirs: Sequence[str]) -> list[str]:
    """Return the flags of the training: the quickstart's own, `files`, then the user's, which win.

    Without --load the training loads from its --save, and so continues an earlier one.

    Args:
        files: {flag: path that the quickstart gives it}, such as {"--save": folder of checkpoints}.
        theirs: the user's flags.
    """
    ours = [word for flag, path in files.items() for word in (flag, str(path))]
    run = [*RUN.split(), *ours, *theirs]
    found = parse(Config, run).checkpoint
    if found.load:
        return run
    return [*run, "--load", str(found.save)]


def _device(ranks: int) -> list[str]:
    """Return the flags that train on the CPU, if there are GPUs but fewer than ranks; else []."""
    # The import takes a second.
    import torch

    # Without any GPU a run takes the CPU by itself.
    if 0 < torch.cuda.device_count() < ranks:
        return ["--distributed-backend", "gloo"]
    return []


def train(flags: Sequence[str], log: Path) -> int:
    """Run `megapipe pretrain`. Print its output and append it to `log`. Return its exit status."""
    # All ranks share the cores of this machine. A value of the user's own wins.
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    # The training's own output is a pipe, so it cannot see that a terminal reads it in the end.
    short = []
    if sys.stdout.isatty():
        short = ["--log-format", "short"]
    # -u: each line is passed on when it is printed.
    command = [sys.executable, "-u", "-m", "megapipe", "pretrain", *short, *flags]
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as started,
    ):
        assert started.stdout is not None
        for line in started.stdout:
            file.write(line)
            say(line.rstrip("\n"))
        return started.wait()


# The last lines of the command.
_NEXT = """
Log lines       {folder}/log.txt
TensorBoard     {folder}/tensorboard        tensorboard --logdir {folder}/tensorboard
Traces          {folder}/torch_profile/rank-*.json.gz   open them in https://ui.perfetto.dev
Checkpoints     {saved}
Try next        megapipe schedules show 1f1b --pp 4 --microbatches 8
                megapipe traces {folder}/torch_profile
                megapipe init my"""
