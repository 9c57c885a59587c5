"""Import a run of Megatron-LM: its weights, its optimizer's state and its progress.

Tensors are read one at a time. Of a file of the format `torch`, only tensors that are read come
into memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint import commit
from megapipe.config import Config
from megapipe.convert.checkpoints import Converted, write_checkpoint
from megapipe.convert.megatron.args import left_out
from megapipe.convert.megatron.saved import Read, SavedRun
from megapipe.convert.tensors import Progress, counted, is_trained, saved_dtype
from megapipe.errors import CheckpointError
from megapipe.optim.loss_scale import LossScale


def import_megatron(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    optimizer: bool = True,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert a checkpoint of Megatron-LM to TARGET/iter_NNNNNNN, for --load TARGET.

    The result suits any tensor- and pipeline-parallel size and any schedule.

    Args:
        source: the folder in which Megatron-LM saves, or one checkpoint.
        target: a folder without checkpoints.
        step: iteration. Default: as latest_checkpointed_iteration.txt says, or the only one.
        optimizer: import the optimizer's state, if it was saved.
        progress: is called with (done, total) before every tensor and at the end.

    Raises: CheckpointError naming the file, tensor or argument that is missing, damaged or not
        supported. No checkpoint is left then.
    """
    if commit.iterations_in(target):
        raise CheckpointError(f"{target} holds checkpoints already; give another folder")
    folder = find_folder(source, step)
    run = SavedRun(folder)
    run.check("")
    # A release is a start for new runs: weights without a place in a run.
    released = folder.name == "release"
    with_state = optimizer and not released and run.has_state()
    read: Read = run.source.read
    steps = None
    # The kind "" is the weights.
    kinds = [""]
    if with_state:
        read, steps = run.state()
        kinds += run.kinds
    names = []
    for kind in kinds:
        names += [(kind, name) for name in run.layouts if not kind or is_trained(name)]
    # The type in which the run computed. Main parameters and moments stay in float32.
    dtype = torch.float32
    if run.config.precision.bf16:
        dtype = torch.bfloat16
    elif run.config.precision.fp16:
        dtype = torch.float16

    def tensor(kind: str, name: str) -> tuple[str, Tensor]:
        x = read(kind, name, run.layouts[name])
        if kind:
            return f"optimizer.{kind}.{name}", x.float()
        return name, x.to(saved_dtype(name, dtype))

    tensors = (tensor(*each) for each in counted(names, progress))
    state = None if released else _progress(run.common, run.args)
    final = write_checkpoint(target, run.config, tensors, state, steps)
    notes = list(_notes(run.config, with_state, folder.name))
    for name in left_out(run.args):
        flag = name.replace("_", "-")
        notes.append(f"--{flag} {run.args[name]} is not here; the flags leave it out")
    # A stage trains its copy with the same gradients, so that copies differ only after a fault.
    for name in run.source.copies:
        notes.append(f"{name} is the first stage's; a later one has other numbers in its copy")
    return Converted(final, run.config, tuple(notes), run.args["padded_vocab_size"], steps)


def find_folder(source: Path, step: int | None) -> Path:
    """Return the folder of one checkpoint that Megatron-LM has saved.

    Args:
        source: the folder in which Megatron-LM saves, or one checkpoint.
        step: iteration. Default: as latest_checkpointed_iteration.txt says, or the only one.
    Raises: CheckpointError if there is none, or if several could be meant.
    """
    there = sorted(path.name for path in source.glob("iter_*"))
    pointer = source / commit.POINTER
    folder = source
    if step is not None:
        folder = source / f"iter_{step:07d}"
    elif pointer.exists():
        text = pointer.read_text(errors="replace").strip()
        # Checked, because it becomes a part of a path.
        if not re.fullmatch(r"release|\d{1,18}", text):
            raise CheckpointError(
                f"{pointer} holds {text[:40]!r}, neither an iteration nor release"
            )
        folder = source / (text if text == "release" else f"iter_{int(text):07d}")
    elif len(there) > 1:
        names = ", ".join(there)
        raise CheckpointError(
            f"{source} has no {commit.POINTER}; choose one of {names} with --ckpt-step N"
        )
    elif there:
        folder = source / there[0]
    # A file that is missing further on would say nothing about a wrong folder.
    if not (folder / ".metadata").exists() and not any(folder.glob("mp_rank_*")):
        text = (
            f"{folder} is no checkpoint of Megatron-LM: it has neither a .metadata (torch_dist) "
            "nor mp_rank_ folders (torch)"
        )
        if there:
            text += f"; {source} holds {', '.join(there)}"
        raise CheckpointError(text)
    return folder


def _progress(common: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's progress under the names that a checkpoint of megapipe has for it.

    These are iteration, consumed_train_samples, consumed_valid_samples, skipped_samples (left out
    of the learning-rate curve), and loss_scale if it is dynamic.

    Args:
        common: the data of Megatron-LM's checkpoint other than tensors.
        args: the arguments in it.
    """
    consumed = int(args.get("consumed_train_samples") or 0)
    curve = common.get("opt_param_scheduler") or {}
    # The learning rate stands still in steps that the loss scale skips.
    on_curve = int(curve.get("num_steps", consumed))
    found: dict[str, Any] = {
        "iteration": int(common["iteration"]),
        "consumed_train_samples": consumed,
        "consumed_valid_samples": int(args.get("consumed_valid_samples") or 0),
        "skipped_samples": max(0, consumed - on_curve),
    }
    optimizer = common.get("optimizer")
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    # A constant scale has no counters, and the flags give it.
    if isinstance(scaler, dict) and "hysteresis_tracker" in scaler:
        scale = LossScale(
            float(scaler["scale"]),
            dynamic=True,
            good_steps=int(scaler["growth_tracker"]),
            overflows_left=int(scaler["hysteresis_tracker"]),
        )
        found["loss_scale"] = dataclasses.asdict(scale)
    return found


def _notes(config: Config, with_state: bool, name: str) -> Iterator[str]:
    """Yield lines for the user about an imported checkpoint.

    Args:
        config: the configuration of the imported run.
        with_state: whether the optimizer's state was imported.
        name: name of the checkpoint.
    """
    model = config.model
    if not with_state:
        yield f"{name} gives weights alone: the optimizer begins anew"
    # Megatron-LM's flags choose the form in a way that is easy to miss.
    if model.activation == "gelu":
        form = "erf" if model.erf_gelu else "tanh"
        yield f"the activation is the {form} form of GELU"
    yield f"{model.padded_vocab_size} rows of the embedding, padding included"
