"""Check before the first step that ranks built the right model and have memory for it.

Layers have vanished in silence from other frameworks (Megatron-LM issues 468, 1304, 1778, 2718).
Nothing here is therefore derived from the split. The contents of the stages are compared with the
whole model, built without storage.
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
"""Shapes of parameters in the whole model, by name. A layer has an entry with an empty shape."""


@contextmanager
def room(mesh: ProcessMesh, plan: Plan) -> Iterator[None]:
    """Return a context that turns a lack of memory into a ConfigError: the flags must change.

    On GPUs it also prints whether the communicators' buffers fit the memory.
    """
    memory = memory_of(mesh.device)
    first_of_stage = mesh.dp_cp.rank == mesh.tp.rank == 0
    if memory is not None and mesh.world.size > 1 and first_of_stage:
        print(fits(plan.peak_bytes[mesh.pp.rank], mesh, memory), flush=True)
    try:
        yield
    except (RuntimeError, TypeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        needed = plan.peak_bytes[mesh.pp.rank] / GIB
        raise ConfigError(
            f"rank {mesh.world.rank} has no memory for its stages, which need {needed:,.3g} GiB by "
            "the plan. Use more --pipeline-model-parallel-size or --tensor-model-parallel-size, or "
            "a smaller model."
        ) from None


def fits(peak: float, mesh: ProcessMesh, memory: float) -> str:
    """Return a line on the GPU memory of NCCL's buffers, which the plan does not count.

    The line is a warning if the buffers do not fit.

    Args:
        peak: the plan's peak on this rank, in bytes.
        mesh: this rank's mesh.
        memory: bytes of this rank's GPU.
    """
    groups = mesh.groups()
    links = mesh.pp.links
    # Axes in which every rank sends to every other one.
    exchanges = [mesh.cp.size]
    if mesh.ep.size > 1:
        exchanges.append(mesh.experts.size)
    # Each rank that is heard from has buffers. In a pipeline these are the two neighbours.
    senders = min(mesh.pp.size - 1, 2)
    if len(links) > num_links(mesh.pp.size):
        # The communicator of a shared vocabulary, whose messages come from all ranks.
        senders += mesh.pp.size - 1
    sizes = [group.size() for group in groups if group not in links]
    buffers = buffer_bytes(sizes, exchanges, senders)
    text = (
        f"rank {mesh.world.rank}: {len(groups)} communicators of NCCL, {len(links)} of them links, "
        f"take up to {buffers / GIB:.2g} GiB of its GPU's {memory / GIB:.3g} in addition to the "
        f"plan's {peak / GIB:.3g}"
    )
    if peak + buffers <= memory:
        return f" > {text}"
    return (
        f"WARNING: {text}, more than there is: it may run out of memory. Use more "
        "--pipeline-model-parallel-size or --tensor-model-parallel-size, recomputation, or "
        "NCCL_MAX_NCHANNELS=16 for half of the communicators' memory."
    )


def check_ownership(
    modules: Sequence[nn.Module],
    model: ModelConfig,
    provider: StageProvider,
    placement: Placement,
    mesh: ProcessMesh,
) -> list[int]:
    """Check that every layer and parameter is on exactly one stage of each copy of the model.

    DualPipe has two copies, in opposite directions. Collective over the pipeline.

    Args:
        modules: the stages of this rank in ascending order. A layer is a module `...layers.N`.
        model: the model's configuration.
        provider: builds stages; it builds the whole model here, without storage.
        placement: the placement of stages on ranks.
        mesh: this rank's mesh.
    Returns: the number of parameters of each stage, over all tensor-parallel ranks.
    Raises: ConfigError on every rank, with the first 20 parts that are missing, doubled, not part
        of the model, or of another shape. Also for a layer that does not see the tokens of other
        context-parallel ranks.
    """
    # Names and shapes alone. Each rank compares all of them, so that all raise the same error.
    parts = [_parts(module, mesh.tp) for module in modules]
    everyone = mesh.pp.gather_json([parts, _others_attention(modules, mesh.cp.size)])
    stages: dict[int, Parts] = {}
    for rank, (parts, refused) in enumerate(everyone):
        if refused is not None:
            raise ConfigError(refused)
        stages |= dict(zip(placement.stages_on(rank), parts, strict=True))
    whole: Parts = {}
    for span in whole_model(model.layers, model.depths):
        whole |= _parts(_without_storage(provider, model, span, mesh.tp), mesh.tp)
    problems: list[str] = []
    # DualPipe has two chains of stages, each a whole model.
    for chain in range(placement.num_chains):
        first = chain * placement.chain
        own = {s: stages[s] for s in range(first, first + placement.chain)}
        problems += _compare(whole, own)
    if problems:
        shown = problems[:20]
        if len(problems) > 20:
            shown.append(f"and {len(problems) - 20} more")
        raise ConfigError(
            "the stages do not make up the model; look at the model provider:"
            + "".join(f"\n      {problem}" for problem in shown)
        )
    counts = []
    for stage in range(placement.num_stages):
        counts.append(sum(math.prod(shape) for shape in stages[stage].values() if shape))
    return counts


def _others_attention(modules: Sequence[nn.Module], ranks: int) -> str | None:
    """Return why a layer does not see the tokens of all context-parallel ranks, as ours does.

    Returns None if every layer has megapipe's attention, or if there is one such rank.

    Args:
        modules: this rank's stages.
        ranks: number of context-parallel ranks.
    """
    if ranks == 1:
        return None
    named = [pair for module in modules for pair in module.named_modules()]
    for name, layer in named:
        if not _LAYER.fullmatch(name):
            continue
        if not any(isinstance(part, TransformerLayer | SelfAttention) for part in layer.modules()):
            return (
                f"--context-parallel-size {ranks}: {name} is a {type(layer).__name__}, which does "
                "not meet the keys of other ranks. Build it of "
                "megapipe.models.attention.layer.SelfAttention, or leave the flag out."
            )
    return None


def _without_storage(
    provider: StageProvider, model: ModelConfig, span: LayerSpan, tp: Axis
) -> nn.Module:
    """Build a part of the model on torch's meta device, to learn its names and shapes.

    Args:
        provider: builds the part.
        model: the model's configuration.
        span: the layers of the part, and whether it has embedding and loss.
        tp: the tensor-parallel ranks.
    Raises: ConfigError if the provider needs values, which this device does not have.
    """
    try:
        # A second build of the whole model, but of shapes alone: it costs milliseconds.
        with torch.device("meta"):
            return provider(model, span, tp)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "the model provider cannot build the whole model without storage, on torch's meta "
            "device, by which it is checked that no layer is missing: "
            f"{str(error).splitlines()[0]} Let it not read the values of what it has made."
        ) from error


def _parts(module: nn.Module, tp: Axis) -> Parts:
    """Return {name: shape} of each parameter of a stage, over all tensor-parallel ranks.

    Each layer is in the dict too, with an empty shape.

    Args:
        module: the stage.
        tp: the tensor-parallel ranks.
    """
    # Layers too, so that a layer without parameters counts.
    found: Parts = {name: [] for name, _ in module.named_modules() if _LAYER.fullmatch(name)}
    for name, param in module.named_parameters():
        layout = layout_of(param)
        # A tied weight counts at its owner.
        if layout.received:
            continue
        assert math.prod(layout.local(tp)) == param.numel(), f"{name} was initialised, so it fits"
        shape = list(layout.full)
        if layout.dim is not None:
            # A share of the vocabulary counts as its own rows here; `_unite` adds the shares up.
            shape[layout.dim] //= layout.part[1]
        found[name] = shape
    return found


def _compare(whole: Parts, stages: dict[int, Parts]) -> Iterator[str]:
    """Yield a text for each layer or parameter that is not on exactly one stage, or differs.

    Args:
        whole: {name of a layer or parameter: description} of the whole model.
        stages: {stage: the same of the stage}.
    """
    stages = {stage: dict(parts) for stage, parts in stages.items()}
    for name in whole:
        _unite(name, stages)
    holders = {name: [s for s, parts in stages.items() if name in parts] for name in whole}
    wrong = [name for name, on in holders.items() if len(on) != 1]
    layers = [name for name in wrong if not whole[name]]
    for name in wrong:
        # One line for a layer says the same of all its parameters.
        if not any(name.startswith(f"{x}.") and holders[name] == holders[x] for x in layers):
            yield f"{name} is on {_stages(holders[name])}"
    for stage, parts in stages.items():
        for name, shape in parts.items():
            if name not in whole:
                yield f"{name} on stage {stage} is not part of the whole model"
            elif shape != whole[name]:
                right = whole[name]
                yield f"{name} has shape {shape} on stage {stage} and {right} in the whole model"


def _unite(name: str, stages: dict[int, Parts]) -> None:
    """Replace shards of a vocabulary's parameter by one parameter, if all shards are there.

    Args:
        name: the name of the whole parameter; shard k of n is called name[k/n].
        stages: {stage: {name of a layer or parameter: description}}; changed in place.
    """
    shards = []
    for stage, parts in stages.items():
        for part in parts:
            if part != name and whole_name(part) == name:
                shards.append((stage, part))
    count = len(shards)
    if sorted(part for _, part in shards) != sorted(f"{name}[{k}/{count}]" for k in range(count)):
        return
    for stage, part in shards:
        rows, *rest = stages[stage].pop(part)
        stages[shards[0][0]][name] = [rows * count, *rest]


def _stages(numbers: Sequence[int]) -> str:
    return f"stages {' and '.join(map(str, numbers))}" if numbers else "no stage"
