"""Export a checkpoint to Megatron-LM's `torch` format: a file for each rank of the run.

Megatron-LM's loader reshards nothing in this format. The file of a tensor-, pipeline- and
expert-parallel rank has the names, the order and the slices of the modules of that rank.
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
from megapipe.convert.checkpoints import Converted
from megapipe.convert.folders import fresh_folder
from megapipe.convert.megatron.args import args_of
from megapipe.convert.megatron.experts import is_experts
from megapipe.convert.megatron.export import Export, open_export
from megapipe.convert.megatron.legacy import FILE, rank_folder
from megapipe.convert.megatron.names import fused_name, in_layer, orders, stage_layouts
from megapipe.convert.tensors import Progress, counted, is_trained
from megapipe.distributed.axis import Axis
from megapipe.errors import CheckpointError
from megapipe.partition.spans import partition
from megapipe.schedule import loop

_MASTER = "master"
_EXPERTS = re.compile(r"(.*mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))")
_LINEAR = re.compile(r"(.*\.(?:linear_\w+|eh_proj))\.weight")


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes, and the kind of layers, of the Megatron-LM run that loads an export.

    `args` returns Megatron-LM's arguments for these sizes, `problems` a text for each size that
    does not suit the model.

    Attributes:
        tp: tensor-parallel ranks, which split experts too.
        pp: pipeline ranks.
        ep: expert-parallel ranks.
        local: whether the run uses Megatron-LM's own layers, with each expert a module. Otherwise
            it uses Transformer Engine's, with a grouped product for all experts.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    local: bool = False

    def args(self) -> dict[str, Any]:
        """Return {argument: value}, Megatron-LM's arguments for these sizes."""
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
        """Yield a sentence for each size that is below 1 or does not divide the model.

        Megatron-LM's own layers with latent attention have no tensor parallelism here.
        """
        sizes = {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}
        flags = {name: f"--target-{name}-parallel-size {size}" for name, size in sizes.items()}
        for name, size in sizes.items():
            if size < 1:
                yield f"{flags[name]} must be at least 1"
        # The rest divides by the sizes.
        if min(sizes.values()) < 1:
            return
        # Dimensions that tensor parallelism splits.
        split = {
            "heads": model.heads,
            "query groups": model.query_groups,
            "--ffn-hidden-size": model.ffn,
        }
        if model.has_experts:
            split["--moe-ffn-hidden-size"] = model.expert_ffn
        shared = model.moe_shared_expert_intermediate_size
        split["--moe-shared-expert-intermediate-size"] = shared or 0
        split["rows of the vocabulary"] = model.padded_vocab_size or 0
        for name, size in split.items():
            if size % self.tp:
                yield f"{flags['tensor']} does not divide the model's {size} {name}"
        if model.layers % self.pp:
            yield f"{flags['pipeline']} does not divide the model's {model.layers} layers"
        if self.local and self.tp > 1 and model.multi_latent_attention:
            yield (
                f"{flags['tensor']} does not go with --transformer-impl local here: each of its "
                "ranks has a part of the latents. Use --transformer-impl transformer_engine, or "
                "--ckpt-format torch_dist"
            )
        if self.ep > 1 and (not model.has_experts or model.experts % self.ep):
            experts = model.num_experts or 0
            yield f"{flags['expert']} does not divide the model's {experts} experts"


