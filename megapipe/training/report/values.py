"""Compute logged numbers that need more than an attribute, see numbers.py."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.plan import GIB
from megapipe.schedule.views.lanes import Copied
from megapipe.training.report.compared import Measured
from megapipe.training.report.moment import Moment


def brief(x: float) -> str:
    """Return a number x with three digits and, from 1000 on, a letter: 12.3, 1.23M."""
    for letter in ("", "k", "M", "G"):
        # 999.5 would be rounded to 1000.
        if x < 999.5:
            return f"{x:.3g}{letter}"
        x /= 1000
    return f"{x:.3g}T"


def speed(moment: Moment) -> tuple[str, float]:
    """Return (unit, speed of a device) for a line of the log.

    The unit is GFLOP/s below 0.1 TFLOP/s, such as on a laptop, else TFLOP/s.

    Args:
        moment: the state of the run to report.
    """
    if 0 < moment.tflops < 0.1:
        return "GFLOP/s", moment.tflops * 1000
    return "TFLOP/s", moment.tflops


def bubble(steps: Measured) -> tuple[float, str, str, float] | None:
    """Return (bubble, text with its parts, how it is predicted, predicted bubble).

    The bubble is a fraction of the passes' time. The parts are what causes it: table, stages, host
    and messages. Returns None without a pipeline.
    """
    if len(steps.ranks) == 1:
        return None
    shares = parts(steps)
    # The simulated parts can add up to more than the bubble.
    rest = shares.pop("messages")
    shares["residual" if round(rest, 3) < 0 else "messages"] = rest
    text = ", ".join(f"{name} {x:z.1%}" for name, x in shares.items())
    return steps.bubble, text, steps.by, steps.predicted_bubble


def parts(steps: Measured) -> dict[str, float]:
    """Return {part of the bubble: fraction of the passes' time}.

    The keys are table, stages, host and messages.
    """
    return {
        "table": steps.of_table,
        "stages": steps.of_stages,
        "host": steps.of_host,
        "messages": steps.of_messages,
    }


def again(steps: Measured) -> dict[str, float] | None:
    """Return the prediction from the first steps' passes; None before there is one.

    The keys are bubble, a share of the passes' time, and step_ms.
    """
    if steps.again is None:
        return None
    return {"bubble": steps.again.bubble, "step_ms": steps.again.step * 1e3}


def exposed(steps: Measured) -> float | tuple[float, float] | None:
    """Return exposed communication, in which passes wait for collectives, as a share of `passes`.

    Returns (share, predicted share) if there is a prediction, and None without collectives.
    """
    if steps.exposed_communication is None:
        return None
    share = steps.exposed_communication / steps.passes
    if steps.predicted_exposed is None:
        return share
    return share, steps.predicted_exposed / steps.predicted_passes


def exposed_text(steps: Measured) -> str | None:
    """Return the text of exposed communication for a line; None without collectives."""
    shares = exposed(steps)
    if shares is None:
        return None
    if isinstance(shares, tuple):
        return f"{shares[0]:.1%}, predicted {shares[1]:.1%}"
    return f"{shares:.1%}"


def peaks(steps: Measured) -> tuple[list[float], list[float]] | None:
    """Return (measured, predicted): each rank's peak memory in GiB; None on CPUs."""
    if not steps.peak_bytes:
        return None
    measured = [x / GIB for x in steps.peak_bytes]
    predicted = [x / GIB for x in steps.predicted_peaks]
    return measured, predicted


def highest(steps: Measured) -> tuple[float, int, float] | None:
    """Return (highest peak in GiB, rank that has it, the rank's predicted peak); None on CPUs."""
    both = peaks(steps)
    if both is None:
        return None
    measured, predicted = both
    held, rank = max((x, rank) for rank, x in enumerate(measured))
    return held, rank, predicted[rank]


def stages(steps: Measured) -> tuple[list[dict[str, float]], ...]:
    """Return (measured, predicted): for each stage of the model a dict of ms by f, b and w."""
    found = []
    for costs in (steps.costs, steps.predicted):
        rows = zip(costs.f, costs.b, costs.w, strict=True)  # type: ignore[arg-type]
        found.append([{"f": f * 1e3, "b": b * 1e3, "w": w * 1e3} for f, b, w in rows])
    return tuple(found)


def stage_ms(steps: Measured) -> dict[str, float]:
    """Return {stage and kind of pass, such as 0-F: measured ms}."""
    found = {}
    for at, times in enumerate(stages(steps)[0]):
        for kind, ms in times.items():
            found[f"{at}-{kind.upper()}"] = ms
    return found


def ranks(steps: Measured) -> list[dict[str, float]]:
    """Return, for each pipeline rank, a dict of the times of a step in ms.

    The times are busy (in passes), waited (for inputs) and host (the rest between passes). A
    fourth, makespan, is from the first request for an input to the end of the last pass.
    """
    found = []
    for r in steps.ranks:
        times = {
            "busy": r.busy * 1e3,
            "waited": r.waited * 1e3,
            "host": (r.idle - r.waited) * 1e3,
            "makespan": r.makespan * 1e3,
        }
        found.append(times)
    return found


def copies(steps: Measured) -> tuple[list[dict[str, float]], list[dict[str, float]]] | None:
    """Return (measured, predicted): for each rank a dict of its copies' times in ms.

    The keys are out (to the host), back, and exposed (passes waited). Returns None without copies.
    """
    if not steps.copies:
        return None

    def in_ms(ranks: Sequence[Copied]) -> list[dict[str, float]]:
        names = Copied._fields
        return [dict(zip(names, (x * 1e3 for x in r), strict=True)) for r in ranks]

    return in_ms(steps.copies), in_ms(steps.predicted_copies)


def exposed_copies(steps: Measured) -> tuple[float, ...] | None:
    """Return two times in ms, (measured, predicted): the longest wait of a rank for copies.

    Returns None without copies.
    """
    both = copies(steps)
    if both is None:
        return None
    return tuple(max(times["exposed"] for times in ranks) for ranks in both)


def most_exposed(steps: Measured) -> tuple[float, ...] | None:
    """Return seven numbers: (rank, out, back, exposed, predicted out, back and exposed).

    The rank is the one whose passes wait longest for copies. Times are in ms. Returns None without
    copies.
    """
    both = copies(steps)
    if both is None:
        return None
    measured, predicted = both
    # The rank that waits most delays all others.
    rank = max(range(len(measured)), key=lambda rank: measured[rank]["exposed"])
    return rank, *measured[rank].values(), *predicted[rank].values()


def per_layer(moment: Moment) -> dict[str, float]:
    """Return {name with layer, such as NAME_layer_0: loss of the MoE router}."""
    found = {}
    for name, row in moment.result.routed.per_layer.items():
        for n, x in enumerate(row):
            found[f"{name}_layer_{n}"] = x
    return found


def busiest_load(moment: Moment) -> float | None:
    """Return the load of the busiest expert, divided by the mean load of its layer's experts.

    Returns None without experts.
    """
    busiest = moment.result.routed.busiest
    return None if busiest is None else busiest[0]


def slow_texts(moment: Moment) -> list[str] | None:
    """Return a sentence on each slow stage and link; None before anything was measured."""
    if moment.now is None or moment.counters is None:
        return None
    return [slow.text for slow in moment.counters.slow]
