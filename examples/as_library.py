"""megapipe as a library, 20 lines: compare schedules for measured times, then train under the best."""

import megapipe as mp

COSTS = mp.Costs(f=10, b=11, w=8, comm=1)


def bubble(table: mp.Schedule) -> float:
    """Return the bubble's share of a step."""
    time = mp.simulate(table, COSTS)
    return time.bubble / time.period


def best(ranks: int, microbatches: int, memory: float) -> mp.Schedule:
    """Return the fastest of four schedules within a memory limit, in microbatches of 1/p of the model."""
    found = mp.compare(ranks, microbatches, ["zb-h1", "zb-v", "dualpipe-v"], costs=COSTS, memory=memory)
    row = min((row for row in found.measured if row.fits), key=lambda row: row.makespan)
    return mp.build(row.label, ranks, microbatches, costs=COSTS)


def train(table: mp.Schedule, flags: list[str]) -> None:
    """Check a run of this schedule, print its plan, and train."""
    mp.save(table, "best.json")
    config = mp.parse(mp.Config, [*flags, "--pipeline-schedule", "best.json"])
    print(mp.check(config), mp.make_plan(config).peak_bytes)
    mp.pretrain(config)
