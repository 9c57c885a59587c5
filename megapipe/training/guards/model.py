"""Checks before the first step that the ranks built the model that was asked for, and that it had room.

Layers have vanished in silence from other frameworks (Megatron-LM issues 468, 1304, 1778, 2718). So nothing here is
derived from the split: what the modules hold is compared with the whole model, built without storage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.device import lacks_memory, memory_of
from megapipe.distributed.groups import buffer_bytes, num_links
from megapipe.distributed.layout import layout_of, whole_name
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.models.attention.layer import SelfAttention
from megapipe.models.layer import TransformerLayer
from megapipe.models.provider import StageProvider
from megapipe.partition.spans import LayerSpan
from megapipe.partition.spans import whole as whole_model
from megapipe.plan import GIB, Plan
from megapipe.schedule import Placement

_LAYER = re.compile(r"(^|.*\.)layers\.\d+")
Parts = dict[str, list[int]]


@contextmanager
def room(mesh: ProcessMesh, plan: Plan) -> Iterator[None]:
    """A context for building a model: a device that is too small is a mistake in the flags. Raises: ConfigError."""
    memory = memory_of(mesh.device)
    if memory is not None and mesh.world.size > 1 and mesh.dp_cp.rank == mesh.tp.rank == 0:
        print(fits(plan.peak_bytes[mesh.pp.rank], mesh, memory), flush=True)
    try:
        yield
    except (RuntimeError, TypeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        needed = plan.peak_bytes[mesh.pp.rank] / GIB
        raise ConfigError(
            f"rank {mesh.world.rank} has no memory for its stages, which need {needed:,.3g} GiB by the plan. Use more "
            "--pipeline-model-parallel-size or --tensor-model-parallel-size, or a smaller model."
        ) from None


def fits(peak: float, mesh: ProcessMesh, memory: float) -> str:
    """The bytes of a GPU that the plan does not count, and whether all fit."""
    groups, links = mesh.groups(), mesh.pp.links
    exchanges = [axis.size for axis in (mesh.cp, mesh.experts) if axis is mesh.cp or mesh.ep.size > 1]
    senders = min(mesh.pp.size - 1, 2) + (mesh.pp.size - 1 if len(links) > num_links(mesh.pp.size) else 0)
    beside = buffer_bytes([group.size() for group in groups if group not in links], exchanges, senders)
    text = (
        f"rank {mesh.world.rank}: {len(groups)} communicators of NCCL, {len(links)} of them links, take up to "
        f"{beside / GIB:.2g} GiB of its GPU's {memory / GIB:.3g} beside the plan's {peak / GIB:.3g}"
    )
    if peak + beside <= memory:
        return f" > {text}"
    return (
        f"WARNING: {text}, more than there is: it may run out of memory. Use more --pipeline-model-parallel-size or "
        "--tensor-model-parallel-size, recomputation, or NCCL_MAX_NCHANNELS=16 for half of the communicators' memory."
    )


def check_ownership(
    modules: Sequence[nn.Module], model: ModelConfig, provider: StageProvider, placement: Placement, mesh: ProcessMesh
) -> list[int]:
    """Every layer and every parameter is on exactly one stage of each chain. Collective over the pipeline.

    Args:
        modules: the stages of this rank, in ascending order; a layer is a module named `...layers.N`.
    Returns: parameters of each stage, over all tensor-parallel ranks.
    Raises: ConfigError on every rank, with all that is missing, doubled, foreign or of another shape.
    """
    if mesh.cp.size > 1:
        _check_attention(modules, mesh.cp.size)
    everyone = mesh.pp.gather_json([_parts(module, mesh.tp) for module in modules])
    stages: dict[int, Parts] = {}
    for rank, parts in enumerate(everyone):
        stages |= dict(zip(placement.stages_on(rank), parts, strict=True))
    pieces = (_without_storage(provider, model, span, mesh.tp) for span in whole_model(model.layers, model.depths))
    whole = dict(pair for piece in pieces for pair in _parts(piece, mesh.tp).items())
    problems = [
        line
        for chain in range(placement.num_chains)
        for line in _compare(
            whole, {s: stages[s] for s in range(placement.num_stages) if s // placement.chain == chain}
        )
    ]
    if problems:
        shown = problems[:20] + [f"and {len(problems) - 20} more"] * (len(problems) > 20)
        raise ConfigError(
            "the stages do not make up the model; look at the model provider:" + "".join(f"\n      {p}" for p in shown)
        )
    return [sum(math.prod(shape) for shape in stages[s].values() if shape) for s in range(placement.num_stages)]


def _check_attention(modules: Sequence[nn.Module], ranks: int) -> None:
    """Raises: ConfigError for a layer of another kind, whose attention would not see the tokens of other ranks."""
    layers = [(name, part) for module in modules for name, part in module.named_modules() if _LAYER.fullmatch(name)]
    for name, layer in layers:
        if not any(isinstance(part, TransformerLayer | SelfAttention) for part in layer.modules()):
            raise ConfigError(
                f"--context-parallel-size {ranks}: {name} is a {type(layer).__name__}, which does not meet the keys of "
                "other ranks. Build it of megapipe.models.attention.layer.SelfAttention, or leave the flag out."
            )


def _without_storage(provider: StageProvider, model: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    try:
        # A second build of the whole model, but of shapes alone: it costs milliseconds and no memory.
        with torch.device("meta"):
            return provider(model, span, tp)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "the model provider cannot build the whole model without storage, on torch's meta device, by which it is "
            f"checked that no layer is missing: {str(error).splitlines()[0]} "
            "Let it not read the values of what it has made."
        ) from error


def _parts(module: nn.Module, tp: Axis) -> Parts:
    """Shape in the whole model of each parameter; of each layer an empty one, so that one without any counts too."""
    found: Parts = {name: [] for name, _ in module.named_modules() if _LAYER.fullmatch(name)}
    for name, param in module.named_parameters():
        layout = layout_of(param)
        if layout.received:
            continue  # another parameter's weight, whose owner counts
        assert math.prod(layout.local(tp)) == param.numel(), f"{name} was initialised, so its layout fits"
        found[name] = [n // layout.part[1] if dim == layout.dim else n for dim, n in enumerate(layout.full)]
    return found


def _compare(whole: Parts, stages: dict[int, Parts]) -> Iterator[str]:
    stages = {stage: dict(parts) for stage, parts in stages.items()}
    for name in whole:  # what ranks share is whole where all its parts are
        shared = [(s, part) for s in stages for part in stages[s] if part != name and whole_name(part) == name]
        if sorted(part for _, part in shared) == sorted(f"{name}[{k}/{len(shared)}]" for k in range(len(shared))):
            for stage, part in shared:
                rows, *rest = stages[stage].pop(part)
                stages[shared[0][0]][name] = [rows * len(shared), *rest]
    holders = {name: [s for s, parts in stages.items() if name in parts] for name in whole}
    wrong = [name for name, on in holders.items() if len(on) != 1]
    layers = [name for name in wrong if not whole[name]]
    for name in wrong:
        spoken_for = any(name.startswith(f"{layer}.") and holders[name] == holders[layer] for layer in layers)
        if not spoken_for:
            yield f"{name} is on {_stages(holders[name])}"
    for stage, parts in stages.items():
        for name, shape in parts.items():
            if name not in whole:
                yield f"{name} on stage {stage} is not part of the whole model"
            elif shape != whole[name]:
                yield f"{name} has shape {shape} on stage {stage} and {whole[name]} in the whole model"


def _stages(numbers: Sequence[int]) -> str:
    return f"stages {' and '.join(map(str, numbers))}" if numbers else "no stage"
