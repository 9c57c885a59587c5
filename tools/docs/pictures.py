"""Pictures of docs/: every schedule, and each figure by its command in docs/figures.md.

python tools/docs/pictures.py [NAME ...]
    names of docs/schedules/*.svg or docs/figures/*.svg; all by default
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from megapipe.commands import schedules  # noqa: E402
from megapipe.schedule import SCHEDULES, Costs, build  # noqa: E402
from megapipe.schedule.families.vocabulary.shares import with_vocabulary  # noqa: E402
from megapipe.schedule.patterns import SLICED  # noqa: E402
from megapipe.schedule.views.draw import to_svg  # noqa: E402

SHOWN: dict[str, dict[str, Any]] = {name: {"ranks": 4, "microbatches": 8} for name in SCHEDULES}
SHOWN["naive"]["microbatches"] = 3
SHOWN["zb-auto"] = {**SHOWN["1f1b"], "placement": "v", "costs": Costs(10, 14, 7), "memory": 3.0}
# Moves are counted, not timed: the same picture on every machine with a C compiler.
SHOWN["zb-auto"] |= {"effort": 1.0}
SHOWN |= {name: {"ranks": 4, "microbatches": 2, "slices": 4} for name in SLICED}
SHOWN["1f1b-vocabulary"] = {**SHOWN["1f1b"], "costs": Costs(s=0.5, t=0.25)}
"""What docs/schedules.md shows of each."""
PARTS = {
    "1f1b-slices": "1f1b --pp 4 --microbatches 2 --slices 4 --attention-share 0.6",
    "1f1b-offload": "1f1b --pp 4 --microbatches 4 --copy-ratio 0.5",
    "breadth-first-sharded": "breadth-first --pp 2 --microbatches 4 --chunks 4 "
    "--shard 0.5,1,1,2 --memory 5.2",
    "breadth-first-reduced": "breadth-first --pp 2 --microbatches 4 --step 2,0,0",
    "zb-h2-two-steps": "zb-h2 --pp 4 --microbatches 6 --step 0,0 --post-validation",
    "interleaved-zb-pairs": "interleaved-zb --chunks 2 --pp 4 --microbatches 8 --costs 10,11,8 "
    "--comm-share 0.23 "
    "--pairs",
}
"""What other pages show by `megapipe schedules show`: pictures of the commands that stand there."""
_COMMAND = re.compile(r"^python (tools/.*--svg docs/figures/[\w-]+\.svg)$", re.M)
FIGURES = {
    Path(words[-1]).stem: words
    for words in map(
        shlex.split, _COMMAND.findall((ROOT / "docs" / "figures.md").read_text(encoding="utf-8"))
    )
}
"""Commands of the page by the picture that they make; what was measured needs its run again, and is
not among them.
"""


def drawn(name: str) -> str:
    """A schedule as the docs show it."""
    if name in PARTS:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            path = Path(folder) / f"{name}.svg"
            schedules.main(["show", *shlex.split(PARTS[name]), "--svg", str(path)])
            return path.read_text(encoding="utf-8")
    of = SHOWN[name]
    made = build(name.removesuffix("-vocabulary"), **of)
    made = with_vocabulary(made, of["costs"]) if name.endswith("-vocabulary") else made
    return to_svg(made, of.get("costs", Costs()), of.get("memory"))


def main(names: list[str]) -> int:
    known = [*SHOWN, *PARTS, *FIGURES]
    if unknown := [name for name in names if name not in known]:
        print(
            f"pictures.py: error: no picture {', '.join(unknown)}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    for name in names or known:
        if name in SHOWN or name in PARTS:
            (ROOT / "docs" / "schedules" / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        else:
            subprocess.run([sys.executable, *FIGURES[name]], cwd=ROOT, check=True)
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