def export_ranks(
    folder: Path,
    target: Path,
    sizes: Sizes,
    *,
    optimizer: bool = True,
    fused: bool | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert a checkpoint to TARGET/iter_NNNNNNN in Megatron-LM's `torch` format.

    A run of the given sizes loads it with --load TARGET --ckpt-format torch.

    Args:
        folder: iter_NNNNNNN of megapipe.
        target: a new or empty folder.
        sizes: parallel sizes and kind of layers of that run.
        optimizer: export the optimizer's state, if the checkpoint has it.
        fused: whether the state is for Transformer Engine's or Apex's Adam, not for torch's. None:
            True for 16-bit weights.
        progress: is called with (done, total) before every file and at the end.

    Raises: CheckpointError if the checkpoint is damaged, Megatron-LM cannot express the model, or
        the sizes do not divide it.
    """
    export = open_export(folder, target, optimizer, fused)
    if problems := list(sizes.problems(export.config.model)):
        raise CheckpointError(problems)
    ranks = []
    for p in range(sizes.pp):
        for e in range(sizes.ep):
            ranks += [(t, p, e) for t in range(sizes.tp)]
    iteration = f"iter_{export.iteration:07d}"
    with fresh_folder(target) as made:
        # Rank by rank, so that memory holds the slices of one rank only.
        for rank in counted(ranks, progress):
            path = made / iteration / rank_folder(rank, sizes.pp, sizes.ep)
            path.mkdir(parents=True)
            torch.save(_RankFile(export, sizes, *rank).content(), path / FILE)
        commit.write_durably(made / commit.POINTER, str(export.iteration))
    notes = [*export.notes(), "no state of random streams goes out: add --no-load-rng there"]
    if export.steps is not None:
        notes.append(
            "--use-distributed-optimizer does not take that state: add --no-load-optim with it"
        )
    rows = export.config.model.padded_vocab_size or 0
    return Converted(target / iteration, export.config, tuple(notes), rows)


class _RankFile:
    """The file of one rank; `content` returns the object that is saved in it.

    `tensors` returns this rank's slices: of the weights, or of one kind of optimizer state.

    Args:
        export: the checkpoint of megapipe, opened.
        sizes: parallel sizes and kind of layers of the run that will load the file.
        t: the tensor-parallel rank.
        p: the pipeline rank.
        e: the expert-parallel rank.
    """

    def __init__(self, export: Export, sizes: Sizes, t: int, p: int, e: int) -> None:
        model = export.config.model
        self.export = export
        self.sizes = sizes
        self.model = model
        self.span = partition(model.layers, loop(sizes.pp, 1))[p]
        self.layouts = stage_layouts(model, self.span)
        # On one stage with the embedding, a tied head is no parameter of its own.
        if sizes.pp == 1:
            whole = self.layouts.items()
            self.layouts = {name: layout for name, layout in whole if layout.tied_to is None}
        # Each tensor-parallel rank has a slice of each of its experts.
        experts = {"ep": Axis(e, sizes.ep), "etp": Axis(t, sizes.tp)}
        self.axis = Axis(t, sizes.tp, expert_axes=experts)
        # Latent attention has one order in both kinds of layers.
        own_layers, *engine_layers = orders(self.layouts)
        self.names = own_layers
        if not sizes.local and not model.multi_latent_attention:
            self.names = engine_layers[0]

    def content(self) -> dict[str, Any]:
        """Return the object to save: arguments, weights, and the optimizer's state if exported."""
        export = self.export
        content = export.common(args_of(export.config) | self.sizes.args())
        tensors = self.tensors("")
        # Every linear layer looks for an extra state, which is empty without FP8.
        linear = [match[1] for match in map(_LINEAR.fullmatch, tensors) if match]
        if self.span.loss:
            linear.append("output_layer")
        extras = dict.fromkeys(f"{module}._extra_state" for module in linear)
        content["model"] = tensors | extras
        if export.steps is None:
            return content

        kinds = ["exp_avg", "exp_avg_sq"]
        if export.config.precision.half:
            kinds.append(_MASTER)
        state = {kind: self.tensors(kind) for kind in kinds}
        # Under expert parallelism, experts have an optimizer of their own.
        if self.sizes.ep > 1:
            content["optimizer"] = [self._optimizer(state, experts) for experts in (False, True)]
        else:
            content["optimizer"] = self._optimizer(state, None)
        return content | {"opt_param_scheduler": export.scheduler()}

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return {Megatron-LM's name: this rank's slice}, in the order of Megatron-LM's modules.

        Args:
            kind: exp_avg, exp_avg_sq, master, or "" for the model's weights.
        """
        found: list[tuple[int, int, str, Tensor]] = []
        for name in self.names:
            if kind and not is_trained(name):
                continue
            layout = self.layouts[name]
            owner = layout.tied_to or name
            # Megatron-LM keeps the state in float32, unless a flag says otherwise.
            if kind:
                whole = self.export.saved.read(f"optimizer.{kind}.{owner}").float()
            else:
                whole = self.export.saved.read(owner)
            # Experts of Megatron-LM's own are modules that follow each other: fc1 and fc2 of the
            # first expert, then of the second.
            module = name
            if self.sizes.local:
                module = _EXPERTS.sub(r"\1linear_fc1.weight", name)
            place = self.names.index(module)
            parts = self._parts(name, layout.mine(whole, self.axis))
            found += [(place, j, theirs, x) for j, (theirs, x) in enumerate(parts)]
        # By place in the modules, and then by expert. The sort is stable: fc1 stays before fc2.
        found.sort(key=lambda row: row[:2])
        # A slice alone: torch.save would write all of the tensor that it is a view of.
        return {name: x.clone(memory_format=torch.contiguous_format) for *_, name, x in found}

    def _parts(self, name: str, x: Tensor) -> list[tuple[str, Tensor]]:
        """Return (Megatron-LM's name, tensor) for each tensor that holds a slice's elements.

        The dimension of gate and up is merged with the next one. A tensor of experts becomes one
        tensor for each expert.

        Args:
            name: megapipe's name of the parameter.
            x: this rank's slice of it, or of the parameter's optimizer state.
        """
        of_experts = is_experts(name)
        if self.model.gated and ".linear_fc1." in name:
            gate = int(of_experts)
            x = x.flatten(gate, gate + 1)
        name = self._stage_name(name)
        if not of_experts:
            return [(name, x)]
        found = []
        for j, expert in enumerate(x.unbind(0)):
            theirs = f"{name}{j}"
            if self.sizes.local:
                theirs = _EXPERTS.sub(rf"\1local_experts.{j}.\2", name)
            found.append((theirs, expert))
        return found

    def _stage_name(self, name: str) -> str:
        """Return Megatron-LM's name of a parameter on this rank, whose first layer is layer 0.

        Args:
            name: megapipe's name, with the layer's number in the whole model.
        """
        place = in_layer(name, self.model)
        if place is None:
            return name
        layer, inner = place
        start = name.removesuffix(inner)
        if name.startswith("decoder."):
            start = f"decoder.layers.{layer - self.span.first}."
        if not self.sizes.local:
            sparse = self.model.has_experts_in(layer)
            inner = fused_name(inner, sparse, self.model.multi_latent_attention)
        return start + inner

    def _optimizer(
        self, state: Mapping[str, Mapping[str, Tensor]], of_experts: bool | None
    ) -> dict[str, Any]:
        """Return the state dict of an optimizer, in which parameters have numbers instead of names.

        Args:
            state: {kind: {Megatron-LM's name: tensor}}, in module order. Kinds: exp_avg,
                exp_avg_sq, and master for 16-bit weights.
            of_experts: True for the optimizer of the experts, False for the one of all other
                parameters, None if one optimizer has all parameters.
        """
        names = list(state["exp_avg"])
        if of_experts is not None:
            names = [name for name in names if is_experts(name) == of_experts]
        # Parameters are numbered group by group: matrices, which decay, then all others.
        matrices = [name for name in names if state["exp_avg"][name].ndim > 1]
        others = [name for name in names if state["exp_avg"][name].ndim <= 1]
        params = [matrices, others]
        # Only biases could be a second group of experts, on all ranks or on none.
        if of_experts and not others:
            params = [matrices]
        numbers = {name: n for n, name in enumerate(matrices + others)}
        step = torch.tensor(float(self.export.steps or 0))
        held: dict[int, dict[str, Tensor]] = {}
        for name, n in numbers.items():
            held[n] = {kind: state[kind][name] for kind in state if kind != _MASTER}
            if not self.export.fused:
                held[n]["step"] = step
        groups = []
        for group, members in zip(self.export.groups(), params, strict=False):
            group["params"] = [numbers[name] for name in members]
            group["is_expert_parallel"] = bool(of_experts)
            groups.append(group)
        inner = {"state": held, "param_groups": groups}
        if _MASTER not in state:
            return inner
        masters = state[_MASTER]
        mains = [[masters[name] for name in members] for members in params]
        return {"optimizer": inner, "fp32_from_fp16_params": mains}
