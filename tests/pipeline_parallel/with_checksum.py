"""A program in which the family of docs/extending.md exists; what becomes of it is printed as JSON.

It runs where the package that is imported has the changes of that page: test_checksum.py makes them in a copy.
"""

import json
from dataclasses import replace

from short_run import config, datasets, run_of
from tiny import STYLES

from megapipe.errors import ScheduleError
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Costs, Kind, Pass, build, from_json, simulate, to_json, verify
from megapipe.schedule.families.checksum import with_checksums
from megapipe.schedule.views.draw import to_svg
from megapipe.schedule.views.terminal import to_terminal

STEPS = 3


def checked(ranks, microbatches):
    return with_checksums(build("1f1b", ranks, microbatches))


def train(mesh, schedule):
    training = run_of(mesh, config(STYLES["gpt2"], pp=2, dp=2, schedule=schedule))
    sums, losses = [], []
    for _ in range(STEPS):
        sums.append([sum(p.detach().double().sum().item() for p in x.parameters()) for x in training.run.modules])
        losses.append(training.driver.whole().losses["lm loss"])
    return {"sums": sums, "losses": losses, "seen": training.run.stages.engine.kept["checksum"]}


def main():
    plain, table, costs = build("1f1b", 2, 4), checked(2, 4), Costs(k=0.5)
    verify(table)
    again = replace(table, ranks=tuple((*row[1:], row[0]) for row in table.ranks))
    try:
        verify(again)
        late = ""
    except ScheduleError as error:
        late = str(error)
    time = simulate(table, costs)
    k = Pass(Kind.K, 1, 0)
    datasets()
    told = {
        "late": late,
        "of a checksum": [time.start[k], time.end[k]],
        "makespans": [simulate(plain, costs).makespan, time.makespan],
        "same": from_json(to_json(table)) == table,
        "terminal": to_terminal(table, costs),
        "svg": to_svg(table, costs),
        "checked": run_threads(lambda mesh: train(mesh, f"{__file__}:checked"), pp=2, dp=2),
        "plain": run_threads(lambda mesh: train(mesh, "1f1b"), pp=2, dp=2),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
