"""Convert Hugging Face models and checkpoints of Megatron-LM to megapipe's format and back.

No more than one tensor is in memory at a time.

    megapipe convert --list
    megapipe convert --from-huggingface Qwen3-0.6B --save checkpoints/qwen3
    megapipe convert --load checkpoints/qwen3 --to-huggingface Qwen3-0.6B-tuned

    megapipe convert --from-megatron /data/run --save checkpoints/run
    megapipe convert --load checkpoints/run --to-megatron /data/run-back --ckpt-format torch_dist

A run of Megatron-LM with --ckpt-format torch loads only a checkpoint of its own sizes:

    megapipe convert --load checkpoints/run --to-megatron /data/run-old --ckpt-format torch
        --target-tensor-parallel-size 2
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megapipe.checkpoint.save_load import find_checkpoint
from megapipe.commands.progress import Progress
from megapipe.config import CheckpointConfig
from megapipe.config.notes import flag
from megapipe.convert import (
    Converted,
    Sizes,
    compare_logits,
    export_checkpoint,
    export_megatron,
    export_ranks,
    import_checkpoint,
    import_megatron,
    listing,
)
from megapipe.data.files import folder_problems
from megapipe.distributed.device import lacks_memory
from megapipe.errors import CheckpointError, ConfigError
from megapipe.flags.parse import parse, to_flags

TOLERANCE = 1e-4
"""Largest difference of a logit in float32, as a part of the largest logit.

A wrong mapping of weights differs by about the largest logit itself.
"""

# The fields of Flags that name a direction.
_INWARD = ("from_huggingface", "from_megatron")
_OUTWARD = ("to_huggingface", "to_megatron")
_DIRECTIONS = (*_INWARD, *_OUTWARD)
_READ_BY = {
    "save": _INWARD,
    "load": _OUTWARD,
    "ckpt_step": ("from_megatron", *_OUTWARD),
    "ckpt_format": ("to_megatron",),
    "target_tensor_parallel_size": ("to_megatron",),
    "target_pipeline_parallel_size": ("to_megatron",),
    "target_expert_parallel_size": ("to_megatron",),
    "transformer_impl": ("to_megatron",),
    "megatron_adam": ("to_megatron",),
    "huggingface_config": ("to_huggingface",),
    "vocab_size": ("to_huggingface",),
    "make_vocab_size_divisible_by": ("from_huggingface",),
    "dtype": ("from_huggingface", "to_huggingface"),
}
"""The directions that read a flag.

--no-load-optim and --no-check are not listed: they may be given in every direction.
"""


@dataclass(frozen=True)
class Flags:
    """Convert a model or a checkpoint, with a pair of flags for each direction."""

    from_huggingface: str | None = None
    """Folder of a Hugging Face model to import: config.json and safetensors."""
    from_megatron: str | None = None
    """Folder of checkpoints of Megatron-LM to import, of --ckpt-format torch_dist or torch."""
    save: str | None = None
    """New folder of checkpoints to import into, for megapipe pretrain --load."""
    load: str | None = None
    """Folder of checkpoints to export from."""
    ckpt_step: int | None = None
    """Iteration to export, or to import from Megatron-LM. Default: the newest."""
    to_huggingface: str | None = None
    """New folder to export to, for AutoModelForCausalLM.from_pretrained."""
    to_megatron: str | None = None
    """New folder to export to, for Megatron-LM's --load."""
    ckpt_format: Literal["torch_dist", "torch"] = "torch_dist"
    """Format of an export to Megatron-LM: torch has a file for each rank of the run that loads it,
    and suits only the target sizes."""
    target_tensor_parallel_size: int = 1
    """Ranks of tensor parallelism of --ckpt-format torch."""
    target_pipeline_parallel_size: int = 1
    """Ranks of pipeline parallelism of --ckpt-format torch."""
    target_expert_parallel_size: int = 1
    """Ranks of expert parallelism of the run that loads it. With torch_dist it only matters whether
    there are several."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Layers of the run that loads --ckpt-format torch. Transformer Engine's have grouped experts,
    Megatron-LM's own have experts one by one."""
    megatron_adam: Literal["auto", "fused", "torch"] = "auto"
    """Adam of the run that loads the state: fused is Transformer Engine's or Apex's, torch is for
    an installation without both. auto: fused with 16-bit weights."""
    no_load_optim: bool = False
    """Leave out the optimizer's state of a checkpoint of or for Megatron-LM."""
    huggingface_config: str | None = None
    """Folder whose config.json and tokenizer go with an export. Default: the import's, next to
    --load."""
    vocab_size: int | None = None
    """Ids without padding, for an export. Default: from that config.json, or the training's
    tokenizer."""
    make_vocab_size_divisible_by: int = 128
    """The rows of the embedding are rounded up to a multiple of this in an import. A
    tensor-parallel size must divide it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. auto: as they are, with float16 as float32."""
    list: bool = False
    """Show the families of Hugging Face models that can be converted, and why others are refused.
    No other flag goes with it."""
    no_check: bool = False
    """Leave out the comparison of logits, which holds both models in memory."""


