"""The numbers of a training's iterations, from its --metrics-file."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

GIB = 2**30
Steps = dict[int, dict[str, Any]]
"""The numbers of each iteration. A GPU adds the peak memory of rank 0, in bytes."""


def step_of(line: str) -> dict[str, Any]:
    """Return the numbers of a line of --metrics-file; MFU and memory only if they are known."""
    logged = json.loads(line)
    loss = logged["losses"]["lm loss"]
    step = {name: logged[name] for name in ("iteration", "skipped", "tokens_per_second")}
    # JSON has no NaN; the file has null in its place.
    step["loss"] = math.nan if loss is None else loss
    step["norm"] = logged["grad_norm"]
    step["tflops"] = logged["tflops_per_device"]
    if logged["mfu"] is not None:
        step["mfu"] = logged["mfu"]
    if "peak_gib" in logged:
        step["peak"] = logged["peak_gib"][0] * GIB
        step["predicted_peak"] = logged["predicted_peak_gib"][0] * GIB
    return step


def median(steps: Steps, name: str) -> float | None:
    """Return the median of a number over the steps that have it; None if no step has.

    Args:
        name: the name of the number in --metrics-file.
    """
    found = [step[name] for step in steps.values() if name in step]
    return statistics.median(found) if found else None


def speed(steps: Steps) -> str:
    """Return the medians of tokens per second, TFLOP/s and MFU, and the memory, in words.

    MFU and memory are left out if they are unknown.
    """
    text = f"{median(steps, 'tokens_per_second'):,.0f} tokens/s"
    text += f", {median(steps, 'tflops'):.3g} TFLOP/s"
    if (mfu := median(steps, "mfu")) is not None:
        text += f", MFU {mfu:.1%}"
    last = [*steps.values()][-1]
    if "peak" in last:
        text += f"; peak {last['peak'] / GIB:.2f} GiB, predicted {last['predicted_peak'] / GIB:.2f}"
    return text
