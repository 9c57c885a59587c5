"""Compare families of Hugging Face models that are split over two ranks with transformers.

    python -m tools.proofs.families.split --variants 4 --seed 0

A case is a small random model of a family. It comes in by the conversion, and lies over two ranks,
which are threads: by tensor, pipeline, context, or expert parallelism. Its logits must be those of
transformers, within 2e-6 of the largest, or within twice as much as transformers' own logits move
if its weights move by an ulp. A checkpoint that the two ranks write is exported: its
tensors must be the first ones to the bit, and its config.json must say what the first one says, key
by key. Two steps in float64 must have the losses, gradients and weights of one process, and the
loss of the first step must be transformers' own within 1e-6.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checks.run import flag_problems
from megapipe.config import ModelConfig
from megapipe.convert import SavedTensors, export_checkpoint, import_checkpoint
from megapipe.convert.huggingface.depths import depths_in
from megapipe.convert.huggingface.family import IGNORED
from megapipe.convert.huggingface.tables import FAMILIES
from megapipe.distributed.layout import whole_name
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Cut
from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.models.gpt import WORD_EMBEDDINGS
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import sharing
from megapipe.schedule import ScheduleError, build
from tools.proofs.equivalence import Part
from tools.proofs.families.models import ROOT, logits_of, loss_of, opened, rounding_of, save
from tools.proofs.families.ranks import (
    LENGTH,
    SAMPLES,
    VOCAB,
    Evaluated,
    Layout,
    Trained,
    batch,
    config_of,
    evaluate,
    train,
)

CLOSE, LOSS, SAME = 2e-6, 1e-6, 1e-9
"""Bounds: of logits to the largest, of a loss to transformers', and of float64 to one process."""
LAYOUTS = ("tp", "pp", "cp", "ep")
_SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved", "dualpipe-v", "1f1b-early")


def layout_of(name: str, model: ModelConfig, draw: random.Random) -> Layout:
    """Draw the rest of a layout: a schedule and its cuts, or how the ranks of an axis meet."""
    settings: dict[str, Any] = {}
    if name == "tp":
        # Experts want it.
        settings["sequence_parallel"] = model.has_experts or draw.random() < 0.5
    if name == "cp":
        # A gated delta net exchanges heads alone.
        ways = ["a2a"] if model.has_delta else ["p2p", "all_gather", "a2a"]
        settings["cp_comm_type"] = (draw.choice(ways),)
    if name == "ep":
        settings["moe_token_dispatcher_type"] = draw.choice(["allgather", "alltoall"])
    microbatches = SAMPLES // 2 if name == "ep" else SAMPLES
    if name != "pp":
        return Layout(name, build("naive", 1, microbatches), (model.layers,), settings)
    while True:
        try:
            table = build(draw.choice(_SCHEDULES), 2, microbatches)
        except ScheduleError:
            continue
        chain = table.placement.chain
        if chain <= model.layers:
            break
    cuts = sorted(draw.sample(range(1, model.layers), chain - 1))
    ends = [0, *cuts, model.layers]
    counts = tuple(b - a for a, b in pairwise(ends))
    return Layout(name, table, counts, settings)