def main(argv: Sequence[str]) -> None:
    """Convert in the direction that the flags name.

    Raises: ConfigError for wrong flags, CheckpointError for files that cannot be read or written,
        and for a model that is too large for this machine.
    """
    flags = parse(Flags, argv)
    if problems := list(_problems(flags)):
        raise ConfigError(problems)
    if flags.list:
        print("\n".join(listing()))
        return
    try:
        _convert(flags)
    # A full disk, or a folder without permission.
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or 'checkpoint'}: {error.strerror or error}"
        ) from None
    except (RuntimeError, TypeError, MemoryError) as error:
        # Anything else is a mistake in megapipe, and needs its traceback.
        if not lacks_memory(error):
            raise
        remedy = "Convert where there is more"
        if flags.from_huggingface:
            given = flags.make_vocab_size_divisible_by
            remedy += f", or give less than --make-vocab-size-divisible-by {given}"
        elif not flags.no_check and flags.to_huggingface:
            remedy += ", or add --no-check, which holds one tensor at a time"
        raise CheckpointError(
            f"this machine has no memory for the model's tensors. {remedy}."
        ) from None


def _convert(flags: Flags) -> None:
    """Convert, print the result and the flags of a run that loads it, and compare the logits."""
    # `theirs` is the other program's folder, `ours` the checkpoint of megapipe.
    if flags.save:
        theirs = Path(flags.from_megatron or flags.from_huggingface or "")
        done = _import(flags, theirs, Path(flags.save))
        ours = done.folder
    else:
        theirs = Path(flags.to_megatron or flags.to_huggingface or "")
        ours = _found(flags)
        done = _export(flags, ours, theirs)
    print(f"wrote {done.folder}")
    for note in done.notes:
        print(f"  note: {note}")
    if flags.save:
        # Without the optimizer's state the run is a new one that starts from these weights.
        checkpoint = CheckpointConfig(load=flags.save, finetune=done.steps is None)
        words = to_flags(replace(done.config, checkpoint=checkpoint))
        print(f"flags of a run that takes it:\n  {shlex.join(words)}")
    # The transformers library runs the other model, so Megatron-LM's cannot be compared.
    if not flags.no_check and (flags.from_huggingface or flags.to_huggingface):
        check(theirs, ours, done)


def _import(flags: Flags, theirs: Path, ours: Path) -> Converted:
    """Import a model of Hugging Face or a checkpoint of Megatron-LM.

    Args:
        theirs: the folder of the model or checkpoint to read.
        ours: the value of --save, in which megapipe's checkpoint is written.
    Returns: the result, for `check` and the report.
    """
    if flags.from_megatron:
        return import_megatron(
            theirs,
            ours,
            step=flags.ckpt_step,
            optimizer=not flags.no_load_optim,
            progress=_bar(),
        )
    return import_checkpoint(
        theirs,
        ours,
        divisible_by=flags.make_vocab_size_divisible_by,
        dtype=_dtype(flags),
        progress=_bar(),
    )


def _export(flags: Flags, ours: Path, theirs: Path) -> Converted:
    """Export a checkpoint of megapipe to Hugging Face or Megatron-LM.

    Args:
        ours: the folder of megapipe's checkpoint.
        theirs: the folder to write, in the format of the other program.
    Returns: the result, for `check` and the report.
    """
    if flags.to_huggingface:
        # Without a folder the import's config.json is taken, if the checkpoint is of an import.
        companion = None
        if flags.huggingface_config:
            companion = Path(flags.huggingface_config)
        return export_checkpoint(
            ours,
            theirs,
            vocab_size=flags.vocab_size,
            companion=companion,
            dtype=_dtype(flags),
            progress=_bar(),
        )
    # Both formats of Megatron-LM take these. None lets the type of the weights decide.
    state: dict[str, Any] = {
        "optimizer": not flags.no_load_optim,
        "fused": None if flags.megatron_adam == "auto" else flags.megatron_adam == "fused",
        "progress": _bar(),
    }
    if flags.ckpt_format == "torch":
        return export_ranks(ours, theirs, _sizes(flags), **state)
    return export_megatron(ours, theirs, ep=flags.target_expert_parallel_size, **state)


