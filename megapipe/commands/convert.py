"""Hugging Face models and checkpoints of Megatron-LM to ours and back, one tensor at a time.

megapipe convert --from-huggingface Qwen3-0.6B --save checkpoints/qwen3
megapipe convert --load checkpoints/qwen3 --to-huggingface Qwen3-0.6B-tuned
megapipe convert --from-megatron /data/run --save checkpoints/run
megapipe convert --load checkpoints/run --to-megatron /data/run-back --ckpt-format torch_dist
megapipe convert --load checkpoints/run --to-megatron /data/run-old --ckpt-format torch --target-tensor-parallel-size 2
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

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
)
from megapipe.data.files import folder_problems
from megapipe.distributed.device import lacks_memory
from megapipe.errors import CheckpointError, ConfigError
from megapipe.flags.parse import parse, to_flags

TOLERANCE = 1e-4
"""Largest difference of a logit in float32, as a part of the largest logit; a wrong mapping differs by about all."""

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
"""Directions that read a flag. What --no-load-optim and --no-check leave out is nowhere but where they are read."""


@dataclass(frozen=True)
class Flags:
    """Flags of this tool: a pair for each direction."""

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
    """Format of an export to Megatron-LM: torch has a file for each of its ranks, and its loader cuts none of them."""
    target_tensor_parallel_size: int = 1
    """Ranks of tensor parallelism of --ckpt-format torch."""
    target_pipeline_parallel_size: int = 1
    """Ranks of pipeline parallelism of --ckpt-format torch."""
    target_expert_parallel_size: int = 1
    """Ranks of expert parallelism of the run that loads it; of torch_dist counts only whether they are several."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Whose layers read --ckpt-format torch there: with Transformer Engine's go grouped experts, with Megatron-LM's own
    experts one by one."""
    megatron_adam: Literal["auto", "fused", "torch"] = "auto"
    """Whose Adam reads the state there: fused is Transformer Engine's or Apex's, torch stands in where neither is
    installed. auto: fused with 16-bit weights."""
    no_load_optim: bool = False
    """Leave the optimizer's state of a checkpoint of or for Megatron-LM."""
    huggingface_config: str | None = None
    """Folder whose config.json and tokenizer go with an export. Default: the import's, next to --load."""
    vocab_size: int | None = None
    """Ids without padding, for an export. Default: from that config.json, or the training's tokenizer."""
    make_vocab_size_divisible_by: int = 128
    """Rounding of the embedding's rows in an import; a tensor-parallel size must divide it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. auto: as they are, with float16 as float32."""
    no_check: bool = False
    """Leave out the comparison of logits, which holds both models in memory."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    if problems := list(_problems(flags)):
        raise ConfigError(problems)
    try:
        _convert(flags)
    except OSError as error:  # a full disk, a folder without permission
        raise CheckpointError(
            f"{error.filename or 'checkpoint'}: {error.strerror or error}"
        ) from None
    except (RuntimeError, TypeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        remedy = "Convert where there is more"
        if flags.from_huggingface:
            remedy += f", or give less than --make-vocab-size-divisible-by {flags.make_vocab_size_divisible_by}"
        elif not flags.no_check and flags.to_huggingface:
            remedy += ", or add --no-check, which holds one tensor at a time"
        raise CheckpointError(
            f"this machine has no memory for the model's tensors. {remedy}."
        ) from None


def _convert(flags: Flags) -> None:
    dtype = None if flags.dtype == "auto" else getattr(torch, flags.dtype)
    keep = not flags.no_load_optim
    if flags.from_megatron and flags.save:
        theirs = Path(flags.from_megatron)
        done = import_megatron(
            theirs, Path(flags.save), step=flags.ckpt_step, optimizer=keep, progress=_bar()
        )
    elif flags.from_huggingface and flags.save:
        theirs, by = Path(flags.from_huggingface), flags.make_vocab_size_divisible_by
        done = import_checkpoint(
            theirs, Path(flags.save), divisible_by=by, dtype=dtype, progress=_bar()
        )
    elif flags.to_megatron:
        theirs = Path(flags.to_megatron)
        fused = None if flags.megatron_adam == "auto" else flags.megatron_adam == "fused"
        if flags.ckpt_format == "torch":
            done = export_ranks(
                _found(flags), theirs, _sizes(flags), optimizer=keep, fused=fused, progress=_bar()
            )
        else:
            ep = flags.target_expert_parallel_size
            done = export_megatron(
                _found(flags), theirs, optimizer=keep, fused=fused, ep=ep, progress=_bar()
            )
    else:
        assert flags.to_huggingface
        theirs = Path(flags.to_huggingface)
        done = export_checkpoint(
            _found(flags),
            theirs,
            vocab_size=flags.vocab_size,
            companion=Path(flags.huggingface_config) if flags.huggingface_config else None,
            dtype=dtype,
            progress=_bar(),
        )
    print(f"wrote {done.folder}")
    for note in done.notes:
        print(f"  note: {note}")
    if flags.save:
        checkpoint = CheckpointConfig(load=flags.save, finetune=done.steps is None)
        print(
            f"flags of a run that takes it:\n  {shlex.join(to_flags(replace(done.config, checkpoint=checkpoint)))}"
        )
    if not flags.no_check and (flags.from_huggingface or flags.to_huggingface):
        check(theirs, done.folder if flags.save else _found(flags), done)


def _sizes(flags: Flags) -> Sizes:
    """The run of Megatron-LM that is to read it."""
    return Sizes(
        flags.target_tensor_parallel_size,
        flags.target_pipeline_parallel_size,
        flags.target_expert_parallel_size,
        flags.transformer_impl == "local",
    )


def _found(flags: Flags) -> Path:
    """The checkpoint to export."""
    found = find_checkpoint(CheckpointConfig(load=flags.load, ckpt_step=flags.ckpt_step))
    if found is None:
        raise CheckpointError(f"--load {flags.load} holds no checkpoint")
    return found


def check(theirs: Path, ours: Path, done: Converted) -> None:
    """Raises: CheckpointError if the two models do not say the same."""
    found = compare_logits(theirs, ours, done.config.model, done.vocab_size, done.dtype)
    if found is None:
        print(
            "logits not compared: the transformers library is not installed (pip install transformers)"
        )
        return
    difference, largest = found
    text = f"logits of both models differ by at most {difference:.2g}, the largest is {largest:.3g}"
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise CheckpointError(
            f"{text}: they are not the same model. {done.folder} is left as it is, to look at"
        )
    print(text)


def _bar() -> Callable[[int, int], None]:
    """A bar over the tensors, on a terminal."""
    progress = Progress()
    return lambda done, total: progress(done / total, f"{done}/{total} tensors")


def _problems(flags: Flags) -> Iterator[str]:
    directions = [name for name in _DIRECTIONS if getattr(flags, name)]
    if len(directions) != 1:
        yield (
            "give one of --from-huggingface DIR --save DIR, --from-megatron DIR --save DIR, "
            "--load DIR --to-huggingface DIR and --load DIR --to-megatron DIR"
            + f", not {' and '.join(map(flag, directions))}"
            * bool(directions)
        )
    else:
        yield from _unread(flags, directions[0])
    for name in (*_INWARD, "load"):
        folder = getattr(flags, name)
        if folder and not Path(folder).is_dir():
            yield f"{flag(name)} {folder}: no such folder"
    yield from folder_problems({flag(name): getattr(flags, name) for name in ("save", *_OUTWARD)})
    sizes = _sizes(flags)
    if flags.to_megatron and flags.ckpt_format == "torch_dist" and replace(sizes, ep=1) != Sizes():
        yield (
            "--target-tensor- and --target-pipeline-parallel-size and --transformer-impl are for --ckpt-format torch: "
            "a run of any sizes loads torch_dist. Add it, or leave them out."
        )
    for name in ("make_vocab_size_divisible_by", "vocab_size"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            yield f"{flag(name)} {value} must be at least 1"


def _unread(flags: Flags, direction: str) -> Iterator[str]:
    """Flags that this direction does not read, and the folder that it lacks."""
    needed = "save" if direction in _INWARD else "load"
    if not getattr(flags, needed):
        yield f"{flag(needed)} is missing: {flag(direction)} needs it"
    for name, readers in _READ_BY.items():
        value = getattr(flags, name)
        if value != getattr(Flags, name) and direction not in readers:
            others = " and ".join(map(flag, readers))
            yield f"{flag(name)} {value} has no effect with {flag(direction)}: it is for {others}. Leave it out."
