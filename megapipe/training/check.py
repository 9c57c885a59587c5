"""Check a run before its launch: what one process without a GPU can know, and what flags do."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from megapipe.checkpoint.lock import refuse_living
from megapipe.checkpoint.save_load import find_checkpoint, refuse_load, refuse_save
from megapipe.checkpoint.saved_config import saved_config, with_checkpoint_args
from megapipe.checks.inputs import (
    answer,
    ask,
    save_problems,
)
from megapipe.checks.machine import on_cpus
from megapipe.checks.run import problems_of, validate
from megapipe.checks.vocabulary import vocabulary, with_vocabulary
from megapipe.config import Config, ModelConfig
from megapipe.data.build import Datasets, Part, build_datasets, build_part, open_parts
from megapipe.data.gpt_dataset import TokenDataset
from megapipe.data.tokenizers.tokenizer import Tokenizer
from megapipe.distributed.device import built_for_cpus, has_cuda
from megapipe.errors import CheckpointError, ConfigError
from megapipe.flags.idle import idle, without_idle
from megapipe.flags.parse import to_flags
from megapipe.models.provider import Provider, find_provider
from megapipe.models.transformer_engine import choose_layers
from megapipe.plan import Plan, changes, in_words, make_plan, memory_table, summary
from megapipe.plan.graphs import graphs_line
from megapipe.plan.seconds.device import device_of
from megapipe.plan.seconds.links import by_rates
from megapipe.plan.seconds.page import UNKNOWN, digest, in_short, predicted
from megapipe.plan.split import is_searched, schedule_name
from megapipe.schedule.recipe_line import to_line
from megapipe.training.guards.ranks import contents
from megapipe.training.room import device_line, disk_problems, no_host_line, save_line

DatasetsProvider = Callable[[Config, Tokenizer], Datasets]
"""(config, tokenizer) -> the datasets of a run."""


def start_block(config: Config) -> str:
    """Return the text to print at the start: a line for each flag that changes nothing.

    Such a flag asks for something that megapipe does anyway, or has no effect in this run. The text
    is empty if there is no such flag.
    """
    rows = [*config.noop_flags, *idle(config)]
    if not rows:
        return ""
    # Very long flags do not push the column of reasons to the right.
    width = min(48, max(len(flag) for flag, _ in rows))
    lines = [f"  {flag:<{width}}  {why}" for flag, why in rows]
    return "\n".join(["accepted, and what holds instead:", *lines])


def as_here(config: Config) -> Config:
    """Return the configuration, set to run on CPUs if this build of torch has no GPU support."""
    return on_cpus(config) if built_for_cpus() else config


def settled(config: Config, model: ModelConfig) -> Config:
    """Return the configuration of this model, with flags reset that do nothing for its layers.

    `start_block` still reports these flags.
    """
    # `made` no longer has them, so `idle` does not find them again.
    made = config.settled(model)
    still = idle(made)
    gone = tuple(row for row in idle(config) if row not in still)
    return replace(made, noop_flags=(*made.noop_flags, *gone))


@dataclass(frozen=True)
class Launch:
    """The checked parts of a run, as `pretrain` takes them to build it.

    Attributes:
        config: the configuration, with everything that tokenizer and checkpoint determine.
        plan: the plan of the run; None where rank 0 searches it for all ranks.
        provider: builds the stages.
        data: the datasets.
        eod: end-of-document id of the tokenizer.
        layers: a description of the layers, for the log.
    """

    config: Config
    plan: Plan | None
    provider: Provider
    data: Datasets
    eod: int
    layers: str


def checked(config: Config, provider: Provider, datasets: DatasetsProvider) -> Launch:
    """Check everything that can be known before ranks meet, and return the parts of the run.

    Args:
        config: the configuration of the flags.
        provider: builds the stages, unless --model-provider names another one.
        datasets: returns the datasets.
    Returns: the checked parts, from which `pretrain` builds the run.
    Raises: UserError with every problem of flags, files and machine. Problems of the checkpoint,
        the provider, the plan and the data are raised one at a time.
    """
    config = replace(as_here(config), world_size=_launched())
    # Looked up once, although two checks need it: the folder may be on a slow disk.
    find = cache(find_checkpoint)
    config = with_checkpoint_args(config, find)
    own_data = datasets is not build_datasets
    tokenizer = validate(config, has_cuda=has_cuda(), own_data=own_data)
    if config.model.model_provider is not None:
        provider = find_provider(config.model.model_provider)
    # After the tokenizer, which knows the number of ids. Model, plan and layers depend on it.
    whole = with_vocabulary(config, tokenizer.vocab_size)
    on_gpus = has_cuda() and config.parallel.distributed_backend != "gloo"
    impl, layers = choose_layers(config, on_gpus)
    config = settled(config, replace(whole.model, transformer_impl=impl))
    # A search takes seconds, so rank 0 makes it for all ranks once they have met.
    searches = config.world_size > 1 and is_searched(schedule_name(config))
    plan = None if searches else make_plan(config)
    # Before the datasets: indices of large ones take a while.
    refuse_save(config.checkpoint, find(config.checkpoint))
    return Launch(config, plan, provider, datasets(config, tokenizer), tokenizer.eod, layers)


def check(config: Config, datasets: DatasetsProvider = build_datasets) -> None:
    """Print what a launch with these flags would run. Nothing is started.

    Args:
        config: the configuration of the flags.
        datasets: returns the datasets of a launch.
    Raises: UserError with every problem.
    """
    print(report(config, datasets), flush=True)


def report(config: Config, datasets: DatasetsProvider = build_datasets) -> str:
    """Return lines on what a launch with these flags would run, such as its plan and memory.

    With --check-paths no, missing files are listed instead of refused.

    Args:
        config: the configuration of the flags.
        datasets: returns the datasets of a launch. A function of the user's program is not called.
    Raises: UserError with every problem. If flags are wrong, it has only these and problems of
        files, machine and checkpoint folders, as the rest needs sound flags.
    """
    config = replace(config, world_size=config.check.world_size or _launched())
    find = cache(find_checkpoint)
    config = with_checkpoint_args(config, find)
    found = problems_of(config, has_cuda=has_cuda(), own_data=datasets is not build_datasets)
    tokenizer = found.tokenizer
    missing, here = found.files, found.machine
    problems = [*found.flags]
    at_hand = not missing and tokenizer is not None
    if config.check.check_paths == "yes":
        problems += missing
        if missing:
            # Not a problem of its own, which an error would count.
            problems[-1] += " --check-paths no checks the rest without these files."
        missing = []
    if has_cuda():
        # This machine is like the run's machines, and so are its problems.
        problems += here
        here = []
    start, lost = answer(lambda: find(config.checkpoint) if at_hand else None)
    problems += [*lost, *_of_save(config, start)]
    # Without a plan nobody knows a checkpoint's size.
    if found.flags:
        raise ConfigError(problems)
    vocab, assumed = vocabulary(config, tokenizer)
    as_run = with_vocabulary(config, vocab)
    linked: list[str] = []
    if (device := device_of(config)) is not None:
        as_run, linked = by_rates(as_run, device)
    plan = make_plan(as_run)
    no_room = disk_problems(as_run, plan)
    if config.check.check_paths == "yes":
        problems += no_room
    else:
        # A full disk here says nothing about the disk of the run.
        here += no_room
    if at_hand and tokenizer is not None:
        problems += _data_problems(as_run, start, datasets, tokenizer)
    if problems:
        raise ConfigError(problems)
    # Of the run and not of this machine, which may have no GPU.
    device_type = "cpu" if config.parallel.distributed_backend == "gloo" else "cuda"
    # Flags as a user would type them for the same run, without --check's own.
    shown = replace(without_idle(config), check=type(config.check)())
    bubble = plan.timeline.bubble / plan.timeline.makespan
    peak_gib = max(plan.peak_bytes) / 2**30
    lines = [
        _layout(config),
        f"flags: {shlex.join(to_flags(shown))}",
        start_block(config),
        *(f"missing: {text}" for text in [*missing, *assumed]),
        *(f"on this machine: {text}" for text in here),
        f"starts from {start}" if start else "",
        changes(plan),
        summary(plan, config),
        save_line(config, plan),
        memory_table(plan, as_run),
        device_line(as_run, plan),
        no_host_line(as_run, plan),
        f"pipeline schedule {plan.schedule.name}{in_words(plan.schedule)}: predicted bubble "
        f"{bubble:.1%} of the time of the passes, as the log will have it, by {_unit(config)}; "
        f"peak {peak_gib:.3g} GiB on a rank",
        f"recipe: megapipe schedules show {to_line(plan.recipe)}" if plan.recipe else "",
        _seconds(as_run, plan),
        *linked,
        f"plan {digest(plan, as_run)}",
        graphs_line(as_run, plan.schedule, device_type),
    ]
    return "\n".join(line for line in lines if line)


def _seconds(config: Config, plan: Plan) -> str:
    """Return a line with the predicted time of a step.

    The text is empty if the device's speed is not known: a run on CPUs without --rates. With
    --pipeline-costs it says that no seconds are predicted.
    """
    device = device_of(config)
    if device is None:
        return ""
    found = predicted(plan, config, device)
    if found is None:
        return UNKNOWN
    return (
        f"predicted step {in_short(found)}, by --rates ({device.source}): with communication, "
        "gradient sums and update"
    )


def _unit(config: Config) -> str:
    """Return what the plan takes as times of passes: "FLOPs alone", or a flag's name."""
    if config.parallel.pipeline_costs is not None:
        return "--pipeline-costs"
    return "FLOPs alone"


