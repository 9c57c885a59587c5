"""Train what Megatron-LM has trained, and compare every number.

    python tools/proofs/megatron_golden.py FOLDER [--case NAME]

FOLDER has golden.json, the flags and numbers of Megatron-LM's own runs, starting weights in Hugging
Face's form under hf/ and data. Numbers may lie as far apart as four times what Megatron-LM differs
from itself when the weights it starts from move by half a float32 step; tokens of each expert and
the routers' biases not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.convert import SavedTensors, import_checkpoint, import_megatron, load_full
from megapipe.convert.tensors import whole_model
from megapipe.data.build import build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, layout_of, saved_tensors, whole_name
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import UserError
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.optim.census import natural
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import make_plan
from megapipe.training.forward_step import forward_step
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.pretrain import Training
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult

TIMES, FLOOR = 4.0, 6e-8
"""Noise may be exceeded this often; where Megatron-LM did not differ from itself, half a float32
step is the noise.
"""
LOGITS = 2e-6
LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "one": ({}, ""),
    "zb-v": ({"pp": 2}, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "recompute": (
        {"pp": 2},
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-num-layers 1",
    ),
    "mtp-spread": (
        {"pp": 2},
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etm|ttt{m}L",
    ),
    "mtp-zb-v": (
        {"pp": 2},
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
        "--pipeline-model-parallel-layout Et|tm|t{m}|tL",
    ),
    "mtp-tp": (
        {"tp": 2, "pp": 2},
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-layout Em|tttt{m}L",
    ),
    "vocab": ({"pp": 2}, "--pipeline-model-parallel-size 2 --vocab-parallel-pipeline"),
    "vocab-zb-v": (
        {"pp": 2},
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --vocab-parallel-pipeline",
    ),
    "dp": ({"dp": 2}, "--use-distributed-optimizer"),
    "ep": (
        {"dp": 2, "ep": 2},
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
    "etp": ({"dp": 2, "etp": 2}, "--expert-tensor-parallel-size 2"),
    "ep-zb-v": (
        {"dp": 2, "ep": 2, "pp": 2},
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
        "--use-distributed-optimizer",
    ),
    "ep-pairs": (
        {"dp": 2, "ep": 2, "pp": 2},
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ),
    "ep-tp": (
        {"tp": 2, "dp": 2, "ep": 2},
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall",
    ),
}
"""Ranks and flags by name."""


class Recorder(Callback):
    """The numbers of a run that a rank records."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.steps: list[tuple[StepResult, float, dict[int, list[float]]]] = []
        self.evaluations: list[float] = []

    def before_step(self, run: Run) -> None:
        if not self.start:
            self.start = _weights(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        biases = {router.layer: router.expert_bias for router in run.stages.routers.own}
        kept = {layer: bias.tolist() for layer, bias in biases.items() if bias is not None}
        self.steps.append((result, run.rate(), kept))  # logged with a step is the rate of the next

    def on_evaluation(self, run: Run, where: str, losses: Mapping[str, float]) -> None:
        self.evaluations.append(losses["lm loss"])


def _weights(run: Run) -> dict[str, Tensor]:
    tensors = (pair for module in run.modules for pair in saved_tensors(module))
    return {name: _whole(x, layout_of(x), run.mesh.tp) for name, x in tensors}


def _whole(x: Tensor, layout: Layout, tp: Axis) -> Tensor:
    """A parameter, or its moment, of the slices of all ranks."""
    x = x.detach().double().view(layout.local(tp)).clone()
    for dim, name in layout.splits.items():
        if (axis := tp.named(name)).size > 1:
            x = torch.cat(axis.all_gather(x[None].contiguous()).unbind(), dim)
    return x


@dataclasses.dataclass
class Trained:
    """One rank's run: its record, and `KIND NAME` -> what the end has of a tensor in its saved
    shape.
    """

    record: Recorder
    tensors: dict[str, Tensor]


def trained(folder: Path, case: Mapping[str, Any], name: str, layout: str = "one") -> list[Trained]:
    """A case under a layout, the ranks as threads."""
    ranks, more = LAYOUTS[layout]
    more = more.format(m="m" * ("--mtp-num-layers 2" in case["flags"]))
    with tempfile.TemporaryDirectory() as scratch:
        start = SavedTensors(
            import_checkpoint(
                folder / "hf" / name.partition("/")[0], Path(scratch) / "start"
            ).folder
        )
        flags = f"{case['flags']} {more} --num-workers 0 --data-cache-path {scratch}"
        config = parse(
            Config, [*flags.split(), "--data-path", str(folder / "data" / "t_text_document")]
        )
        config = dataclasses.replace(
            config, world_size=math.prod(ranks.get(name, 1) for name in ("tp", "dp", "pp"))
        )
        validate(config, has_cuda=False)
        tokenizer = build_tokenizer(config.data)
        rows = config.model.padded_vocab(tokenizer.vocab_size)
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, padded_vocab_size=rows)
        )
        data, plan = build_datasets(config, tokenizer), make_plan(config)

        def read(key: str) -> Tensor:  # another router may go with the same weights
            return start.read(key) if key in start.shapes else torch.zeros(config.model.experts)

        def rank(mesh: ProcessMesh) -> Trained:
            record = Recorder()
            hooks = Hooks(callbacks=(record,))
            began = time.monotonic()
            given = config, mesh, gpt_provider, forward_step, data, tokenizer.eod, began
            training = Training(*given, plan=plan, hooks=hooks)
            run = training.run
            load_full(run.modules, read, mesh.tp)
            run.optimizer.reload_main()
            training.train()
            moved = {f"weight {name}": x - record.start[name] for name, x in _weights(run).items()}
            if run.optimizer.distributed:  # a rank has a share of the moments
                return Trained(record, moved)
            layouts = {name: layout_of(param) for name, param in run.optimizer.params.items()}
            moments = {
                f"{kind} {name}": _whole(x, layouts[name], mesh.tp)
                for kind, held in run.optimizer.state().items()
                for name, x in held.items()
            }
            return Trained(record, moved | moments)

        return (
            run_threads(rank, **ranks, shares=plan.shares)
            if ranks
            else [rank(ProcessMesh.single())]
        )