def together(ranks: Sequence[Evaluated], layout: Layout) -> Tensor:
    """Return the logits [b, s, v] of all samples, from the ranks that have some."""
    sizes = {"tp": 1, "cp": 1, "dp": 1} | layout.sizes
    rows: list[Tensor | None] = [None] * SAMPLES
    for number in range(SAMPLES):
        dp = sizes["dp"]
        whole = torch.zeros(LENGTH, 0)
        parts: dict[int, Tensor] = {}
        for rank in ranks:
            if rank.logits and rank.dp == number % dp:
                parts.setdefault(rank.tp, torch.zeros(LENGTH, rank.logits[0].shape[-1]))
                places = Cut(rank.cp, sizes["cp"]).spans(LENGTH)
                at = torch.cat([torch.arange(span.start, span.stop) for span in places])
                parts[rank.tp][at] = rank.logits[number // dp][0]
        whole = torch.cat([parts[n] for n in sorted(parts)], -1)
        rows[number] = whole[:, :VOCAB]
    return torch.stack([row for row in rows if row is not None])


def differing(kind: str, mine: dict[str, Part], whole: dict[str, Part]) -> Iterator[str]:
    """Yield a text for each tensor that is not one process's."""
    for name, (tensor, pieces) in mine.items():
        # A tied head on a rank of its own has the embedding's gradient, the sum of both uses.
        wanted = (whole.get(whole_name(name)) or whole[WORD_EMBEDDINGS]).tensor
        for dim, (i, n) in pieces.items():
            wanted = wanted.chunk(n, dim)[i]
        off = (tensor.double() - wanted.double()).abs().max().item()
        if not off <= SAME * max(1.0, wanted.abs().max().item()):
            yield f"{kind} of {name} differ by {off:.2g}"


@dataclass
class Model:
    """A drawn model of a family, imported.

    Attributes:
        family, seed: which.
        folder: the folder of everything; `hf` in it is the model of transformers.
        pool: two processes for two ranks; without it they are threads, which save nothing.
        want: logits [b, s, v] of transformers.
        loss: its loss.
        original: the model of transformers.
    """

    family: str
    seed: int
    folder: Path
    pool: Any = None

    def __post_init__(self) -> None:
        tokens, labels = batch()
        self.original = save(self.family, self.seed, self.folder / "hf")
        self.want = logits_of(self.original, tokens)
        self.loss = loss_of(self.want, labels)
        done = import_checkpoint(self.folder / "hf", self.folder / "ours", divisible_by=8)
        self.model = done.config.model
        self.tensors = SavedTensors(done.folder)
        # Without the config.json of the import beside it.
        self.copy = self.folder / "alone" / done.folder.name
        shutil.copytree(done.folder, self.copy)
        # A router in float32 would round what it is given.
        self.exact = self.model
        if self.model.moe_router_dtype:
            self.exact = replace(self.model, moe_router_dtype="fp64")

    @cached_property
    def whole(self) -> Trained:
        """What one process does in two steps, for all layouts."""
        layout = layout_of("one", self.model, random.Random(0))
        found: Trained = self._run(train, self.exact, layout)[0]
        return found

    def _run(self, body: Any, model: ModelConfig, layout: Layout, *more: Any) -> list[Any]:
        """Run a function of `ranks` on all ranks; more: its last arguments."""
        given = (config_of(model, layout), layout, self.tensors, *more)
        shares = sharing(layout.schedule.placement, tied=model.tied)
        if self.pool is None or not layout.sizes:

            def thread(mesh: ProcessMesh) -> Any:
                return body(mesh, *given)

            return run_threads(thread, **layout.sizes, shares=shares)
        sizes = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, "ep": 1} | layout.sizes
        order = [sizes[axis] for axis in ("pp", "dp", "tp", "cp", "ep")]
        held = tuple((name, tuple(ranks)) for name, ranks in sorted(shares.items()))
        found: list[Any] = self.pool.run(body, [(*order, None, held)], *given)
        return found

    @cached_property
    def rounding(self) -> float:
        """How far float32 may lie apart: twice what an ulp of weights moves transformers' logits.

        Of deepseek_v3 with seed 1, tp 2 is 2.1e-6 of the largest from transformers. transformers
        is 2.4e-6 from float64, and tp 2 is 1.4e-6 from it. An ulp moves transformers by 2.8e-6.
        """
        moved = rounding_of(self.original, batch()[0])
        return float(2 * moved / self.want.abs().max())

    def refused(self, layout: Layout) -> str | None:
        """Return why no run has this layout, or None."""
        problems = flag_problems(config_of(self.model, layout))
        return problems[0] if problems else None

    def problems(self, layout: Layout) -> Iterator[str]:
        """Yield what differs in this layout from transformers, or from one process."""
        root = self.folder / layout.name
        ranks = self._run(evaluate, self.model, layout, root)
        off = float((together(ranks, layout) - self.want).abs().max() / self.want.abs().max())
        # The moves take time, so they are drawn only where the plain bound is not kept.
        if not (off <= CLOSE or off <= self.rounding):
            yield f"logits differ by {off:.2g} of the largest"
        if ranks[0].folder is not None:
            yield from self.exported(ranks[0].folder)
        for rank in self._run(train, self.exact, layout):
            for kind in ("losses", "norms"):
                a, b = (torch.tensor(getattr(x, kind)).double() for x in (rank, self.whole))
                if not torch.allclose(a, b, rtol=SAME, atol=0):
                    yield f"{kind} {a.tolist()}, not {b.tolist()}"
            if not abs(rank.losses[0] / self.loss - 1) <= LOSS:
                yield f"the first loss is {rank.losses[0]}, and {self.loss} in transformers"
            yield from differing("gradients", rank.gradients, self.whole.gradients)
            yield from differing("weights", rank.weights, self.whole.weights)

    def exported(self, folder: Path) -> Iterator[str]:
        """Yield what differs in an export of a checkpoint from what was imported.

        folder: iter_NNNNNNN, without the config.json of the import beside it.
        """
        target = folder.parent / "back"
        export_checkpoint(folder, target, vocab_size=VOCAB)
        again = logits_of(opened(target), batch()[0])
        off = (again - self.want).abs().max() / self.want.abs().max()
        if not off <= CLOSE:
            yield f"logits of the export differ by {off:.2g} of the largest"
        before = SavedTensors(self.folder / "hf")
        if config_in(target)["model_type"] != self.family:
            # Another family says the same; its own table has other names and keys.
            said = FAMILIES[self.family].write(self.model)
            said |= {"model_type": self.family, "tie_word_embeddings": self.model.tied}
            companion = folder.parent / "said"
            companion.mkdir()
            text = json.dumps(said | {"vocab_size": VOCAB})
            (companion / "config.json").write_text(text)
            target = folder.parent / "back_by_table"
            export_checkpoint(folder, target, companion=companion)
        after = SavedTensors(target)
        if before.shapes != after.shapes:
            yield f"tensors {sorted(before.shapes.keys() ^ after.shapes.keys())} differ"
            return
        others = [n for n in before.shapes if not torch.equal(before.read(n), after.read(n))]
        if others:
            yield f"{len(others)} tensors come back as others: {others[:3]}"
        yield from other_keys(config_in(self.folder / "hf"), config_in(target), before)


