"""Thirty planted defects: does the covering array find them?

    python -m tools.proofs.cover.planted --array triples.json --results planted.jsonl

Each is one changed place of the package, of the kinds that reviews have found: a wait or a sum left out under one
combination of flags, a factor applied twice, a length of the wrong dimension, state of the last step, a mask that is
drawn otherwise. Cases run in a copy of the repository until the first one notices. Those with the values that a defect
concerns run first: that changes how soon it is found, not whether.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.proofs.jobs import in_forks, keep, kept
from tools.proofs.mutants.copy import copy_repository
from tools.proofs.mutants.draw import ROOT

WARM = ("torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "numpy.random")
"""What the package imports of others: forks share it."""


class Planted(NamedTuple):
    """A defect.

    Attributes:
        path: of the file in the package.
        before, after: text that stands there once, and what takes its place.
        where: values of choices under which it shows, as the author thinks: cases with most of them run first.
    """

    path: str
    before: str
    after: str
    where: Mapping[str, Sequence[str]]


_SPLIT = ("optimizer", "gradients", "weights")
_CP = ("p2p", "all-gather", "a2a")
_EXPERTS = ("softmax", "sigmoid", "shared", "jitter", "capacity")

DEFECTS = {
    "an undone update still counts as a step of Adam": Planted(
        "training/steps/step.py",
        "        self.optimizer.steps = self.steps\n",
        "",
        {"update": ["validated"], "spoiled": ["large"]},
    ),
    "an undone update leaves the biases of routers moved": Planted(
        "training/steps/step.py",
        "return [*flats, *(x for x, _ in self.buffers)]",
        "return flats",
        {"update": ["validated"], "router": ["sigmoid"], "spoiled": ["infinite"]},
    ),
    "gradients are divided by context-parallel ranks too": Planted(
        "training/steps/step.py",
        "scale: float | Tensor = 1 / stages.mesh.dp.size",
        "scale: float | Tensor = 1 / stages.mesh.dp_cp.size",
        {"cp": _CP, "loss": ["mean"]},
    ),
    "a loss is divided by this rank's tokens alone": Planted(
        "pipeline_parallel/loss.py",
        "return share / cp.all_reduce(self.tokens.clone()).clamp(min=1)",
        "return share / self.tokens.clone().clamp(min=1)",
        {"cp": _CP, "loss": ["mean"]},
    ),
    "the logged loss of a depth counts this rank's tokens alone": Planted(
        "pipeline_parallel/loss.py",
        "whole = cp.size if self.tokens is None else cp.all_reduce(self.tokens.clone()).clamp(min=1)",
        "whole = cp.size if self.tokens is None else self.tokens.clone().clamp(min=1)",
        {"cp": _CP, "depths": ["1", "2"]},
    ),
    "shards of gradients are not summed over tensor parallel": Planted(
        "optim/reduction.py",
        "        buffers.sum_over_tp(self.ties.mesh.tp)\n",
        "        if buffers.shares.size == 1:\n            buffers.sum_over_tp(self.ties.mesh.tp)\n",
        {"tp": ["2"], "sharding": _SPLIT, "sequence": ["split"]},
    ),
    "what was reduced in one step is not reduced in the next": Planted(
        "training/steps/step.py",
        "    optimizer.zero_grad()\n    sums = optimizer.reduction()\n",
        "    optimizer.zero_grad()\n    sums = vars(optimizer).setdefault('sums', optimizer.reduction())\n",
        {"dp": ["2"], "overlap": ["none"]},
    ),
    "loads of experts are not summed over context parallel": Planted(
        "training/steps/routers.py",
        "        self.mesh.dp_cp.all_reduce(counts)\n",
        "        self.mesh.dp.all_reduce(counts)\n",
        {"cp": _CP, "router": ["sigmoid"]},
    ),
    "loads of experts are not summed over sequence parallel": Planted(
        "training/steps/routers.py",
        "        if self.model.sequence_parallel:\n            self.mesh.tp.all_reduce(counts)\n",
        "",
        {"tp": ["2"], "sequence": ["split"], "router": ["sigmoid"]},
    ),
    "loads of experts are not summed over both copies of a model": Planted(
        "training/steps/routers.py",
        "        if self._twins is not None:\n            self._twins.all_reduce(counts)\n",
        "",
        {"schedule": ["dualpipe", "chimera"], "router": ["sigmoid"]},
    ),
    "routers keep what they saw in the last step": Planted(
        "models/moe/router.py",
        "        self.seen = {}\n        self._load = {}\n\n    def forward",
        "        self._load = {}\n\n    def forward",
        {"router": ["sigmoid"]},
    ),
    "keys lack the gradients of the slices behind them": Planted(
        "models/attention/context.py",
        "            dkv = dkv.add_(part.grad)\n",
        "            pass\n",
        {"slices": ["2", "documents"]},
    ),
    "gradients of a slice's gathered keys are cut as whole sequences are": Planted(
        "models/attention/context.py",
        "    mine = Cut(cut.rank, cut.size)\n",
        "    mine = cut\n",
        {"cp": ["all-gather"], "slices": ["2", "documents"]},
    ),
    "the gradient of a depth's projection is the first rank's": Planted(
        "models/mtp.py",
        "        return pieces[tp.rank].contiguous(), None, None",
        "        return pieces[0].contiguous(), None, None",
        {"tp": ["2"], "depths": ["1", "2"], "sequence": ["whole"]},
    ),
    "the last of several chunks is not gathered after an update": Planted(
        "optim/sharded/gathers.py",
        "        self._stale = set(range(len(self._chunks)))",
        "        self._stale = set(range(max(1, len(self._chunks) - 1)))",
        {"sharding": ["optimizer"], "schedule": ["interleaved", "zb-v", "hanayo"], "dp": ["2"]},
    ),
    "recomputation draws outside of its microbatch": Planted(
        "models/recompute.py",
        "            output = ctx.context.run(ctx.function, *inputs)",
        "            output = ctx.function(*inputs)",
        {"recompute": ["full", "block", "partial"], "dropout": ["hidden", "both"]},
    ),
    "an evaluation does not wait for gathered weights": Planted(
        "training/evaluation.py",
        "        run.optimizer.gathers.settle()\n",
        "",
        {"overlap": ["gather"], "evaluation": ["every-2"]},
    ),
    "the loss scale of an open step is not doubled": Planted(
        "training/driver.py",
        "return progress.loss_scale.after(False, run.config.precision).scale",
        "return progress.loss_scale.scale",
        {
            "precision": ["fp16"],
            "update": ["validated"],
            "clip": ["none"],
            "spoiled": ["no"],
            "resumed": ["no", "same", "behind", "from-one"],
        },
    ),
    "a mask is drawn for this rank's part of the sequence": Planted(
        "tensor_parallel/rng.py",
        "        rows = share_of(rows, tp.rank, tp.size)\n",
        "        rows = share_of(rows, 0, tp.size)\n",
        {"sequence": ["split"], "dropout": ["hidden", "both"]},
    ),
    "all data-parallel ranks draw the same masks": Planted(
        "training/steps/stages.py",
        "consumed + (i * dp.size + dp.rank) * b",
        "consumed + (i * dp.size) * b",
        {"dp": ["2"], "dropout": ["hidden", "both"]},
    ),
    "masks of microbatches of two are those of one": Planted(
        "training/steps/stages.py",
        "consumed + (i * dp.size + dp.rank) * b",
        "consumed + (i * dp.size + dp.rank)",
        {"batch": ["of-2"], "resumed": ["from-one", "into-one"], "dp": ["2"]},
    ),
    "the z loss counts once for each rank": Planted(
        "models/moe/losses.py",
        "return logits.logsumexp(dim=-1).square().mean() * (weight / ranks)",
        "return logits.logsumexp(dim=-1).square().mean() * weight",
        {"router": ["softmax"], "cp": _CP, "sequence": ["split"]},
    ),
    "a balancing loss of slices counts by the tokens of one": Planted(
        "models/moe/router.py",
        "slope(*of) * stream.weigh(whole, 1.0) / rows",
        "slope(*of) * stream.weigh(tokens, 1.0) / rows",
        {"slices": ["2", "documents"], "balance": ["aux", "seq"], "router": _EXPERTS, "loss": ["per-token"]},
    ),
    "slices of an expert are not added up": Planted(
        "models/moe/dispatch.py",
        "reduce(torch.add, blocks[n : n + self._slices])",
        "blocks[n]",
        {"dispatcher": ["alltoall"], "tp": ["2"], "experts": ["ep"], "router": _EXPERTS},
    ),
    "the norm counts experts by the dense grid": Planted(
        "optim/norm.py",
        "of_experts = mesh.experts.all_reduce(squares[places])",
        "of_experts = mesh.tp.all_reduce(squares[places])",
        {"experts": ["ep", "ep-etp"], "router": _EXPERTS},
    ),
    "positions begin anew on each sequence-parallel rank": Planted(
        "models/gpt.py",
        "ids = ids.chunk(tp.size)[tp.rank]",
        "ids = ids.chunk(tp.size)[0]",
        {"sequence": ["split"], "tp": ["2"], "style": ["gpt2"]},
    ),
    "a stage of a later batch size keeps the first one's table": Planted(
        "training/driver.py",
        "            run.stages.take(config, run.schedule_of(config))",
        "            run.stages.config = config",
        {"batch": ["grows"]},
    ),
    "the head computes again with labels of the whole vocabulary": Planted(
        "tensor_parallel/fused_cross_entropy.py",
        "                    to_gradient_(dy, lse, grad, labels - block.start, space, cap)\n                add_product",
        "                    to_gradient_(dy, lse, grad, labels, space, cap)\n                add_product",
        {"fusion": ["loss"], "schedule": ["zb-h1", "zb-h2", "zb-v"], "vocabulary": ["ends"], "cp": ["1"]},
    ),
    "shares of the vocabulary count tokens without loss": Planted(
        "pipeline_parallel/families/vocabulary/ends.py",
        "        scale = scale.flatten().masked_fill(of_loss.ignored, 0.0)\n",
        "        scale = scale.flatten() * 2.0 if stage.request.calculate_per_token_loss else scale.flatten()\n",
        {"vocabulary": ["shared"], "loss": ["per-token"]},
    ),
    "histories of largest values are not shared by data-parallel ranks": Planted(
        "training/steps/scales.py",
        "self._axes = [mesh.tp, mesh.dp_cp]",
        "self._axes = [mesh.tp]",
        {"precision": ["fp8"], "dp": ["2"]},
    ),
}


def nearest_first(rows: Iterable[dict[str, str]], defect: Planted) -> list[dict[str, str]]:
    """Return rows with those first that have most of the values that a defect concerns.

    Among equals those come first that are judged by more than a tenth, and of them those that cost least.
    """
    from tools.proofs.cover.choices import PLAIN, num_layers, world_size

    def order(row: dict[str, str]) -> tuple[int, bool, float]:
        full = PLAIN | row
        has = sum(full[name] in values for name, values in defect.where.items())
        sharp = full["precision"] in ("float64", "float32") and full["moments"] == "fp32"
        cut = int(full["tp"]) * (1 if full["cp"] == "1" else 2)  # each part costs as much as the whole
        samples = 13 if full["batch"] == "grows" else 8
        starts = 1 if full["resumed"] in ("no", "from-one") else 2
        passes = cut * samples * (num_layers(full) + int(full["depths"]))
        return -has, not sharp, passes + 20.0 * world_size(full) * starts

    return sorted(rows, key=order)


def main() -> int:
    """Plant each defect in a copy, and run the array there until a case notices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--array", type=Path, required=True, help="rows that the cover has written")
    parser.add_argument("--results", type=Path, required=True, help="a line for each defect, appended")
    parser.add_argument("--most", type=int, default=10**6, help="cases for each defect")
    parser.add_argument("--jobs", type=int, default=2, help="defects at a time")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of each start of a case")
    parser.add_argument("--only", nargs="+", choices=DEFECTS, help="these defects")
    parser.add_argument("--references", type=Path, help="a --folder of the cover: what one process computes")
    options = parser.parse_args()
    known = {found["defect"]: found for found in kept(options.results)}
    wanted = options.only or list(DEFECTS)
    for name in WARM:
        importlib.import_module(name)
    left = [name for name in wanted if name not in known]
    for name, heard in in_forks(left, partial(_search, options=options), options.jobs):
        known[name] = {"defect": name} | heard
        print(json.dumps(known[name]), flush=True)
        keep(options.results, known[name])
    counts = Counter(known[name]["result"] for name in wanted)
    print(f"{len(wanted)} defects: {dict(counts)}")
    return 0