def sketch(key: str, tensor: Tensor) -> list[float]:
    """L2 norm and three products with random signs, which the tensor's name draws."""
    flat = tensor.flatten().numpy()
    draws = np.random.RandomState(
        int(hashlib.sha256(key.replace(" ", "/", 1).encode()).hexdigest()[:8], 16)
    )
    return [
        float(np.linalg.norm(flat)),
        *(float(flat @ (2 * draws.randint(0, 2, flat.size) - 1)) for _ in range(3)),
    ]


def differences(case: Mapping[str, Any], ranks: Sequence[Trained]) -> Iterator[str]:
    """A line for every number that is not Megatron-LM's."""
    noise, said = case["noise"], ranks[-1].record
    words = case["flags"].split()
    own = int(words[words.index("--num-layers") + 1])

    def check(
        what: str, kind: str, mine: float, its: float, unit: float | None = None
    ) -> Iterator[str]:
        allowed = TIMES * max(noise.get(kind, 0.0), FLOOR)
        if not abs(mine - its) <= allowed * (abs(its) if unit is None else unit):
            off = abs(mine - its) / (abs(its) if unit is None else unit)
            yield f"{what}: {mine!r}, not {its!r}: {off:.2g} apart, {allowed:.2g} allowed"

    if len(said.steps) != len(case["rows"]):
        yield f"{len(said.steps)} iterations, not {len(case['rows'])}"
    for row, (result, lr, _) in zip(case["rows"], said.steps, strict=False):
        at = f"iteration {row['iteration']}"
        yield from check(f"{at}, lr", "lr", lr, row["lr"])
        yield from check(f"{at}, grad norm", "grad norm", result.grad_norm, row["grad_norm"])
        if result.shown.keys() != row["loss"].keys():
            yield f"{at} logs {', '.join(result.shown)}, not {', '.join(row['loss'])}"
        for name, its in row["loss"].items():
            kind = "loss" if name == "lm loss" else "router losses"
            yield from check(f"{at}, {name}", kind, result.shown.get(name, math.nan), its)
        for name, layers in row["per layer"].items():
            of_layers = result.routed.per_layer.get(name, ())
            for number, (mine, other) in enumerate(zip(of_layers, layers, strict=True)):
                # noise is of their mean, which moves less by the root
                what = f"{at}, {name} of layer {number}"
                yield from check(
                    what, "router losses", mine, other, abs(other) * len(layers) ** 0.5 + 1e-30
                )
        names = {n: f"layer{n}" if n < own else f"mtp{n - own}" for n in result.routed.tokens}
        tokens = {names[number]: list(counts) for number, counts in result.routed.tokens.items()}
        if tokens != row.get("tokens", {}):
            yield f"{at}, tokens: {tokens}, not {row['tokens']}"
    for number, row in enumerate(case["rows"]):
        biases = dict(pair for rank in ranks for pair in rank.record.steps[number][2].items())
        for (layer, bias), its in zip(
            sorted(biases.items()), row.get("expert_bias", []), strict=True
        ):
            if [round(x, 7) for x in bias] != its:  # as it is written there
                yield f"iteration {row['iteration']}, bias of layer {layer}: {bias}, not {its}"
    for number, (mine, its) in enumerate(zip(said.evaluations, case["evaluations"], strict=True)):
        yield from check(f"evaluation {number}", "evaluation", mine, its["lm loss"])
    tensors = _joined(dict(pair for rank in ranks for pair in rank.tensors.items()))
    for key, its in case["sketches"].items():
        if key not in tensors and any(key.startswith("exp_avg") for key in tensors):
            yield f"{key} is not here"
        elif key in tensors:
            x = tensors[key][:-45] if "embedding" in key or "output_layer" in key else tensors[key]
            kind = "weights" if key.startswith("weight") else "moments"
            (norm, *products), (its_norm, *its_products) = sketch(key, x), its
            yield from check(f"norm of {key}", kind, norm, its_norm)
            # A product of a difference with random signs has the difference's length on average,
            # and a tail.
            apart = float(np.linalg.norm(np.array(products) - np.array(its_products))) / 3**0.5
            yield from check(f"length of the difference of {key}", kind, apart, 0.0, abs(its_norm))


