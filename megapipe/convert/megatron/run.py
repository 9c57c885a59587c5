"""A run of Megatron-LM taken over: its checkpoint as ours, weights, optimizer and where the run was.

Tensors are read one at a time; of a file of the `torch` format only what is read comes into memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.checkpoint import commit
from megapipe.config import Config
from megapipe.convert.checkpoints import Converted, write_checkpoint
from megapipe.convert.huggingface.checks import check_names
from megapipe.convert.megatron.args import config_of, left_out
from megapipe.convert.megatron.dist import FLAT, DistributedTensors
from megapipe.convert.megatron.flat import FlatState, Row
from megapipe.convert.megatron.legacy import LegacyTensors
from megapipe.convert.megatron.names import orders, stage_layouts
from megapipe.convert.tensors import Progress, counted, is_trained, our_layouts
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError
from megapipe.optim.loss_scale import LossScale
from megapipe.partition.spans import LayerSpan, partition
from megapipe.schedule import loop

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS_ALONE = "; convert the weights alone with --no-load-optim"
Read = Callable[[str, str, Layout], Tensor]
"""(kind, name, layout) -> a whole tensor in the shape in which we save it. kind: empty for the model's weights, else
exp_avg, exp_avg_sq or master."""


class Source(Protocol):
    """A checkpoint of either format.

    Attributes:
        copies: tensors of which a later stage has other numbers than the first that has them.
    """

    folder: Path
    copies: Set[str]

    @property
    def common(self) -> Mapping[str, Any]: ...

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]: ...

    def pieces(self, name: str) -> int: ...

    def read(self, kind: str, name: str, layout: Layout) -> Tensor: ...


def import_megatron(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    optimizer: bool = True,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Megatron-LM's folder of checkpoints -> TARGET/iter_NNNNNNN, for --load TARGET at any tp, pp and schedule.

    Args:
        source: the folder that it saves in, or one checkpoint.
        step: iteration. Default: the one that its latest_checkpointed_iteration.txt names, or the only one.
        optimizer: with its state, if that was saved.
    Raises: CheckpointError naming file and tensor or argument that is missing, damaged or not supported. Nothing is
        written then.
    """
    if commit.iterations_in(target):
        raise CheckpointError(f"{target} holds checkpoints already; give another folder")
    folder = find_folder(source, step)
    opened: Source = DistributedTensors(folder) if (folder / ".metadata").exists() else LegacyTensors(folder)
    common = opened.common
    args = common["args"].fields() if "args" in common else {}
    config = config_of(args, str(folder))
    layouts, tied = _parameters(config)
    _check(opened, "", layouts, tied)
    released = folder.name == "release"
    with_state = optimizer and not released and _has_state(opened, common, args)
    read: Read = opened.read
    steps = None
    if with_state:
        read, steps = _with_state(opened, args, layouts, tied, config)
    iteration = 0 if released else int(common["iteration"])
    kinds = ["", *MOMENTS, *(["master"] if config.precision.half else [])] if with_state else [""]
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float16 if config.precision.fp16 else torch.float32
    rows = [(kind, name) for kind in kinds for name in layouts if not kind or is_trained(name)]

    def tensor(kind: str, name: str) -> tuple[str, Tensor]:
        wide = kind or not is_trained(name)
        x = read(kind, name, layouts[name]).to(torch.float32 if wide else dtype)
        return f"optimizer.{kind}.{name}" if kind else name, x

    tensors = (tensor(*row) for row in counted(rows, progress))
    state = {"iteration": iteration} | _where(common, args, released)
    final = write_checkpoint(target, config, tensors, state, steps)
    notes = [*_notes(config, with_state, folder), *_left(args)]
    notes += [f"{name} is the first stage's; a later one has other numbers in its copy" for name in opened.copies]
    return Converted(final, config, tuple(notes), args["padded_vocab_size"], steps)


