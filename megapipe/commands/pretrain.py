"""Train from the shell: in one process, or in --nproc processes under torchrun's launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import Read, read, split_among


@dataclass(frozen=True)
class Launch:
    """The flag of the launcher, in addition to the flags of a run: --nproc ranks are started."""

    nproc: int = 1
    """Number of processes to start on this machine, with torchrun's launcher."""


@dataclass(frozen=True)
class Flags(Launch, Config):
    """Train a GPT.

    On several hosts torchrun or Slurm starts the processes, each as `python -m megapipe pretrain`.
    """


def main(argv: Sequence[str]) -> None:
    """Train in this process, or start --nproc processes that train.

    Raises: ConfigError for wrong flags, before any process is started.
    """
    found = read(Flags, argv)
    flags = found.value
    config = Config(**{field.name: getattr(flags, field.name) for field in fields(Config)})
    wrong = [*found.problems]
    if flags.nproc < 1:
        wrong.append(f"--nproc must be at least 1, got {flags.nproc}. Give --nproc 1.")
    if wrong:
        raise ConfigError([*wrong, *_others(found, config)])
    launched = "LOCAL_RANK" in os.environ
    if config.check.check:
        # A check starts no process. --nproc tells it how many there would be.
        world_size = config.check.world_size
        if not world_size and flags.nproc > 1:
            world_size = flags.nproc
        if flags.nproc > 1 and world_size != flags.nproc:
            print(
                f"--nproc {flags.nproc} is without effect: --world-size {world_size} says how many "
                "processes run"
            )
        config = replace(config, check=replace(config.check, world_size=world_size))
    # A rank that torchrun has started has the same flags, and must not start others.
    elif flags.nproc > 1 and not launched:
        _launch(flags.nproc, config, argv)
    elif os.environ.get("RANK", "0") == "0":
        ranks = os.environ.get("WORLD_SIZE", "1")
        print(f"rank 0 of {ranks} has started", file=sys.stderr, flush=True)
    # This import takes seconds, which --help and wrong flags do not wait for.
    from megapipe.training.pretrain import pretrain

    pretrain(config)


def _others(found: Read[Flags], config: Config) -> list[str]:
    """Return the problems of the flags that can be read, when other flags cannot.

    The list is empty with --use-checkpoint-args, since a checkpoint then gives further flags.

    Args:
        found: the command line.
        config: the configuration by the flags that could be read.
    """
    from megapipe.checks.inputs import path_problems, save_problems
    from megapipe.checks.run import flag_problems

    # Flags of a checkpoint are not known without torch.
    if config.checkpoint.use_checkpoint_args:
        return []
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    processes = config.check.world_size or max(found.value.nproc, launched)
    config = replace(config, world_size=max(1, processes))
    problems = flag_problems(config)
    if config.check.check_paths == "yes":
        problems += [*path_problems(config), *save_problems(config)]
    return found.without_unread(problems)


def check(argv: Sequence[str]) -> None:
    """Report everything that a launch with these flags would refuse, and start nothing."""
    for word in argv:
        if word.partition("=")[0] in ("--check", "--no-check"):
            raise ConfigError(
                f"{word}: the command check checks, with or without it. Leave it out."
            )
    main(["--check", *argv])


def _launch(processes: int, config: Config, argv: Sequence[str]) -> None:
    """Check the flags and replace this process by torchrun. The call does not return.

    Args:
        processes: the number of ranks to start.
        argv: the words of the command line, for the ranks.
    Raises: ConfigError for wrong flags, once and not from each rank.
    """
    from megapipe.checkpoint.save_load import find_checkpoint
    from megapipe.checkpoint.saved_config import with_checkpoint_args
    from megapipe.checks.inputs import path_problems, save_problems
    from megapipe.checks.run import flag_problems

    # Some flags may come from the checkpoint, so they are read before the check.
    config = with_checkpoint_args(replace(config, world_size=processes), find_checkpoint)
    problems = [*flag_problems(config), *path_problems(config), *save_problems(config)]
    if problems:
        raise ConfigError(problems)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # The launcher's own flags are not flags of a rank.
    _, rest = split_among(Launch, argv)
    command = [sys.executable, *torchrun, "-m", "megapipe", "pretrain", *rest]
    # The launcher and its ranks import torch before they say anything.
    print(f"starting {processes} processes", file=sys.stderr, flush=True)
    os.execv(sys.executable, command)
