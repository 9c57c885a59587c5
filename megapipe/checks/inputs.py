"""Problems outside the flags themselves: files, folders, the launcher, the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from shutil import which
from typing import TypeVar

from megapipe.config import Config
from megapipe.data.blend import split_ranges
from megapipe.data.files import file_problems, folder_problems
from megapipe.data.indexed import glance
from megapipe.data.sources import blends, choice_problems, in_a_file, is_named
from megapipe.errors import UserError
from megapipe.models.transformer_engine import load

T = TypeVar("T")


def data_problems(config: Config, *, own_data: bool = False) -> Iterator[str]:
    """Problems with where tokens come from, and the split. What they must hold is the data package's to say.

    own_data: a program gives its data sets, so flags need not name files.
    """
    data = config.data
    yield from choice_problems(data)
    if data.split is not None:
        split = data.split
        yield from ask(lambda: split_ranges(split, 1))
    if not (data.mock_data or in_a_file(data) or (own_data and not is_named(data))):
        yield from ask(lambda: blends(data))


def path_problems(config: Config) -> Iterator[str]:
    """Files and folders that cannot be read, of flags that are sound; the tokenizer is for `answer`."""
    data, load, save = config.data, config.checkpoint.load, config.checkpoint.save
    if not data.mock_data:
        found, unread = answer(lambda: blends(data))
        yield from unread if in_a_file(data) else ()  # of flags: data_problems
        for blend in filter(None, found or ()):
            for prefix in blend.prefixes:
                yield from ask(lambda: blend.ask(glance, prefix))  # noqa: B023
    if (project := config.log.wandb_project) and not _installed("wandb"):
        yield f"--wandb-project {project} needs the package wandb: pip install wandb, or leave it out."
    # A script that says --save X --load X resumes if it can; its first run finds nothing.
    if load and not os.path.isdir(load) and load != save:
        yield f"--load {load}: no such folder. To start fresh leave --load out, or let it name the folder of --save."
    log = config.log
    yield from folder_problems({"--save": save, "--data-cache-path": data.data_cache_path})
    yield from folder_problems({"--tensorboard-dir": log.tensorboard_dir, "--wandb-save-dir": log.wandb_save_dir})
    yield from file_problems({"--metrics-file": log.metrics_file})


def _installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a folder ./wandb is none


def checkpoint_problems(config: Config) -> Iterator[str]:
    """Yield an interval of what is kept that no save meets."""
    c = config.checkpoint
    if c.save_interval and c.save_retain_interval and c.save_retain_interval % c.save_interval:
        multiple = -(-c.save_retain_interval // c.save_interval) * c.save_interval
        yield (
            f"--save-retain-interval {c.save_retain_interval} is no multiple of --save-interval {c.save_interval}, so "
            f"checkpoints to keep would not be saved. Use --save-retain-interval {multiple}."
        )


def profile_problems(config: Config) -> Iterator[str]:
    """A profile of nothing, or of ranks that do not exist."""
    log = config.log
    if not (log.profile and log.use_pytorch_profiler):
        return
    if log.profile_step_end <= log.profile_step_start:
        yield (
            f"--profile-step-start {log.profile_step_start} to --profile-step-end {log.profile_step_end} is an empty "
            f"window. Use --profile-step-end {log.profile_step_start + 2}."
        )
    elif (length := _iterations(config)) is not None and log.profile_step_start >= length:
        yield (
            f"--profile-step-start {log.profile_step_start} is behind the last of {length} iterations: nothing would "
            f"be recorded. Use --profile-step-start {max(0, length - 2)} --profile-step-end {length}."
        )
    if outside := [r for r in log.profile_ranks if not 0 <= r < config.world_size]:
        yield f"--profile-ranks {' '.join(map(str, outside))}: ranks are 0 to {config.world_size - 1}"


def _iterations(config: Config) -> int | None:
    """Length of the run, if the flags give one."""
    batch = config.batch
    if batch.train_iters is not None or batch.train_samples is None or not batch.micro_batch_size:
        return batch.train_iters
    return config.train_iters if config.data_parallel_size else None


def machine_problems(config: Config, has_cuda: bool) -> Iterator[str]:
    """Settings that this machine or this version cannot do."""
    attention = config.model.attention_backend
    on_gpu = has_cuda and config.parallel.distributed_backend != "gloo"
    if config.parallel.distributed_backend == "nccl" and not has_cuda:
        yield "--distributed-backend nccl needs a GPU for every rank of a machine, and torch sees fewer. Use gloo."
    if attention == "fused" and not on_gpu:
        yield "--attention-backend fused has no kernel for CPUs. Use --attention-backend auto."
    if attention == "flash" and on_gpu and not config.precision.half:
        yield "--attention-backend flash has no float32 kernel for GPUs. Use --attention-backend auto, or --bf16."
    if attention == "flash" and on_gpu and config.model.window_size:
        yield f"--attention-backend flash has no kernel for --window-size {config.model.window_size}. Use auto."
    if config.model.compile and not any(map(which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        yield "--compile needs a C++ compiler, and there is no g++ or clang++ in PATH. Install one, or leave it out."
    if config.model.transformer_impl == "transformer_engine":
        if on_gpu:
            yield from ask(load)
        else:
            why = "torch sees none" if not has_cuda else "--distributed-backend gloo keeps to the CPU"
            yield f"--transformer-impl transformer_engine needs a GPU, and {why}. Use --transformer-impl local."


def answer(question: Callable[[], T]) -> tuple[T | None, list[str]]:
    """The answer of another module, or the problems that it finds instead."""
    try:
        return question(), []
    except UserError as error:
        return None, list(error.problems)


def ask(question: Callable[[], object]) -> list[str]:
    """The problems that another module finds."""
    return answer(question)[1]