def _launched() -> int:
    """Return the number of ranks that the launcher, such as torchrun, has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _layout(config: Config) -> str:
    """Return a line with the number of ranks of each axis, and of samples in a batch."""
    par = config.parallel
    context = ""
    if par.context_parallel_size > 1:
        context = f"{par.context_parallel_size} context x "
    replicas = f"{config.data_parallel_size} data parallel"
    if config.lacks_a_rank:
        replicas += " less one rank"
    return (
        f"{config.world_size} processes = {par.tensor_model_parallel_size} tensor x {context}"
        f"{par.pipeline_model_parallel_size} pipeline x {replicas}; "
        f"a batch of {config.global_batch_size} = {config.num_microbatches} microbatches of "
        f"{config.batch.micro_batch_size} each"
    )


def _of_save(config: Config, start: Path | None) -> list[str]:
    """Return the problems of the folder of --save: its checkpoints, its rights, its running owner.

    Args:
        config: the configuration.
        start: the checkpoint to load, or None.
    """
    flags = config.checkpoint
    problems = [*ask(lambda: refuse_save(flags, start)), *save_problems(config)]
    if flags.save is not None:
        root = Path(flags.save)
        problems += ask(lambda: refuse_living(root))
    return problems


def _data_problems(
    config: Config, start: Path | None, datasets: DatasetsProvider, tokenizer: Tokenizer
) -> list[str]:
    """Return the problems of the checkpoint to load, of the provider and of the data.

    Nothing is written to disk.

    Args:
        config: the configuration.
        start: the checkpoint to load, or None.
        datasets: returns the datasets of a launch.
        tokenizer: the tokenizer.
    """
    problems: list[str] = []
    parts: list[Part | None] = []
    unread: list[str] = []
    # A program's own datasets may need something that only the launch has.
    if datasets is build_datasets:
        unread = ask(lambda: parts.extend(open_parts(config, tokenizer)))
    if start is not None:
        if config.checkpoint.moe_use_upcycling:
            # Here, as a conversion imports half a second of torch that no other check needs.
            from megapipe.convert.upcycle import refuse_upcycling

            problems += ask(lambda: refuse_upcycling(start, config))
        else:
            train = parts[0] if parts else None
            order = partial(_reordered, config, start, tokenizer, train)
            problems += ask(lambda: refuse_load(start, config, contents(config, order())))
    named = config.model.model_provider
    if named is not None:
        problems += ask(lambda: find_provider(named))
    return problems + unread


def _reordered(
    config: Config, start: Path, tokenizer: Tokenizer, train: Part | None
) -> TokenDataset | None:
    """Return the training samples if the checkpoint's run may have read them in another order.

    Returns None otherwise. The order depends on a run's length, so it may differ only if the
    lengths of the two runs differ. Ordering a large dataset takes a while.

    Args:
        config: the configuration.
        start: the checkpoint to load.
        tokenizer: the tokenizer.
        train: the files and weights of the training set; None without one.
    """
    if train is None or config.checkpoint.finetune:
        return None
    try:
        saved = saved_config(start).batch
    except CheckpointError:
        # `refuse_load` reports it, or the launch takes an older checkpoint.
        return None
    mine = config.batch
    if (saved.train_iters, saved.train_samples) == (mine.train_iters, mine.train_samples):
        return None
    # Without --data-cache-path a check writes nothing.
    unstored = config.with_fields(data_cache_path=None)
    return build_part(unstored, tokenizer, train)
