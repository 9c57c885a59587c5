"""Compute logged numbers that need more than an attribute, see numbers.py."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.plan import GIB
from megapipe.schedule.views.lanes import Copied
from megapipe.training.report.counters import Measured
from megapipe.training.report.moment import Moment


def brief(x: float) -> str:
    """Return a number x as three digits and a letter, such as 1.23M."""
    for letter in ("", "k", "M", "G"):
        # 999.5 would be rounded to 1000.
        if x < 999.5:
            return f"{x:.3g}{letter}"
        x /= 1000
    return f"{x:.3g}T"


def speed(moment: Moment) -> tuple[str, float]:
    """Return unit and speed of a device; a small model on a laptop has GFLOP/s."""
    if 0 < moment.tflops < 0.1:
        return "GFLOP/s", moment.tflops * 1000
    return "TFLOP/s", moment.tflops


def bubble(now: Measured) -> tuple[float, str, float] | None:
    """Return the bubble, a text with its parts (see LEGEND), and its prediction.

    Returns None without a pipeline.
    """
    if len(now.ranks) == 1:
        return None
    shares = parts(now)
    # The simulated parts can add up to more than the bubble.
    rest = shares.pop("messages")
    shares["residual" if round(rest, 3) < 0 else "messages"] = rest
    text = ", ".join(f"{name} {x:z.1%}" for name, x in shares.items())
    return now.bubble, text, now.predicted_bubble


def parts(now: Measured) -> dict[str, float]:
    """Return the parts of the bubble by name."""
    return {
        "table": now.of_table,
        "stages": now.of_stages,
        "host": now.of_host,
        "messages": now.of_messages,
    }


def exposed(now: Measured) -> float | tuple[float, float] | None:
    """Return exposed communication as a share of `passes`, with its prediction if there is one.

    Returns None if passes have no collectives.
    """
    if now.exposed_communication is None:
        return None
    share = now.exposed_communication / now.passes
    if now.predicted_exposed is None:
        return share
    return share, now.predicted_exposed / now.predicted_passes


def exposed_text(now: Measured) -> str | None:
    """Return the text of `exposed` for a line, or None."""
    shares = exposed(now)
    if shares is None:
        return None
    if isinstance(shares, tuple):
        return f"{shares[0]:.1%}, predicted {shares[1]:.1%}"
    return f"{shares:.1%}"


def peaks(now: Measured) -> tuple[list[float], list[float]] | None:
    """Return each rank's peak in GiB, measured and predicted; None on CPUs."""
    if not now.peak_bytes:
        return None
    measured = [x / GIB for x in now.peak_bytes]
    predicted = [x / GIB for x in now.predicted_peaks]
    return measured, predicted


def highest(now: Measured) -> tuple[float, int, float] | None:
    """Return the highest peak, its rank, and the prediction for that rank; None on CPUs."""
    both = peaks(now)
    if both is None:
        return None
    measured, predicted = both
    held, rank = max((x, rank) for rank, x in enumerate(measured))
    return held, rank, predicted[rank]


def stages(now: Measured) -> tuple[list[dict[str, float]], ...]:
    """Return f, b and w in ms at each position of the chain, measured and predicted."""
    found = []
    for costs in (now.costs, now.predicted):
        rows = zip(costs.f, costs.b, costs.w, strict=True)  # type: ignore[arg-type]
        found.append([{"f": f * 1e3, "b": b * 1e3, "w": w * 1e3} for f, b, w in rows])
    return tuple(found)


def stage_ms(now: Measured) -> dict[str, float]:
    """Return measured times in ms by position and kind, such as 0-F."""
    found = {}
    for at, times in enumerate(stages(now)[0]):
        for kind, ms in times.items():
            found[f"{at}-{kind.upper()}"] = ms
    return found


def ranks(now: Measured) -> list[dict[str, float]]:
    """Return the time of each pipeline rank in ms, by use."""
    found = []
    for r in now.ranks:
        times = {
            "busy": r.busy * 1e3,
            "waited": r.waited * 1e3,
            "host": (r.idle - r.waited) * 1e3,
            "makespan": r.makespan * 1e3,
        }
        found.append(times)
    return found


def copies(now: Measured) -> tuple[list[dict[str, float]], list[dict[str, float]]] | None:
    """Return the times of each rank's copies in ms, measured and predicted; None without copies."""
    if not now.copies:
        return None

    def in_ms(ranks: Sequence[Copied]) -> list[dict[str, float]]:
        names = Copied._fields
        return [dict(zip(names, (x * 1e3 for x in r), strict=True)) for r in ranks]

    return in_ms(now.copies), in_ms(now.predicted_copies)


def exposed_copies(now: Measured) -> tuple[float, ...] | None:
    """Return the longest delay of a rank by copies in ms, measured and predicted, or None."""
    both = copies(now)
    if both is None:
        return None
    return tuple(max(times["exposed"] for times in ranks) for ranks in both)


def most_exposed(now: Measured) -> tuple[float, ...] | None:
    """Return the rank that waits for copies most, its copies in ms, and their prediction.

    Returns None without copies.
    """
    both = copies(now)
    if both is None:
        return None
    measured, predicted = both
    # The rank that waits most delays all others.
    rank = max(range(len(measured)), key=lambda rank: measured[rank]["exposed"])
    return rank, *measured[rank].values(), *predicted[rank].values()


def per_layer(moment: Moment) -> dict[str, float]:
    """Return each router's losses by name and layer."""
    found = {}
    for name, row in moment.result.routed.per_layer.items():
        for n, x in enumerate(row):
            found[f"{name}_layer_{n}"] = x
    return found


def busiest_load(moment: Moment) -> float | None:
    """Return the load of the busiest expert, in means of its layer; None without experts."""
    busiest = moment.result.routed.busiest
    return None if busiest is None else busiest[0]


def slow_texts(moment: Moment) -> list[str] | None:
    """Return a text on each slow stage and link; None before anything was measured."""
    if moment.now is None or moment.counters is None:
        return None
    return [slow.text for slow in moment.counters.slow]
