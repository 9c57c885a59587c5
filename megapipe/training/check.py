"""A check before the launch: what one process without a GPU can know of a run, and what becomes of each flag."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from megapipe.checkpoint.commit import refuse_without_room
from megapipe.checkpoint.lock import refuse_living
from megapipe.checkpoint.save_load import find_checkpoint, refuse_load, refuse_save
from megapipe.checkpoint.saved_config import saved_config, with_checkpoint_args
from megapipe.checks.inputs import answer, ask, machine_problems, path_problems
from megapipe.checks.machine import on_cpus
from megapipe.checks.run import flag_problems, tokenizer_problems, validate
from megapipe.config import Config, ModelConfig
from megapipe.config.layers import inline
from megapipe.convert.upcycle import refuse_upcycling
from megapipe.data.build import Datasets, Part, build_datasets, build_part, open_parts
from megapipe.data.gpt_dataset import TokenDataset
from megapipe.data.tokenizers.tokenizer import Tokenizer, assumed_vocab_size, build_tokenizer
from megapipe.distributed.device import built_for_cpus, has_cuda
from megapipe.errors import CheckpointError, ConfigError
from megapipe.flags.idle import idle, without_idle
from megapipe.flags.parse import to_flags
from megapipe.models.provider import Provider, find_provider
from megapipe.models.transformer_engine import choose_layers
from megapipe.plan import Plan, changes, in_words, make_plan, summary
from megapipe.plan.graphs import graphs_line
from megapipe.plan.table import saved_bytes
from megapipe.schedule.recipe_line import to_line
from megapipe.training.guards.ranks import contents

DatasetsProvider = Callable[[Config, Tokenizer], Datasets]


def start_block(config: Config) -> str:
    """One line for each flag that holds already or has nothing to act on; empty if there is none."""
    rows = [*config.holding, *idle(config)]
    if not rows:
        return ""
    width = min(48, max(len(flag) for flag, _ in rows))
    return "\n".join(["accepted, and what holds instead:", *(f"  {flag:<{width}}  {why}" for flag, why in rows)])


def as_here(config: Config) -> Config:
    """The configuration as this build of torch can run it, see checks.machine."""
    return on_cpus(config) if built_for_cpus() else config


def settled(config: Config, model: ModelConfig) -> Config:
    """The configuration of a model, without the flags of its layers that have nothing to act on; these are kept to be
    said by `start_block`."""
    made = config.settled(model)
    still = idle(made)
    gone = tuple(row for row in idle(config) if row not in still)
    return replace(made, holding=(*made.holding, *gone))


@dataclass(frozen=True)
class Launch:
    """What a run is made of, checked.

    Attributes:
        eod: end-of-document id of the tokenizer.
        layers: whose layers the model has, in words.
    """

    config: Config
    plan: Plan
    provider: Provider
    data: Datasets
    eod: int
    layers: str


def checked(config: Config, provider: Provider, datasets: DatasetsProvider) -> Launch:
    """Check everything that can be known before ranks meet. Raises: UserError."""
    config = replace(as_here(config), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    look = cache(find_checkpoint)
    config = with_checkpoint_args(config, look)
    tokenizer = validate(config, has_cuda=has_cuda(), own_data=datasets is not build_datasets)
    if config.model.model_provider is not None:
        provider = find_provider(config.model.model_provider)
    vocab = config.model.padded_vocab(tokenizer.vocab_size)
    impl, layers = choose_layers(config, has_cuda() and config.parallel.distributed_backend != "gloo")
    config = settled(config, replace(inline(config.model), padded_vocab_size=vocab, transformer_impl=impl))
    plan = make_plan(config)
    refuse_save(config.checkpoint, look(config.checkpoint))
    return Launch(config, plan, provider, datasets(config, tokenizer), tokenizer.eod, layers)


def check(config: Config, datasets: DatasetsProvider = build_datasets) -> None:
    """Print what would run; starts nothing. --check-paths no goes on without the files that it misses.

    Raises: UserError with every problem.
    """
    config = replace(config, world_size=config.check.world_size or int(os.environ.get("WORLD_SIZE", "1")))
    look = cache(find_checkpoint)
    config = with_checkpoint_args(config, look)
    tokenizer, unread = answer(lambda: build_tokenizer(config.data))
    problems = flag_problems(config, own_data=datasets is not build_datasets)
    missing = [*path_problems(config), *unread]
    here = list(machine_problems(config, has_cuda()))
    if config.check.check_paths == "yes":
        problems, missing = [*problems, *missing], []
    if has_cuda():  # a machine like those of the run
        problems, here = [*problems, *here], []
    problems += tokenizer_problems(config, tokenizer)
    if problems:
        raise ConfigError(problems)
    vocab, said = vocabulary(config, tokenizer)
    padded = config.model.padded_vocab(vocab)
    as_run = replace(config, model=replace(inline(config.model), padded_vocab_size=padded))
    plan, par = make_plan(as_run), config.parallel
    found = None
    if not missing and tokenizer is not None:
        found = look(config.checkpoint)
        here += _refuse(as_run, plan, found, datasets, tokenizer)
    lines = [
        f"{config.world_size} processes = {par.tensor_model_parallel_size} tensor x "
        + f"{par.context_parallel_size} context x " * (par.context_parallel_size > 1)
        + f"{par.pipeline_model_parallel_size} pipeline x {config.data_parallel_size} data parallel; a batch of "
        f"{config.global_batch_size} = {config.num_microbatches} microbatches of {config.batch.micro_batch_size} each",
        f"flags: {' '.join(to_flags(replace(without_idle(config), check=type(config.check)())))}",
        start_block(config),
        *(f"missing: {text}" for text in [*missing, *said]),
        *(f"on this machine: {text}" for text in here),
        f"starts from {found}" if found else "",
        changes(plan),
        summary(plan, config),
        f"pipeline schedule {plan.schedule.name}{in_words(plan.schedule)}: predicted bubble "
        f"{plan.timeline.bubble / plan.timeline.makespan:.1%}, peak {max(plan.peak_bytes) / 2**30:.3g} GiB on a rank",
        f"recipe: {to_line(plan.recipe)}" if plan.recipe else "",
        graphs_line(as_run, plan.schedule, "cpu" if par.distributed_backend == "gloo" else "cuda"),
    ]
    print("\n".join(line for line in lines if line), flush=True)


def _refuse(
    config: Config, plan: Plan, start: Path | None, datasets: DatasetsProvider, tokenizer: Tokenizer
) -> list[str]:
    """Problems that the launch would find in folders, checkpoint, program and data. Nothing is made on disk.

    start: the checkpoint to load.
    Returns: problems of this machine's disk alone, where --check-paths no says that the run has another.
    Raises: ConfigError with every problem.
    """
    flags = config.checkpoint
    no_room: list[str] = []
    problems = ask(lambda: refuse_save(flags, start))
    if flags.save is not None:
        root = there = Path(flags.save)
        while not there.exists():
            there = there.absolute().parent
        if not os.access(there, os.W_OK | os.X_OK):
            problems.append(f"--save {root}: {there} may not be written to by this user. Give another folder.")
        size = saved_bytes(plan, config, [work.parameters for work in plan.works])
        problems += ask(lambda: refuse_living(root))
        no_room = ask(lambda: refuse_without_room(there, size))
    parts = list[Part | None]()
    unread = list[str]()
    if datasets is build_datasets:  # a program's own may need what only the launch has
        unread = ask(lambda: parts.extend(open_parts(config, tokenizer)))
    if start is not None:
        if flags.moe_use_upcycling:
            problems += ask(lambda: refuse_upcycling(start, config))
        else:
            train = parts[0] if parts else None
            order = partial(_reordered, config, start, tokenizer, train)
            problems += ask(lambda: refuse_load(start, config, contents(config, order())))
    if (named := config.model.model_provider) is not None:
        problems += ask(lambda: find_provider(named))
    problems += unread
    if config.check.check_paths == "yes":
        problems += no_room
        no_room = []
    if problems:
        raise ConfigError(problems)
    return no_room


def _reordered(config: Config, start: Path, tokenizer: Tokenizer, train: Part | None) -> TokenDataset | None:
    """Return the training samples in their order, where the run has another length than the checkpoint's; else None.

    Only then can the order be another, and putting a large data set in order takes a while.
    """
    if train is None or config.checkpoint.finetune:
        return None
    try:
        saved, mine = saved_config(start).batch, config.batch
    except CheckpointError:  # `refuse_load` says so, or an older one is taken
        return None
    if (saved.train_iters, saved.train_samples) == (mine.train_iters, mine.train_samples):
        return None
    unstored = config.with_fields(data_cache_path=None)
    return build_part(unstored, tokenizer, train)


def vocabulary(config: Config, tokenizer: Tokenizer | None) -> tuple[int, list[str]]:
    """Ids of the tokenizer; where it cannot be read, an assumption and the line that says so."""
    if tokenizer is not None:
        return tokenizer.vocab_size, []
    size = assumed_vocab_size(config.data)
    rows = "" if config.model.padded_vocab_size else f"; the plan assumes {size} ids"
    return size, [f"the vocabulary of --tokenizer-type {config.data.tokenizer} is not known{rows}"]