def _dtype(flags: Flags) -> torch.dtype | None:
    """Return the dtype of the weights that --dtype names; None for auto."""
    if flags.dtype == "auto":
        return None
    dtype: torch.dtype = getattr(torch, flags.dtype)
    return dtype


def _sizes(flags: Flags) -> Sizes:
    """Return the parallel sizes and the layers of the Megatron-LM run that will load the export."""
    return Sizes(
        flags.target_tensor_parallel_size,
        flags.target_pipeline_parallel_size,
        flags.target_expert_parallel_size,
        flags.transformer_impl == "local",
    )


def _found(flags: Flags) -> Path:
    """Return the folder of the checkpoint to export.

    Raises: CheckpointError if --load has none.
    """
    found = find_checkpoint(CheckpointConfig(load=flags.load, ckpt_step=flags.ckpt_step))
    if found is None:
        raise CheckpointError(f"--load {flags.load} holds no checkpoint")
    return found


def check(theirs: Path, ours: Path, done: Converted) -> None:
    """Compare the logits of two models and print the difference.

    Without the library transformers a line says that nothing was compared.

    Args:
        theirs: the folder of the Hugging Face model.
        ours: the folder of megapipe's checkpoint.
        done: the result of the conversion.
    Raises: CheckpointError if the models differ by more than TOLERANCE of the largest logit, or if
        transformers cannot load the folder.
    """
    found = compare_logits(theirs, ours, done.config.model, done.vocab_size, done.dtype)
    # The library is optional: nothing else needs it.
    if found is None:
        print(
            "logits not compared: the transformers library is not installed "
            "(pip install transformers)"
        )
        return
    difference, largest = found
    text = f"logits of both models differ by at most {difference:.2g}, the largest is {largest:.3g}"
    # "not <=" refuses NaN too.
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise CheckpointError(
            f"{text}: they are not the same model. {done.folder} is left as it is, to look at"
        )
    print(text)


def _bar() -> Callable[[int, int], None]:
    """Return a function that shows a bar on a terminal, given (tensors so far, all tensors)."""
    progress = Progress()
    return lambda done, total: progress(done / total, f"{done}/{total} tensors")


def _problems(flags: Flags) -> Iterator[str]:
    """Yield a sentence for each problem of the flags and their folders."""
    if flags.list:
        if flags != Flags(list=True):
            yield "--list shows the families and converts nothing. Leave the other flags out."
        return
    # Which flags are read depends on the direction, so there must be one.
    directions = [name for name in _DIRECTIONS if getattr(flags, name)]
    if len(directions) == 1:
        yield from _unread(flags, directions[0])
    else:
        text = (
            "give one of --from-huggingface DIR --save DIR, --from-megatron DIR --save DIR, "
            "--load DIR --to-huggingface DIR and --load DIR --to-megatron DIR"
        )
        if directions:
            text += f", not {' and '.join(map(flag, directions))}"
        yield text
    # A conversion takes minutes, so all folders are looked at before it begins.
    for name in (*_INWARD, "load"):
        folder = getattr(flags, name)
        if folder and not Path(folder).is_dir():
            yield f"{flag(name)} {folder}: no such folder"
    yield from folder_problems({flag(name): getattr(flags, name) for name in ("save", *_OUTWARD)})
    # Only expert parallelism changes a file of torch_dist.
    other_sizes = replace(_sizes(flags), ep=1) != Sizes()
    if flags.to_megatron and flags.ckpt_format == "torch_dist" and other_sizes:
        yield (
            "--target-tensor- and --target-pipeline-parallel-size and --transformer-impl are for "
            "--ckpt-format torch: a run of any sizes loads torch_dist. Add it, or leave them out."
        )
    for name in ("make_vocab_size_divisible_by", "vocab_size"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            yield f"{flag(name)} {value} must be at least 1"


def _unread(flags: Flags, direction: str) -> Iterator[str]:
    """Yield an error for a missing --save or --load, and for each flag that has no effect.

    Args:
        direction: from_huggingface or another of _DIRECTIONS.
    """
    needed = "save" if direction in _INWARD else "load"
    if not getattr(flags, needed):
        yield f"{flag(needed)} is missing: {flag(direction)} needs it"
    for name, readers in _READ_BY.items():
        value = getattr(flags, name)
        # A value that equals the default counts as not given.
        if value != getattr(Flags, name) and direction not in readers:
            others = " and ".join(map(flag, readers))
            yield (
                f"{flag(name)} {value} has no effect with {flag(direction)}: it is for {others}. "
                "Leave it out."
            )
