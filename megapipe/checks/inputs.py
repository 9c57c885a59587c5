"""Checks of things outside the flags: files, folders, the launcher, the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from shutil import which
from typing import TypeVar

from megapipe.config import Config
from megapipe.data.blend import split_ranges
from megapipe.data.files import file_problems, folder_problems, nearest_folder
from megapipe.data.indexed import glance
from megapipe.data.sources import blends, choice_problems, in_a_file, is_named
from megapipe.errors import UserError

T = TypeVar("T")


def data_problems(config: Config, *, own_data: bool = False) -> Iterator[str]:
    """Yield problems of the flags that name data, and of the split. No file is read.

    Args:
        own_data: a program gives its own data sets, so that flags need not name files.
    """
    data = config.data
    yield from choice_problems(data)
    if data.split is not None:
        split = data.split
        yield from ask(lambda: split_ranges(split, 1))
    if not (data.mock_data or in_a_file(data) or (own_data and not is_named(data))):
        yield from ask(lambda: blends(data))


def path_problems(config: Config) -> Iterator[str]:
    """Yield a problem for each file or folder of the flags that cannot be read or written.

    The tokenizer's files are not checked here. --wandb-project without the package wandb is a
    problem too.
    """
    data = config.data
    load = config.checkpoint.load
    save = config.checkpoint.save
    log = config.log
    if not data.mock_data:
        found, unread = answer(lambda: blends(data))
        if in_a_file(data):  # problems of the flags themselves are in data_problems
            yield from unread
        for blend in filter(None, found or ()):
            for prefix in blend.prefixes:
                # A glance at header and sizes: the tokens may have terabytes.
                yield from ask(lambda: blend.ask(glance, prefix))  # noqa: B023
    # Looked up and not imported: the run does that when it opens its boards.
    if log.wandb_project and not _installed("wandb"):
        yield (
            f"--wandb-project {log.wandb_project} needs the package wandb: pip install wandb, "
            "or leave it out."
        )
    # A script that says --save X --load X resumes if it can; its first run finds nothing.
    if load and not os.path.isdir(load) and load != save:
        yield (
            f"--load {load}: no such folder. "
            "To start fresh leave --load out, or let it name the folder of --save."
        )
    yield from folder_problems({"--save": save, "--data-cache-path": data.data_cache_path})
    boards = {"--tensorboard-dir": log.tensorboard_dir, "--wandb-save-dir": log.wandb_save_dir}
    yield from folder_problems(boards)
    yield from file_problems({"--metrics-file": log.metrics_file})


def save_problems(config: Config) -> Iterator[str]:
    """Yield the problem of a --save in which this user may make no files.

    A rank of another machine may not see the folder, so a launch asks on its own machine alone.
    """
    save = config.checkpoint.save
    if save is None:
        return
    # The launch would make --save; the nearest folder above it must allow that.
    there = nearest_folder(save)
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        yield f"--save {save}: {there} may not be written to by this user. Give another folder."


def _installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a folder ./wandb has no origin


def checkpoint_problems(config: Config) -> Iterator[str]:
    """Yield problems of --save-retain-interval, and of the ranks that --replication groups."""
    yield from _replica_problems(config)
    every = config.checkpoint.save_interval
    kept = config.checkpoint.save_retain_interval
    if every and kept and kept % every:
        multiple = -(-kept // every) * every
        yield (
            f"--save-retain-interval {kept} is no multiple of --save-interval {every}, "
            "so checkpoints to keep would not be saved. "
            f"Use --save-retain-interval {multiple}."
        )


def _replica_problems(config: Config) -> Iterator[str]:
    flags = config.checkpoint
    world = config.world_size
    if not (config.copies_state and flags.replication) or config.equal_states > 1:
        return
    factor = flags.replication_factor
    jump = flags.replication_jump or world // factor
    if not jump or jump * factor > world:
        remedy = f"Use at most --replication-factor {world}."
        if factor <= world:
            remedy = f"Use at most --replication-jump {world // factor}."
        yield (
            f"--replication-jump {jump} x --replication-factor {factor} is more than the {world} "
            f"ranks: some would have nobody that keeps their state. {remedy}"
        )


def profile_problems(config: Config) -> Iterator[str]:
    """Yield problems of the profiler's flags: no step to profile, or ranks that do not exist."""
    log = config.log
    if not (log.profile and log.use_pytorch_profiler):
        return
    start = log.profile_step_start
    length = _iterations(config)
    if log.profile_step_end <= start:
        yield (
            f"--profile-step-start {start} to --profile-step-end {log.profile_step_end} is an "
            f"empty window. Use --profile-step-end {start + 2}."
        )
    elif length is not None and start >= length:
        yield (
            f"--profile-step-start {start} is after the last of {length} iterations: nothing would "
            f"be recorded. Use --profile-step-start {max(0, length - 2)} "
            f"--profile-step-end {length}."
        )
    # Ranks are known without a process group: the launcher has said how many there are.
    if outside := [r for r in log.profile_ranks if not 0 <= r < config.world_size]:
        ranks = " ".join(map(str, outside))
        yield f"--profile-ranks {ranks}: ranks are 0 to {config.world_size - 1}"


