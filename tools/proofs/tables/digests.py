"""Digests of tables, to see that a change of how tables are made changes none of them.

    python -m tools.proofs.tables.digests --draw 3000 --write digests.jsonl     # before the change
    python -m tools.proofs.tables.digests --against digests.jsonl               # after it

Recipes are drawn as command lines, because these stay when the code behind them changes. A line of
a run gives two tables: that of its whole batch with all passes of a step, as training has it, and
that of the first size of a batch that grows to it. A line of `megapipe schedules show` gives one.
Of each table the file has a hash, the makespan and the largest peak in the units of its costs, and
the number of messages. Lines that are refused are drawn again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from megapipe.checks.run import validate
from megapipe.commands import schedules
from megapipe.config import Config
from megapipe.config.layers import inline
from megapipe.errors import UserError
from megapipe.flags.parse import parse
from megapipe.plan import Plan, make_plan, whole_step
from megapipe.plan.make import with_batch
from megapipe.schedule import SCHEDULES, Costs, Schedule, simulate
from megapipe.schedule.lower import Exchange, lower
from megapipe.schedule.text import load, to_json
from megapipe.training.check import as_here

NAMES = [name for name, entry in SCHEDULES.items() if not entry.searched]
VOCAB = 128
MODELS = {
    "gpt2": "--kv-channels 16",
    "llama": (
        "--normalization RMSNorm --swiglu --ffn-hidden-size 96 --disable-bias-linear "
        "--position-embedding-type rope "
        "--untie-embeddings-and-output-weights"
    ),
    "odd": "--per-layer-overrides "
    """'{"1": {"ffn_hidden_size": 256}, "2": {"window_size": "8,0"}}'""",
    "experts": "--num-experts 4 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall",
}
FEATURES = {
    "slices": ("--pipeline-slices 2", "--pipeline-slices 4"),
    "pairs": ("--overlap-moe-expert-parallel-comm",),
    "depths": ("--mtp-num-layers 1", "--mtp-num-layers 2"),
    "vocabulary": ("--vocab-parallel-pipeline",),
    "copies": (
        "--fine-grained-activation-offloading --offload-time 0.1",
        "--fine-grained-activation-offloading --offload-time 0.3 --activation-offload-fraction 0.5",
    ),
    "recompute": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--num-microbatches-with-partial-activation-checkpoints 1",
    ),
    "sharding": (
        "--use-distributed-optimizer",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    ),
    "reduction": ("--overlap-grad-reduce", "--overlap-grad-reduce --ddp-num-buckets 2"),
    "gather": ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",),
    "validation": ("--enable-optimizer-post-validation --post-validation-after 0",),
    "layout": ("--pipeline-model-parallel-layout auto",),
}
"""What flags of a run change in its table."""

SHOWN = {
    "slices": ("--slices 2", "--slices 4 --attention-share 0.4", "--slices 2 --cuts equal"),
    "pairs": ("--pairs --comm-share 0.3",),
    "vocabulary": ("--vocabulary 0.5,0.25",),
    "copies": ("--copy-ratio 0.5", "--copy-ratio 1"),
    "solve": ("--copy-ratio 0.5 --memory 3 --solve",),
    "shard": ("--shard 0.3,0.3",),
    "step": ("--step 2,0.5", "--step 2,0.5,1"),
    "validation": ("--step 2,0.5,0,0.2 --post-validation",),
}
"""The same of `schedules show`."""
COSTS = ("1,1,1", "1,1.2,0.8", "1,1,1,0.1", "10,11,8,0,3", "2,2,1,0.3,0.05")
"""What F, B, W, a message and the overhead of a pass take."""

_SMALL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--mock-data --lr 1e-3 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --padded-vocab-size {VOCAB} "
    "--micro-batch-size 1 "
    "--train-iters 1 --distributed-backend gloo"
)


def drawn_run(dice: Random) -> str:
    """Return a line of flags of a run, legal or not, with its number of processes before it."""
    name = dice.choice(NAMES) if dice.random() < 0.97 else "zb-auto"
    pp = dice.choice((2, 2, 3, 4, 4, 6, 8))
    microbatches = pp * dice.choice((1, 2, 3, 4))
    chunks = dice.choice((2, 3)) if name in SCHEDULES and SCHEDULES[name].any_chunks else None
    stages = pp * (chunks or 2)
    chosen = dice.sample(list(FEATURES), dice.choice((0, 1, 1, 2, 2, 2, 3)))
    parts = [dice.choice(FEATURES[feature]) for feature in chosen]
    model = "experts" if "pairs" in chosen else dice.choice(list(MODELS))
    dp = 2 if {"sharding", "reduction", "gather", "pairs"} & set(chosen) else 1
    experts = " --expert-model-parallel-size 2" if model == "experts" and dp == 2 else ""
    virtual = f" --num-virtual-stages-per-pipeline-rank {chunks}" if chunks else ""
    return (
        f"{pp * dp} --pipeline-schedule {name} --pipeline-model-parallel-size {pp}{virtual} "
        f"--num-layers {stages} "
        f"--global-batch-size {microbatches * dp} {MODELS[model]}{experts} {' '.join(parts)}"
    ).strip()


def drawn_show(dice: Random) -> str:
    """Return arguments of `schedules show`, legal or not."""
    name, pp = dice.choice(NAMES), dice.choice((2, 2, 3, 4, 4, 6, 8))
    chunks = f" --chunks {dice.choice((2, 3))}" if SCHEDULES[name].any_chunks else ""
    chosen = dice.sample(list(SHOWN), dice.choice((0, 1, 1, 2, 2, 2, 3)))
    parts = [dice.choice(SHOWN[feature]) for feature in chosen]
    size = f"--pp {pp} --microbatches {pp * dice.choice((1, 2, 3))}"
    return f"{name} {size}{chunks} --costs {dice.choice(COSTS)} {' '.join(parts)}".strip()


def tables(way: str, line: str) -> dict[str, dict[str, Any]]:
    """Return what a line gives, by the name of the table.

    Raises: UserError or SystemExit for a line that is refused.
    """
    return _of_run(line) if way == "run" else _of_show(line)


def planned(line: str) -> tuple[Config, Plan]:
    """Return the configuration and the plan of a run.

    Raises: UserError or SystemExit for a line that is refused.
    """
    processes, *flags = shlex.split(line)
    config = replace(parse(Config, [*shlex.split(_SMALL), *flags]), world_size=int(processes))
    config = as_here(config)
    validate(config, has_cuda=False)
    config = replace(config, model=replace(inline(config.model), padded_vocab_size=VOCAB))
    return config, make_plan(config)


def _of_run(line: str) -> dict[str, dict[str, Any]]:
    config, plan = planned(line)
    found = {"whole": digest(whole_step(plan.schedule, config, plan.costs), plan.costs)}
    if half := config.num_microbatches // 2:
        smaller = config.with_batch(
            half * (config.global_batch_size or 1) // config.num_microbatches
        )
        with contextlib.suppress(UserError):
            begun = with_batch(plan, smaller)
            found["first size"] = digest(
                whole_step(begun.schedule, smaller, begun.costs), begun.costs
            )
    return found


def _of_show(line: str) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            schedules.main(["show", *shlex.split(line), "--json", str(file)])
        table = load(file)
    # The first lines have the times: what its costs are, with all that flags add to them, is the
    # command's to know.
    return {"shown": {"table": hashed(table), "said": said.getvalue().splitlines()[:3]}}


def hashed(schedule: Schedule) -> str:
    """Return a hash of what a table's file says of its passes, not of its name or costs."""
    content = json.loads(to_json(schedule))
    kept = {key: value for key, value in content.items() if key not in ("name", "costs", "start")}
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def digest(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """Return a table's hash, makespan, largest peak and messages."""
    time = simulate(schedule, costs)
    exchanges = [
        entry
        for program in lower(schedule, costs)
        for entry in program
        if isinstance(entry, Exchange)
    ]
    return {
        "table": hashed(schedule),
        "makespan": float(f"{time.makespan:.9g}"),
        "peak": float(f"{max(time.peak):.9g}"),
        "messages": sum(len(exchange.messages) for exchange in exchanges)
        // 2,  # a sender and a receiver
    }


def draw(count: int, seed: int) -> Iterator[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Yield (way, line, tables) of drawn legal recipes, each line once."""
    dice, seen = Random(seed), set[str]()
    while len(seen) < count:
        way = "run" if dice.random() < 0.6 else "show"
        line = drawn_run(dice) if way == "run" else drawn_show(dice)
        if line in seen:
            continue
        try:
            found = tables(way, line)
        except (UserError, SystemExit):
            continue
        seen.add(line)
        yield way, line, found


def main() -> int:
    """Write digests, or compare them with a file's. Returns 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=int, default=3000, help="recipes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a line for each recipe")
    parser.add_argument("--against", type=Path, help="digests of an earlier run")
    options = parser.parse_args()
    if options.against:
        return _compare(options.against)
    counts = Counter[str]()
    with options.write.open("w") if options.write else contextlib.nullcontext(sys.stdout) as file:
        for way, line, found in draw(options.draw, options.seed):
            counts[way] += len(found)
            print(json.dumps({"way": way, "line": line, "tables": found}), file=file, flush=True)
    print(f"{options.draw} recipes, {counts.total()} tables: {dict(counts)}", file=sys.stderr)
    return 0


def _compare(path: Path) -> int:
    different = total = 0
    for text in path.read_text().splitlines():
        recipe = json.loads(text)
        try:
            now = tables(recipe["way"], recipe["line"])
        except (UserError, SystemExit) as error:
            now = {"refused": {"because": str(error)}}
        total += 1
        if now != recipe["tables"]:
            different += 1
            print(
                recipe["way"],
                recipe["line"],
                f"  was {recipe['tables']}",
                f"  is  {now}",
                sep="\n",
                flush=True,
            )
    print(f"{different} of {total} recipes give other tables")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
