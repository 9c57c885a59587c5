"""The program as a user starts it: real processes and files; torchrun where a shipped script calls it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import run_ranks
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megapipe.data.indexed import IndexedWriter

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --attention-dropout 0"
)
RUN = (
    f"{MODEL} --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 3e-3 --lr-decay-style cosine "
    "--lr-warmup-iters 3 --log-interval 1 --eval-interval 10 --eval-iters 2 --save-interval 10 "
    "--log-validation-ppl-to-tensorboard --split 8,1,1"
)
PASS_LABEL = re.compile(r"^\d+(F|BW)\d+$")


def launch(flags: str, processes: int = 1) -> str:
    """What a run printed that must succeed."""
    return run_ranks(processes, ["pretrain_gpt.py", *flags.split()])


def numbers(output: str) -> dict[str, tuple[str, str, str]]:
    """Iteration -> loss, gradient norm and learning rate as printed, and validation losses by their text."""
    line = r"iteration +(\d+)/.* learning rate: (\S+) .*lm loss: (\S+) .*grad norm: (\S+) "
    rows = {n: (loss, norm, lr) for n, lr, loss, norm in re.findall(line, output)}
    return rows | {
        where: (loss, "", "") for where, loss in re.findall(r"loss at (.*?) \| lm loss value: (\S+)", output)
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of 20 steps on one process."""
    folder = tmp_path_factory.mktemp("unbroken")
    with IndexedWriter(folder / "data", np.uint16) as writer:
        writer.add_documents(np.arange(20_000) % 127, np.full(200, 100))
    flags = f"--data-path {folder}/data --save {folder}/checkpoints --tensorboard-dir {folder}/tensorboard"
    return folder, launch(f"{RUN} {flags}")


@pytest.mark.parametrize("processes", [1, 2])
def test_ten_steps_and_ten_after_a_load_are_twenty_steps_bit_for_bit(unbroken, tmp_path, processes):
    folder, output = unbroken
    flags = f"{RUN} --data-path {folder}/data --load {folder}/checkpoints --ckpt-step 10 --save {tmp_path}/checkpoints"
    flags += f" --pipeline-model-parallel-size {processes}"
    if processes > 1:
        flags += f" --tensorboard-dir {tmp_path}/tb --profile --use-pytorch-profiler --profile-step-end 11"
    resumed = launch(flags, processes)
    assert [line for line in (output + resumed).splitlines() if re.search(r"Warning|USDT|ERROR", line)] == []

    last_ten = {k: v for k, v in numbers(output).items() if not k.isdigit() or int(k) > 10}
    last_ten.pop("iteration 10")
    assert numbers(resumed) == last_ten
    expected, got = (tensors(f / "checkpoints" / "iter_0000020") for f in (folder, tmp_path))
    assert expected.keys() == got.keys()
    assert {name.split(".")[0] for name in got} == {"decoder", "embedding", "optimizer"}
    assert [name for name in got if not torch.equal(expected[name], got[name])] == []
    if processes > 1:
        check_traces(tmp_path)


def check_traces(folder: Path) -> None:
    """Step 11 (4 microbatches on 2 stages) in one trace per rank, every pass labelled."""
    for rank in range(2):
        trace = json.loads(gzip.decompress((folder / "torch_profile" / f"rank-{rank}.json.gz").read_bytes()))
        events = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and PASS_LABEL.match(e["name"])]
        names = [e["name"] for e in sorted(events, key=lambda e: e["ts"])]
        assert (
            names
            == [
                ["0F0", "0F1", "0BW0", "0F2", "0BW1", "0F3", "0BW2", "0BW3"],
                ["1F0", "1BW0", "1F1", "1BW1", "1F2", "1BW2", "1F3", "1BW3"],
            ][rank]
        )


def test_evaluations_of_one_iteration_say_of_which_samples(unbroken):
    """Two batches of 8 each: every evaluation goes on behind the last, also the one that ends the run."""
    said = re.findall(r"validation loss at (iteration \d+(?: on \w+ set)?) .*samples: (\d+ to \d+)", unbroken[1])
    assert said == [
        ("iteration 10", "0 to 15"),
        ("iteration 20", "16 to 31"),
        ("iteration 20 on validation set", "32 to 47"),
        ("iteration 20 on test set", "0 to 15"),
    ]


def test_tensorboard_has_megatrons_tags(unbroken):
    folder, output = unbroken
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = {tag for tag in events.Tags()["scalars"] if not tag.startswith("megapipe/")}
    names = {"learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "iteration-time"}
    names |= {"lm loss validation", "lm loss validation ppl"}
    assert names | {f"{name} vs samples" for name in names} == tags
    logged = {e.step: e.value for e in events.Scalars("lm loss")}
    assert logged == pytest.approx({int(k): float(v[0]) for k, v in numbers(output).items() if k.isdigit()}, rel=1e-6)
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [8 * n for n in range(1, 21)]