def _iterations(config: Config) -> int | None:
    """Return the number of steps of the run, None if the flags do not give it."""
    batch = config.batch
    if batch.train_iters is not None or batch.train_samples is None or not batch.micro_batch_size:
        return batch.train_iters
    return config.train_iters if config.data_parallel_size else None


def machine_problems(config: Config, has_cuda: bool) -> Iterator[str]:
    """Yield a problem for each setting that this machine cannot run.

    Args:
        has_cuda: whether torch can use a GPU.
    """
    attention = config.model.attention_backend
    window = config.model.window_size
    gloo = config.parallel.distributed_backend == "gloo"
    on_gpu = has_cuda and not gloo
    if config.parallel.distributed_backend == "nccl" and not has_cuda:
        yield (
            "--distributed-backend nccl needs a GPU for every rank of a machine, "
            "and torch sees fewer. Use gloo."
        )
    if attention == "fused" and not on_gpu:
        yield "--attention-backend fused has no kernel for CPUs. Use --attention-backend auto."
    if attention == "flash" and on_gpu and not config.precision.half:
        yield (
            "--attention-backend flash has no float32 kernel for GPUs. "
            "Use --attention-backend auto, or --bf16."
        )
    if attention == "flash" and on_gpu and window:
        yield f"--attention-backend flash has no kernel for --window-size {window}. Use auto."
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    # inductor compiles C++ during the first step; without a compiler the run would end there.
    if config.model.compile and not any(map(which, compilers)):
        yield (
            "--compile needs a C++ compiler, and there is no g++ or clang++ in PATH. "
            "Install one, or leave it out."
        )
    if config.model.transformer_impl != "transformer_engine":
        return
    if on_gpu:
        # An installed package need not work: its libraries are loaded here, before ranks meet.
        from megapipe.models.transformer_engine import load

        yield from ask(load)
    else:
        why = "--distributed-backend gloo keeps to the CPU" if has_cuda else "torch sees none"
        yield (
            f"--transformer-impl transformer_engine needs a GPU, and {why}. "
            "Use --transformer-impl local."
        )


def answer(question: Callable[[], T]) -> tuple[T | None, list[str]]:
    """Return the result of a function, or the texts of the UserError that it raises.

    Args:
        question: a function without arguments.
    Returns: (result, []) or (None, texts).
    """
    try:
        return question(), []
    except UserError as error:
        return None, list(error.problems)


def ask(question: Callable[[], object]) -> list[str]:
    """Call a function and return the texts of the UserError that it raises; [] for none.

    Args:
        question: a function without arguments, whose result is ignored.
    """
    return answer(question)[1]