def _search(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plant a defect in a copy, import that, and judge cases until one notices; return the finding.

    The process that calls it has the copy's modules afterwards.
    """
    begun, defect = time.monotonic(), DEFECTS[name]
    array = json.loads(options.array.read_text())["rows"]
    references = options.references and options.references.absolute()
    heard: dict[str, Any] = {"result": "not found", "cases": min(options.most, len(array))}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        _enter(Path(folder, "copy"), defect)
        from tools.proofs.cover.choices import PLAIN
        from tools.proofs.cover.judge import Runs, warm

        warm()
        runs = Runs(Path(folder, "runs"), options.seconds, references)
        for n, row in enumerate(nearest_first(array, defect)[: options.most]):
            verdict = runs.judge(PLAIN | row)
            if verdict.result != "same":
                heard = {"result": "found", "cases": n + 1, "by": verdict.result, "said": verdict.found, "case": row}
                break
    return {"seconds": round(time.monotonic() - begun)} | heard


def _enter(copy: Path, defect: Planted) -> None:
    """Make a copy of the repository with a defect, and have this process import its modules from there."""
    copy.mkdir(parents=True)
    copy_repository(copy)
    path = copy / "megapipe" / defect.path
    text = path.read_text()
    assert text.count(defect.before) == 1, f"{defect.path} has {defect.before!r} {text.count(defect.before)} times"
    path.write_text(text.replace(defect.before, defect.after))
    assert not any(name.partition(".")[0] == "megapipe" for name in sys.modules), "the package is imported already"
    for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
