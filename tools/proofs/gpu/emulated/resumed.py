"""Resume whole programs on emulated devices, in the layout that has saved and in another one.

    python -m tools.proofs.gpu.emulated.resumed [--quick]

The layout that has saved goes on with the same digits of loss and norm, another one within
rounding. A review has found that the first did not, on a GPU alone: a DTensor copies what lies on
the host, and the optimizer kept what it had.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.flags import stop
from megapipe.flags.parse import parse
from tools.proofs.gpu.emulated.launch import start

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --mock-data --tokenizer-type NullTokenizer --vocab-size 95 "
    "--make-vocab-size-divisible-by 128 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--log-interval 1 --use-distributed-optimizer --train-iters 4 --split 1,0,99 "
)
BF16 = "--bf16 "
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
SP = TP + "--sequence-parallel "
EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
LAYOUTS: tuple[tuple[int, str, str, int, str], ...] = (
    (2, BF16, TP, 2, PP),
    (4, BF16, TP, 4, PP),
    (4, BF16 + "--swiglu ", PP + TP, 2, ""),
    # In bf16 only a layout with the same tensor parallelism. Each of two ranks rounds its summand
    # of a product to bf16, where one rank rounds the product. Logits of a router then differ by an
    # ulp, a token goes to another expert, and a norm is 0.8% off. In float32 no token does.
    (4, BF16 + EXPERTS, SP, 8, PP + SP),
    (4, EXPERTS, SP, 4, PP),
    (4, BF16 + "--use-megatron-fsdp ", TP, 2, ""),
)
"""Ranks, what is trained, how it lies over the ranks; and ranks and layout of who resumes."""
WITHIN = 2e-3
Steps = dict[int, tuple[float, float]]
"""Loss and norm of each iteration."""


def _steps(texts: Sequence[str]) -> Steps:
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)", "\n".join(texts))
    return {int(n): (float(loss), float(norm)) for n, loss, norm in found}


def differs(folder: Path, ranks: int, model: str, flags: str, others: int, layout: str) -> str:
    """Save after two of four steps, and resume both ways. Returns: what differs, or nothing."""
    given = FLAGS + model
    save = f"--save {folder / 'saved'} --save-interval 2"
    whole = _steps(start(ranks, (given + flags + save).split(), folder / "whole"))
    load = f"--load {folder / 'saved'} --ckpt-step 2"
    for count, how, within in ((ranks, flags, 0.0), (others, layout, WITHIN)):
        went_on = _steps(start(count, (given + how + load).split(), folder / "resumed"))
        if sorted(went_on) != [3, 4]:
            return f"{how} resumes with the steps {sorted(went_on)}"
        for n, numbers in went_on.items():
            for mine, theirs in zip(numbers, whole[n], strict=True):
                if abs(mine - theirs) > within * abs(theirs):
                    return f"{how}: step {n} has {numbers}, not {whole[n]}"
    return ""


@dataclass(frozen=True)
class Flags:
    """Resume whole programs on emulated devices, in two layouts each."""

    quick: bool = False
    """The first program alone."""


def main(argv: Sequence[str]) -> int:
    """Resume each program, and return the status to end with."""
    layouts = LAYOUTS[:1] if parse(Flags, argv).quick else LAYOUTS
    failed = 0
    for ranks, model, flags, others, layout in layouts:
        folder = Path(tempfile.mkdtemp(prefix="resumed-"))
        said = differs(folder, ranks, model, flags, others, layout)
        failed += bool(said)
        print(f"{ranks} ranks, {model}{flags}: {said or 'goes on as if it had not ended'}")
        sys.stdout.flush()
        shutil.rmtree(folder)
    print(f"{len(layouts)} programs, {failed} fail", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    stop.run(main)
