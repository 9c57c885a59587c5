"""pretrain_gpt.py that writes each step to a file with all digits: what tools/gpu_check.py compares.

PYTHONPATH=. python tools/recorded_run.py steps.jsonl <flags of pretrain_gpt.py>
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapipe.config import Config
from megapipe.distributed.device import memory_bytes, peak_tflops, synchronize
from megapipe.errors import UserError
from megapipe.flags.parse import parse, stop
from megapipe.models.provider import gpt_provider
from megapipe.plan import make_plan
from megapipe.training.flops import flops_per_token
from megapipe.training.pretrain import Run, pretrain
from megapipe.training.seams import Callback, Seams
from megapipe.training.step import StepResult
from pretrain_gpt import forward_step


class Recorder(Callback):
    """Rank 0 adds a line per step: iteration, loss, norm, skipped, seconds, tokens_per_second, tflops of a device, and
    on a GPU its mfu, its peak memory and the plan's prediction of that in bytes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.began = 0.0

    def before_step(self, run: Run) -> None:
        self.began = time.perf_counter()

    def after_step(self, run: Run, result: StepResult) -> None:
        device, config = run.mesh.device, run.config
        synchronize(device)
        seconds = time.perf_counter() - self.began
        if run.mesh.world.rank:
            return
        rate = config.global_batch_size * config.train.sequence / seconds
        line: dict[str, Any] = {
            "iteration": run.progress.iteration,
            "loss": result.losses["lm loss"],
            "norm": result.grad_norm,
            "skipped": result.skipped,
            "seconds": seconds,
            "tokens_per_second": rate,
            "tflops": rate * flops_per_token(config.model, config.train.sequence) / config.world_size / 1e12,
        }
        if most := peak_tflops(device):
            line["mfu"] = line["tflops"] / most
        if peak := memory_bytes(device).get("mem-max-allocated-bytes"):
            line |= {"peak": peak, "predicted_peak": make_plan(config).peak_bytes[run.mesh.pp.rank]}
        with self.file.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def main(argv: Sequence[str]) -> None:
    pretrain(parse(Config, argv[1:]), gpt_provider, forward_step, seams=Seams(callbacks=(Recorder(Path(argv[0])),)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, KeyboardInterrupt) as error:
        stop(error)
