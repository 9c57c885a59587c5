"""Paste the flags of searched plans, and see that a run with them has the plan that was promised.

    python -m tools.proofs.inputs.pasted --cases 200

Each draw is a small model, a number of devices, their memory and rates, and the user's own layout
flags. `plan --search` runs as a user's command does. The flags of every plan of its list are put
after the user's own flags, and the plan of that command line has to have the same digest, the same
seconds and the same peak.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megapipe.commands.plan.main import main as plan_command
from megapipe.errors import ScheduleError, UserError
from megapipe.flags.parse import parse, run
from tools.proofs.shrink import Draws, Fuzzer

BASE = (
    "--train-iters 9 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --bf16 --seq-length 64 "
    "--max-position-embeddings 64 --num-attention-heads 4"
)
MODELS = (
    "--num-layers 4 --hidden-size 64",
    "--num-layers 8 --hidden-size 32 --swiglu --normalization RMSNorm --disable-bias-linear",
    "--num-layers 6 --hidden-size 64 --untie-embeddings-and-output-weights",
    "--num-layers 4 --hidden-size 32 --num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 2",
    "--num-layers 4 --hidden-size 64 --mtp-num-layers 1",
)
OWN = (
    "",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --micro-batch-size 1",
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule "
    "interleaved",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--pipeline-model-parallel-size 2 --enable-zero-bubble --activations-checkpoint-method uniform",
    "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --recompute-activations",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer",
    "--pipeline-model-parallel-size 2 --pipeline-slices 2",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h2 --enable-optimizer-post-validation",
)
RATES: tuple[dict[str, float], ...] = (
    {},
    {"flops": 1e11, "inside": 1e9, "outside": 1e8, "overhead": 1e-5, "node": 2},
    {"flops": 1e12, "inside": 1e10, "outside": 1e9, "overhead": 1e-6, "node": 4},
)


def drawn(random: Random, folder: Path) -> list[str]:
    """Return the words of a command line without --search."""
    rates = folder / "rates.json"
    rates.write_text(json.dumps(random.choice(RATES)))
    vocab = random.choice((100, 1000))
    words = f"{BASE} {random.choice(MODELS)} {random.choice(OWN)} --vocab-size {vocab}"
    words += f" --global-batch-size {random.choice((4, 8, 16))} --rates {rates}"
    return [*words.split(), "--world-size", random.choice("1248")]


def asked(words: list[str], folder: Path) -> Any:
    """Return the numbers that `megapipe plan` writes for a command line."""
    out = folder / "out.json"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        plan_command([*words, "--json", str(out)])
    return json.loads(out.read_text())


def differences(words: list[str], found: dict[str, Any], folder: Path) -> str:
    """Return how the plan of the pasted flags differs from the found one; empty if it does not."""
    try:
        made = asked([*words, *found["flags"]], folder)
    except (UserError, ScheduleError) as error:
        return f"refused: {error}"
    told = (found["plan"], found["step_s"], found["peak_bytes"])
    is_now = (made["plan"], made["step"]["predicted"]["seconds"], max(made["peak_bytes"]))
    return "" if told == is_now else f"{told} became {is_now}"


@dataclass(frozen=True)
class Search:
    """The words of a command line without --search, and the memory of a device."""

    words: list[str]
    memory: str

    def __str__(self) -> str:
        """Return it as it is typed."""
        return shlex.join([*self.words, "--search", "--memory-gib", self.memory])


@dataclass(frozen=True)
class Flags(Draws):
    """Paste the flags of searched plans, and see that a run with them has the promised plan."""

    cases: float = 200
    """Number of searches."""


def main(argv: Sequence[str]) -> None:
    """Draw, and end with 1 where a plan's flags make another one."""
    plans, flags = Counter[bool](), parse(Flags, argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def draw(dice: Random) -> Search:
            return Search(drawn(dice, folder), dice.choice(("0.01", "0.02", "0.1", "80")))

        def paste(search: Search) -> list[str]:
            given = ["--search", "--memory-gib", search.memory, "--search-jobs", "1"]
            best = asked([*search.words, *given], folder)["plans"]
            plans[bool(best)] += len(best) or 1
            told = [(found, differences(search.words, found, folder)) for found in best]
            return [f"{shlex.join(found['flags'])}\n   {text}" for found, text in told if text]

        fuzzer = Fuzzer("pasted", draw, paste)
        fuzzer.prove(flags)
    print(f"{fuzzer.count} searches, {plans[False]} without a plan, {plans[True]} plans, 0 differ")


if __name__ == "__main__":
    run(main)