def config_in(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


_ADDED = {
    "num_nextn_predict_layers": "all families that begin from Llama's table",
    "head_dim": "so that no reader divides the width by the heads",
    "partial_rotary_factor": "of phi3, as transformers 4 has it outside of rope_parameters",
    "rotary_dim": "of minimax_m2, where all channels are rotated",
    "intermediate_size": "of solar_open, which has no dense layer",
    "moe_layer_freq": "of DeepSeek's own program",
    "scoring_func": "of DeepSeek's own program",
    "topk_method": "of DeepSeek's own program",
}
"""Keys that an export has in addition to those of transformers' class, and why."""


def other_keys(
    first: dict[str, Any], again: dict[str, Any], tensors: SavedTensors
) -> Iterator[str]:
    """Yield a text for each key of an exported config.json that is not as in the first one.

    Each key of its class must have the value that transformers reads from the first file: in the
    exported file as it is, and as transformers reads that one. `IGNORED` has the keys that say
    nothing about the model. `_acting` and `_ADDED` have what an export says in another way.

    Args:
        first: the config.json of transformers.
        again: the exported one.
        tensors: those of the first folder.
    """
    wanted = _acting(_read(first), tensors)
    read = _read(again)
    for key in sorted((wanted.keys() | read.keys()) - IGNORED):
        if key not in wanted and key in _ADDED:
            continue
        for value in (read.get(key), again.get(key, read.get(key))):
            if key not in wanted or value != wanted[key]:
                yield f"{key} of config.json is {wanted.get(key)}, and {value} in the export"


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Return all keys that transformers has for a config.json, with defaults of its class."""
    transformers = importlib.import_module("transformers")
    name = content["model_type"]
    name = FAMILIES[name].computed_as or name
    found = transformers.AutoConfig.for_model(**content | {"model_type": name}).to_dict()
    return dict(json.loads(json.dumps(found)))


def _acting(content: dict[str, Any], tensors: SavedTensors) -> dict[str, Any]:
    """Return a config.json without what it says and its model does not have.

    transformers saves no tensors of depths of multi-token prediction, whatever their key says. It
    counts no groups of experts where a token has the best of all. A width that is null is what
    follows from others.
    """
    found = dict(content)
    if "num_nextn_predict_layers" in content:
        depths = depths_in(tensors.shapes.keys(), content["num_hidden_layers"])
        found["num_nextn_predict_layers"] = depths
    if content.get("topk_method") == "greedy":
        found |= {"n_group": 1, "topk_group": 1}
    if content.get("head_dim", 0) is None:
        found["head_dim"] = content["hidden_size"] // content["num_attention_heads"]
    if content.get("n_inner", 0) is None:
        found["n_inner"] = 4 * content["n_embd"]
    return found


@dataclass(frozen=True)
class Flags:
    """Compare families that are split over two ranks with transformers and with one process."""

    families: tuple[str, ...] = tuple(FAMILIES)
    """Which; all by default."""
    layouts: tuple[str, ...] = LAYOUTS
    """Axes of two ranks."""
    variants: int = 4
    """Models of each family."""
    seed: int = 0
    """Number of the first model."""


def compared(model: Model, layouts: Sequence[str], counts: Counter[str]) -> Iterator[str]:
    """Compare a model in each layout that it can have; yield a text for each that differs.

    counts: receives the number of layouts by outcome.
    """
    if found := list(model.exported(model.copy)):
        yield f"{model.family} {model.seed} one: {'; '.join(found)}"
    for name in layouts:
        if name == "ep" and not model.model.has_experts:
            continue
        draw = random.Random(f"{model.family} {model.seed} {name}")
        layout = layout_of(name, model.model, draw)
        if refused := model.refused(layout):
            counts[f"refused: {refused}"] += 1
            continue
        counts[name] += 1
        if found := list(model.problems(layout)):
            yield f"{model.family} {model.seed} {name}: {'; '.join(found[:4])}"


def proof(options: Flags, pool: Any) -> tuple[Counter[str], list[str]]:
    """Return (number of layouts by outcome, a text for each that differs)."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for family in options.families:
        for seed in range(options.seed, options.seed + options.variants):
            with tempfile.TemporaryDirectory() as folder:
                model = Model(family, seed, Path(folder), pool)
                counts["models"] += 1
                for line in compared(model, options.layouts, counts):
                    wrong.append(line)
                    print(line, flush=True)
        print(f"{family}: compared", flush=True)
    return counts, wrong


def main() -> None:
    options = parse(Flags, sys.argv[1:])
    torch.set_num_threads(1)
    sys.path.append(str(ROOT / "tests" / "support"))
    rank_pool = importlib.import_module("rank_pool")
    with tempfile.TemporaryDirectory() as folder:
        pool = rank_pool.Pool(Path(folder), 2)
        counts, wrong = proof(options, pool)
        pool.close()
    for name, count in sorted(counts.items()):
        print(f"{count} {name}")
    print(f"{len(wrong)} differ")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    stop.run(lambda _: main())
