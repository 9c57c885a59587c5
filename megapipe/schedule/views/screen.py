"""A schedule as a picture within a page that has other pictures, such as a notebook."""

from __future__ import annotations

import re
from hashlib import sha256

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Schedule
from megapipe.schedule.views.draw import to_svg

MOST_PASSES = 20_000
"""Most passes of a picture in a page. More make an SVG of megabytes, which stalls a browser."""
_STYLE = re.compile(r"(?<=<style>).*?(?=</style>)", re.DOTALL)
_SELECTOR = re.compile(r"[^{}]+(?=\{)")


def picture(schedule: Schedule, costs: Costs = UNIT, memory: float | None = None) -> str | None:
    """Return the SVG of a schedule for a web page or notebook.

    The picture's styles do not affect other pictures on the page. Returns None for a schedule of
    more than `MOST_PASSES` passes. Jupyter then prints a line of text instead.

    Args:
        memory: a limit on a rank's activation to draw, in the unit of costs.mem_b; None for none.
    Raises: ScheduleError if the schedule cannot proceed.
    """
    if sum(map(len, schedule.steps())) > MOST_PASSES:
        return None
    text = to_svg(schedule, costs, memory)
    # A page applies the styles of each picture to all of them, and class c0 is another colour in
    # each. Equal pictures have equal names, so a notebook that runs again has equal outputs.
    name = f"p{sha256(text.encode()).hexdigest()[:12]}"
    text = text.replace("<svg ", f'<svg id="{name}" ', 1)
    return _STYLE.sub(lambda style: _SELECTOR.sub(rf"#{name} \g<0>", style[0]), text, count=1)
