"""Continue the pretraining of small models of transformers on two ranks, and compare losses.

    python -m tools.proofs.families.continued

A case is a family with some feature, and a layout. Its model is imported, `pretrain_gpt.py` trains
it by 20 steps on two processes, and its last checkpoint is exported. The loss of the first step
must be the one that transformers computes for that batch, within 1e-6. So must the loss of the
evaluation after the last step be the one of the exported model.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.config import Config
from megapipe.convert import export_checkpoint, import_checkpoint
from megapipe.data.build import build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.flags import stop
from megapipe.flags.parse import parse
from tools.proofs.families.models import ROOT, logits_of, loss_of, opened, save
from tools.proofs.families.ranks import VOCAB

CLOSE = 1e-6
STEPS, BATCH = 20, 4
TIMEOUT = 900
"""Seconds for the 20 steps, which take ten on an idle machine."""
_RUN = f"""
--seq-length 16 --micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS} --lr 1e-3
--mock-data --split 1,1,98 --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --num-workers 0
--make-vocab-size-divisible-by 4 --eval-interval {STEPS} --eval-iters 1 --save-interval {STEPS}
--log-interval 1
"""
_SHARED = "--tensor-model-parallel-size 2 --sequence-parallel"
_EXPERTS = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
_ZERO = "--pipeline-model-parallel-size 2 --pipeline-schedule"


class Set(NamedTuple):
    """A feature that several families share.

    Attributes:
        family, seed: the model that has it.
        layout: flags of two ranks.
    """

    family: str
    seed: int
    layout: str


SETS = {
    "plain": Set("qwen3", 0, "--use-distributed-optimizer"),
    "sandwich norms, capped scores and logits": Set("gemma2", 0, _SHARED),
    "norms of heads, other bases in windows": Set("gemma3_text", 0, f"{_ZERO} zb-v"),
    "norms behind, norms of all heads, yarn": Set("olmo3", 0, _SHARED),
    "norms of all heads, experts": Set("minimax_m2", 0, _EXPERTS),
    "four factors": Set("granite", 0, f"{_ZERO} zb-h1"),
    "sinks, clamped SwiGLU": Set("gpt_oss", 0, _EXPERTS),
    "growing queries": Set("ministral3", 0, "--context-parallel-size 2"),
    "longrope": Set("phi3", 0, "--context-parallel-size 2 --cp-comm-type a2a"),
    "parallel halves": Set("cohere", 0, _SHARED),
    "latents, sigmoid router with its bias": Set("deepseek_v3", 1, f"{_ZERO} dualpipe-v"),
    "layers without rotation": Set("smollm3", 0, f"{_ZERO} interleaved"),
    "xIELU": Set("apertus", 0, _SHARED),
}


def flags_of(case: Set, folder: Path) -> list[str]:
    """Return the flags of a run that goes on from `folder`/ours and saves to `folder`/run."""
    files = f"--load {folder}/ours --finetune --use-checkpoint-args --save {folder}/run"
    return f"{_RUN} {case.layout} {files} --metrics-file {folder}/metrics".split()


def batches(flags: list[str]) -> tuple[Tensor, Tensor]:
    """Return the token ids [b, s + 1] of the first step, and of the evaluation."""
    config = parse(Config, flags)
    datasets = build_datasets(config, build_tokenizer(config.data))
    found = []
    for data in (datasets.train, datasets.valid):
        assert data is not None
        rows = [torch.as_tensor(data[number]).long() for number in range(BATCH)]
        found.append(torch.stack(rows))
    return found[0], found[1]


def theirs(model: Any, rows: Tensor) -> float:
    """Return the loss of a model of transformers for token ids [b, s + 1]."""
    return loss_of(logits_of(model, rows[:, :-1]), rows[:, 1:])


def problems(case: Set, folder: Path) -> Iterator[str]:
    """Train a case, and yield a text for each loss that differs; print the losses."""
    programs = importlib.import_module("programs")
    model = save(case.family, case.seed, folder / "hf")
    import_checkpoint(folder / "hf", folder / "ours", divisible_by=4)
    flags = flags_of(case, folder)
    first, last = batches(flags)
    ranks = programs.start_ranks(2, [ROOT / "pretrain_gpt.py", *flags], folder)
    codes = [rank.wait(TIMEOUT) for rank in ranks]
    output = "".join(rank.log.read_text() for rank in ranks)
    assert codes == [0, 0], output
    # The file has more digits than the log. Evaluations stand in the log alone.
    start = json.loads((folder / "metrics").read_text().splitlines()[0])
    evaluated = re.search(rf"validation loss at iteration {STEPS} \| lm loss value: (\S+)", output)
    assert evaluated is not None, output
    export_checkpoint(folder / "run" / f"iter_{STEPS:07d}", folder / "back", vocab_size=VOCAB)
    again = opened(folder / "back")
    for name, ours, want in (
        ("first step", start["losses"]["lm loss"], theirs(model, first)),
        ("evaluation", float(evaluated[1]), theirs(again, last)),
    ):
        off = abs(ours / want - 1)
        print(f"  {name}: {ours:.8f} here, {want:.8f} in transformers, {off:.1e} apart", flush=True)
        if not off <= CLOSE:
            yield f"loss of the {name}: {ours}, and {want} in transformers"
    if not abs(theirs(model, last) / theirs(again, last) - 1) > 1e-3:
        yield "20 steps have changed nothing"


@dataclass(frozen=True)
class Flags:
    """Continue pretraining on two ranks, and compare losses with transformers."""

    sets: tuple[str, ...] = tuple(SETS)
    """Which; all by default."""


def main() -> None:
    options = parse(Flags, sys.argv[1:])
    sys.path.append(str(ROOT / "tests" / "support"))
    wrong = 0
    for name in options.sets:
        case = SETS[name]
        print(f"{name}: {case.family}, {case.layout}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for line in problems(case, Path(folder)):
                wrong += 1
                print(f"  DIFFERS: {line}", flush=True)
    print(f"{len(options.sets)} continued, {wrong} differ")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    stop.run(lambda _: main())