def find_folder(source: Path, step: int | None = None) -> Path:
    """The checkpoint in a folder of checkpoints.

    Raises: CheckpointError if there is none.
    """
    there = sorted(path.name for path in source.glob("iter_*"))
    if step is not None:
        folder = source / f"iter_{step:07d}"
    elif (source / commit.POINTER).exists():
        text = (source / commit.POINTER).read_text(errors="replace").strip()
        if not re.fullmatch(r"release|\d{1,18}", text):
            raise CheckpointError(f"{source / commit.POINTER} holds {text[:40]!r}, neither an iteration nor release")
        folder = source / (text if text == "release" else f"iter_{int(text):07d}")
    elif len(there) > 1:
        raise CheckpointError(f"{source} has no {commit.POINTER}; choose one of {', '.join(there)} with --ckpt-step N")
    else:
        folder = source / there[0] if there else source
    if not (folder / ".metadata").exists() and not any(folder.glob("mp_rank_*")):
        raise CheckpointError(
            f"{folder} is no checkpoint of Megatron-LM: it has neither a .metadata (torch_dist) nor mp_rank_ folders "
            "(torch)" + f"; {source} holds {', '.join(there)}" * bool(there)
        )
    return folder


def _parameters(config: Config) -> tuple[dict[str, Layout], dict[str, str]]:
    """Layouts of what we save, and what repeats another's weight."""
    layouts = our_layouts(config.model)
    tied = {name: layout.tied_to for name, layout in layouts.items() if layout.tied_to is not None}
    return {name: layout for name, layout in layouts.items() if name not in tied}, tied


def _check(opened: Source, kind: str, layouts: Mapping[str, Layout], tied: Mapping[str, str]) -> None:
    """Raises: CheckpointError with every tensor that is missing, left over or of another shape."""
    needed = {
        name: layout.local(Axis(size=opened.pieces(name)))
        for name, layout in layouts.items()
        if not kind or is_trained(name)
    }
    there = {name: shape for name, shape in opened.shapes(kind).items() if name not in tied}
    check_names(f"{opened.folder}" + f", {kind}" * bool(kind), needed, there, _forms)


