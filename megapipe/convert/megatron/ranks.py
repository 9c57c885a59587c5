"""Our checkpoint as Megatron-LM's `torch`: a file for each tensor-, pipeline- and expert-parallel rank.

Its loader cuts nothing: each file has the names, the order and the slices of the modules of its rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint import commit
from megapipe.config import ModelConfig
from megapipe.convert.checkpoints import Converted, fresh_folder
from megapipe.convert.megatron.args import args_of
from megapipe.convert.megatron.experts import is_experts
from megapipe.convert.megatron.export import Export, open_export
from megapipe.convert.megatron.names import fused_name, in_layer, orders, stage_layouts
from megapipe.convert.tensors import Progress, counted, is_trained
from megapipe.distributed.axis import Axis
from megapipe.errors import CheckpointError
from megapipe.partition.spans import LayerSpan, partition
from megapipe.schedule import loop

_FILE, _MAIN = "model_optim_rng.pt", "master"
_EXPERTS = re.compile(r"(.*mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))")


@dataclass(frozen=True)
class Sizes:
    """A run of Megatron-LM. Attributes:
    tp, pp, ep: ranks of tensor, pipeline and expert parallelism; an expert is split over tp too.
    local: has it Megatron-LM's own layers, and experts one by one? Otherwise Transformer Engine's, grouped.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    local: bool = False

    def folder_of(self, t: int, p: int, e: int) -> str:
        return f"mp_rank_{t:02d}" + f"_{p:03d}" * (self.pp > 1) + f"_{e:03d}" * (self.ep > 1)

    def args(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.tp,
            "transformer_impl": "local" if self.local else "transformer_engine",
            "moe_grouped_gemm": not self.local,
            "ckpt_format": "torch",
        }

    def problems(self, model: ModelConfig) -> Iterator[str]:
        sizes = {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}
        flags = {name: f"--target-{name}-parallel-size {size}" for name, size in sizes.items()}
        yield from (f"{flags[name]} must be at least 1" for name, size in sizes.items() if size < 1)
        if min(sizes.values()) < 1:
            return
        heads = {"heads": model.heads, "query groups": model.query_groups}
        of_experts = {"--moe-ffn-hidden-size": model.expert_ffn} if model.has_experts else {}
        shared = {"--moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size or 0}
        split = heads | {"--ffn-hidden-size": model.ffn} | of_experts | shared
        split |= {"rows of the vocabulary": model.padded_vocab_size or 0}
        for name, size in split.items():
            if size % self.tp:
                yield f"{flags['tensor']} does not divide the model's {size} {name}"
        if model.layers % self.pp:
            yield f"{flags['pipeline']} does not divide the model's {model.layers} layers"
        if self.local and self.tp > 1 and model.multi_latent_attention:
            yield (
                f"{flags['tensor']} does not go with --transformer-impl local here: of latents each of its ranks has a "
                "part. Use --transformer-impl transformer_engine, or --ckpt-format torch_dist"
            )
        if self.ep > 1 and (not model.has_experts or model.experts % self.ep):
            yield f"{flags['expert']} does not divide the model's {model.num_experts or 0} experts"


def export_ranks(
    folder: Path,
    target: Path,
    sizes: Sizes,
    *,
    optimizer: bool = True,
    fused: bool | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """One of our checkpoints -> TARGET/iter_NNNNNNN, for a run of these sizes with --load TARGET --ckpt-format torch.

    Args: as of `export_megatron`.
    Raises: CheckpointError for damage, a model whose layers differ, or sizes that do not divide it.
    """
    export = open_export(folder, target, optimizer, fused)
    if problems := list(sizes.problems(export.config.model)):
        raise CheckpointError(problems)
    ranks = [(t, p, e) for p in range(sizes.pp) for e in range(sizes.ep) for t in range(sizes.tp)]
    with fresh_folder(target) as made:
        out = made / f"iter_{export.iteration:07d}"
        for rank in counted(ranks, progress):
            path = out / sizes.folder_of(*rank)
            path.mkdir(parents=True)
            torch.save(_content(export, sizes, *rank), path / _FILE)
        commit.write_durably(made / commit.POINTER, str(export.iteration))
    notes = [*export.notes(), "no state of random streams goes out: add --no-load-rng there"]
    if export.steps is not None:
        notes.append("--use-distributed-optimizer does not take that state: add --no-load-optim beside it")
    size = export.config.model.padded_vocab_size or 0
    return Converted(target / f"iter_{export.iteration:07d}", export.config, tuple(notes), size)


def _content(export: Export, sizes: Sizes, t: int, p: int, e: int) -> dict[str, Any]:
    """A rank's file."""
    model = export.config.model
    span = partition(model.layers, loop(sizes.pp, 1))[p]
    layouts = stage_layouts(model, span)
    if sizes.pp == 1:  # where the embedding is, a tied head is nothing of its own
        layouts = {name: layout for name, layout in layouts.items() if layout.tied_to is None}
    axis = Axis(t, sizes.tp, expert_axes={"ep": Axis(e, sizes.ep), "etp": Axis(t, sizes.tp)})
    names = list(orders(layouts))[0 if sizes.local or model.multi_latent_attention else 1]

    def read(kind: str) -> dict[str, Tensor]:
        """This rank's parts by their names, in the order of its modules."""
        found: list[tuple[int, int, str, Tensor]] = []
        for name in names if not kind else filter(is_trained, names):
            whole = export.saved.read(f"optimizer.{kind}." * bool(kind) + (layouts[name].tied_to or name))
            part = layouts[name].mine(whole.float() if kind else whole, axis)
            its = _EXPERTS.sub(r"\1linear_fc1.weight", name) if sizes.local else name  # an expert, then the next
            parts = _parts(name, part, model, span, sizes.local)
            found += [(names.index(its), j, theirs, x) for j, (theirs, x) in enumerate(parts)]
        found.sort(key=lambda row: row[:2])
        return {name: x.clone(memory_format=torch.contiguous_format) for *_, name, x in found}

    tensors = read("")
    of_linear = [x.rpartition(".")[0] for x in tensors if re.search(r"\.(linear_\w+|eh_proj)\.weight$", x)]
    content = export.common(args_of(export.config) | sizes.args())
    extra = dict.fromkeys(f"{module}._extra_state" for module in [*of_linear, *["output_layer"] * span.loss])
    content["model"] = tensors | extra
    if export.steps is None:
        return content
    kinds = ("exp_avg", "exp_avg_sq", *([_MAIN] if export.config.precision.half else []))
    shapes = {name: x.shape for name, x in tensors.items() if is_trained(name)}
    made = _optimizers(export, shapes, {kind: read(kind) for kind in kinds}, apart=sizes.ep > 1)
    return content | {"optimizer": made, "opt_param_scheduler": export.scheduler()}


def _parts(name: str, x: Tensor, model: ModelConfig, span: LayerSpan, local: bool) -> list[tuple[str, Tensor]]:
    """A rank's part of a tensor of ours -> theirs: gate above up, experts each by itself, layers counted from 0."""
    if model.gated and ".linear_fc1." in name:
        x = x.flatten(int(is_experts(name)), int(is_experts(name)) + 1)
    if (place := in_layer(name, model)) is not None:
        layer, inner = place
        its = inner if local else fused_name(inner, model.has_experts_in(layer), model.multi_latent_attention)
        first = f"decoder.layers.{layer - span.first}." if name.startswith("decoder.") else name.removesuffix(inner)
        name = first + its
    if not is_experts(name):
        return [(name, x)]
    return [
        (_EXPERTS.sub(rf"\1local_experts.{j}.\2", name) if local else f"{name}{j}", one)
        for j, one in enumerate(x.unbind(0))
    ]


def _optimizers(
    export: Export, shapes: Mapping[str, torch.Size], state: Mapping[str, Mapping[str, Tensor]], apart: bool
) -> dict[str, Any] | list[dict[str, Any]]:
    """The state of a rank's optimizer, or of two where experts have one of their own (apart). Parameters are numbered
    group by group: matrices, which decay, then the others."""
    step = {} if export.fused else {"step": torch.tensor(float(export.steps or 0))}

    def one(experts: bool) -> dict[str, Any]:
        mine = {name: len(shape) > 1 for name, shape in shapes.items() if (apart and is_experts(name)) == experts}
        of_groups = [[name for name, decays in mine.items() if decays == wanted] for wanted in (True, False)]
        # Biases of experts: all ranks have them, or none.
        kept = [n for n, its in enumerate(of_groups) if its or not (experts and n)]
        numbers = {name: n for n, name in enumerate(of_groups[0] + of_groups[1])}
        groups = [
            export.groups()[n] | {"params": [numbers[name] for name in of_groups[n]], "is_expert_parallel": experts}
            for n in kept
        ]
        moments = [kind for kind in state if kind != _MAIN]
        held = {n: {kind: state[kind][name] for kind in moments} | step for name, n in numbers.items()}
        inner = {"state": held, "param_groups": groups}
        if _MAIN not in state:
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": [[state[_MAIN][x] for x in of_groups[n]] for n in kept]}

    return [one(False), one(True)] if apart else one(False)