def _joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in the whole model, shares of the vocabulary put together."""
    parts: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=natural):
        parts.setdefault(whole_name(name), []).append(tensors[name])
    return {name: torch.cat(own) if len(own) > 1 else own[0] for name, own in parts.items()}


def checkpoint_difference(folder: Path) -> float:
    """Largest difference between logits of the checkpoint that Megatron-LM has written and those it
    gave, unsplit.
    """
    tokens = torch.from_numpy(np.load(folder / "routing.npz")["tokens"])
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        taken = import_megatron(folder / "checkpoint", Path(scratch) / "ours")
        model = whole_model(taken.config.model).eval()
        load_full([model], SavedTensors(taken.folder).read, Axis())
        mine = model(tokens)
    return float(np.abs(mine.numpy() - np.load(folder / "checkpoint" / "logits.npy")).max())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", nargs="*", help="default: all that our flags can say")
    parser.add_argument("--layout", nargs="*", default=["one"], choices=LAYOUTS)
    args = parser.parse_args(argv)
    cases, bad = json.loads((args.folder / "golden.json").read_text())["cases"], 0
    if (args.folder / "checkpoint").exists() and not args.case:
        off = checkpoint_difference(args.folder)
        bad += off > LOGITS
        print(f"checkpoint: logits {off:.1e} from Megatron-LM's, {LOGITS:.0e} allowed", flush=True)
    for name in args.case or cases:
        for layout in args.layout:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    ranks = trained(args.folder, cases[name], name, layout)
                found = list(differences(cases[name], ranks))
            except UserError as error:
                found = [f"not run: {line}" for line in error.problems]
            bad += bool(found)
            print(
                f"{name} ({layout}): "
                f"{'as Megatron-LM' if not found else f'{len(found)} differences'}",
                flush=True,
            )
            print(
                "\n".join(f"  {line}" for line in found[:12]) + "\n" * bool(found),
                end="",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