def _forms(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A shape as it is, and with gate and up in one dimension, of each expert too."""
    return [shape, *((*shape[:n], shape[n] * shape[n + 1], *shape[n + 2 :]) for n in range(len(shape) - 1))]


def _has_state(opened: Source, common: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
    named = not args.get("no_save_optim") and (common.get("optimizer") or _objects(opened))
    return bool(named or opened.shapes("exp_avg"))


def _objects(opened: Source) -> list[str]:
    """Keys of the distributed optimizer's objects."""
    objects = getattr(opened, "objects", {})
    return [key for key in objects if key.startswith("optimizer.")]


def _with_state(
    opened: Source, args: Mapping[str, Any], layouts: Mapping[str, Layout], tied: Mapping[str, str], config: Config
) -> tuple[Read, int]:
    """Reads state too. Returns also the number of the optimizer's steps."""
    if args.get("optimizer", "adam") != "adam":
        raise CheckpointError(f"{opened.folder}: --optimizer {args['optimizer']} is not supported{WEIGHTS_ALONE}")
    held: Any = opened.common.get("optimizer")
    rows: list[list[Row]] | None
    if isinstance(opened, LegacyTensors):
        rows = opened.rows()
    else:
        assert isinstance(opened, DistributedTensors)
        rows = _rows(opened, args, config, tied)
        held = [held, *(opened.objects[key].read() for key in _objects(opened) if key.endswith(".optimizer"))]
    steps = {int(step) for step in _steps(held)}
    if len(steps) != 1:
        raise CheckpointError(f"{opened.folder} does not say after how many steps its optimizer is{WEIGHTS_ALONE}")
    if rows is None:
        for kind in (*MOMENTS, *(["master"] if config.precision.half else [])):
            if not opened.shapes(kind):
                kept = ", ".join(_objects(opened)) or "nothing of it"
                raise CheckpointError(f"{opened.folder} has no {kind} by parameter, but {kept}{WEIGHTS_ALONE}")
            _check(opened, kind, layouts, tied)
        return opened.read, steps.pop()
    flat = FlatState(rows, layouts, tied)
    flat.find(lambda name: opened.read("", name, layouts[name]))
    return lambda kind, name, layout: (flat if kind else opened).read(kind, name, layout), steps.pop()


def _rows(
    opened: DistributedTensors, args: Mapping[str, Any], config: Config, tied: Mapping[str, str]
) -> list[list[Row]] | None:
    """The distributed optimizer's buckets of `torch_dist`, by tensor-parallel rank; None if there are none."""
    keys = [key for key in opened.sizes if FLAT.match(key)]
    if not keys:
        return None
    if config.model.has_experts:
        raise CheckpointError(
            f"{opened.folder}: the distributed optimizer's rows (dp_reshardable) of a model with experts are not read; "
            "save once more with --dist-ckpt-optim-fully-reshardable, or" + WEIGHTS_ALONE.removeprefix(";")
        )
    if args.get("pipeline_model_parallel_layout") is not None:
        raise CheckpointError(f"{opened.folder}: --pipeline-model-parallel-layout is not supported{WEIGHTS_ALONE}")
    tp, pp = int(args["tensor_model_parallel_size"]), int(args["pipeline_model_parallel_size"])
    chunks = int(args.get("virtual_pipeline_model_parallel_size") or 1)
    spans = partition(
        config.model.layers,
        loop(pp, chunks),
        account_for_embedding=bool(args.get("account_for_embedding_in_pipeline_split")),
        account_for_loss=bool(args.get("account_for_loss_in_pipeline_split")),
        first=args.get("decoder_first_pipeline_num_layers"),
        last=args.get("decoder_last_pipeline_num_layers"),
    )

    def row(t: int, stage: int) -> Row:
        start = f"optimizer.distributed.dp_group_idx_{stage % pp * tp + t}.gbuf_idx_{stage // pp}.dtype_"
        pattern = re.compile(re.escape(start) + r"[^/]*\.bucket_idx_(\d+)\.param")
        buckets = sorted((int(match[1]), key) for key in keys if (match := pattern.fullmatch(key)))
        sizes = [opened.sizes[key][0] for _, key in buckets]

        def read(kind: str, start: int, stop: int) -> Tensor:
            parts, at = [], 0
            for (_, key), size in zip(buckets, sizes, strict=True):
                low, high = max(start, at), min(stop, at + size)
                if low < high:
                    its = key.removesuffix("param") + ("param" if kind == "master" else kind)
                    parts.append(opened.box(its, [low - at], [high - at]))
                at += size
            return torch.cat(parts)

        return Row(sum(sizes), read, list(orders(_own(config, spans[stage], tied, pp * chunks > 1))))

    return [[row(t, stage) for stage in range(pp * chunks)] for t in range(tp)]


def _own(config: Config, span: LayerSpan, tied: Mapping[str, str], apart: bool) -> list[str]:
    """Parameters of a stage; a tied head is one of its own where it is apart from the embedding."""
    return [name for name in stage_layouts(config.model, span) if is_trained(name) and (apart or name not in tied)]


def _steps(held: Any) -> Iterator[Any]:
    """Whatever is called a step, however deep."""
    if isinstance(held, dict):
        for key, value in held.items():
            if key in ("step", "common_step") and value is not None:
                yield value
            else:
                yield from _steps(value)
    elif isinstance(held, list | tuple):
        for value in held:
            yield from _steps(value)


def _where(common: Mapping[str, Any], args: Mapping[str, Any], released: bool) -> dict[str, Any]:
    """The place of the run in its data and on its learning-rate curve, and its loss scale."""
    if released:
        return {"consumed_train_samples": 0, "consumed_valid_samples": 0}
    consumed = int(args.get("consumed_train_samples") or 0)
    on_curve = (common.get("opt_param_scheduler") or {}).get("num_steps", consumed)
    found: dict[str, Any] = {
        "consumed_train_samples": consumed,
        "consumed_valid_samples": int(args.get("consumed_valid_samples") or 0),
        "skipped_samples": max(0, consumed - int(on_curve)),
    }
    scaler = common["optimizer"].get("grad_scaler") if isinstance(common.get("optimizer"), dict) else None
    if isinstance(scaler, dict) and "hysteresis_tracker" in scaler:
        scale = float(scaler["scale"]), True, int(scaler["growth_tracker"]), int(scaler["hysteresis_tracker"])
        found["loss_scale"] = dataclasses.asdict(LossScale(*scale))
    return found


def _left(args: Mapping[str, Any]) -> Iterator[str]:
    for name in left_out(args):
        yield f"--{name.replace('_', '-')} {args[name]} is not here; the flags leave it out"


def _notes(config: Config, with_state: bool, folder: Path) -> Iterator[str]:
    model = config.model
    if not with_state:
        yield f"{folder.name} gives weights alone: the optimizer begins anew"
    if not (model.gated or model.squared_relu):
        yield "the activation is " + ("the erf form of GELU" if model.erf_gelu else "the tanh form of GELU")
    yield f"{model.padded_vocab_size} rows of the embedding, padding included"
