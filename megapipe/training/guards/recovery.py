"""Keep the run's state in memory while it trains, and go back to it when ranks start again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from megapipe.checkpoint import commit
from megapipe.checkpoint.memory import slots
from megapipe.checkpoint.memory.back import Back, go_back
from megapipe.checkpoint.memory.cliques import Clique, clique_of
from megapipe.checkpoint.memory.copies import Copies, size_of
from megapipe.checkpoint.save_load import LoadedState, content_of, curve_of
from megapipe.distributed.layout import untrained
from megapipe.distributed.meeting.together import on_first, together
from megapipe.training.progress import Progress
from megapipe.training.run import Run


def kept_by(run: Run) -> Copies | None:
    """Return the states in memory of a run whose flags ask for them. Collective over the world.

    Returns: None without the flags, or if no launcher would start a lost rank again.
    Raises: CheckpointError on all ranks if a machine's shared memory has no room.
    """
    config = run.config
    if not config.copies_state:
        return None
    if not slots.restarts():
        run.say(
            "WARNING: --non-persistent-ckpt-type local: nothing is kept in memory. No launcher "
            "starts a lost rank again; start with torchrun --max-restarts 10"
        )
        return None
    state = []
    for n, module in enumerate(run.modules):
        state.append([*run.optimizer.flats(n), *untrained(module)])
    clique = clique_of(config, run.mesh)
    sizes = run.mesh.world.gather_json(size_of(state))
    every = config.checkpoint.non_persistent_save_interval
    assert every is not None
    own = [sizes[rank] for rank in clique.axis.ranks]
    make = partial(Copies, clique=clique, sizes=own, state=state, every=every)
    copies = together(run.mesh, lambda: make(slots.own_folder()), slots.SHARED)
    run.say(kept_line(sizes, clique, every))
    return copies


def kept_line(sizes: Sequence[int], clique: Clique, every: int) -> str:
    """Return a line for the log: the bytes of states that this rank keeps in shared memory.

    Args:
        sizes: bytes of each rank's state.
        clique: the ranks that keep the printing rank's state.
        every: steps between two copies.
    """
    own = clique.axis.ranks[clique.axis.rank]
    text = f"in memory after every {every} step(s), twice: {sizes[own]:,} bytes of rank {own}"
    if clique.sends:
        theirs = sum(sizes[rank] for rank in clique.others)
        text += f", which also keeps {theirs:,} of rank(s) {', '.join(map(str, clique.others))}"
    return text


def follow(run: Run, copies: Copies) -> None:
    """Make each step of a run copy its state into memory.

    Args:
        run: the run that trains, with the progress that it begins with.
        copies: the states in memory.
    """
    copies.content = partial(_content, run)
    run.stages.copy = copies.begin


def _content(run: Run) -> Mapping[str, Any]:
    state = dataclasses.asdict(run.progress)
    optimizer = run.optimizer
    n = run.progress.iteration
    # Without the configuration: the same launcher starts ranks again, with the same flags.
    return content_of(n, state, run.config, optimizer, optimizer, run.curve)


def returned(run: Run, copies: Copies) -> Run | None:
    """Go back to the newest step whose states are all in memory; return the run there.

    Args:
        run: a fresh run, whose modules and optimizer are loaded in place.
        copies: the states in memory.
    Returns: None if there is none: the run starts from a checkpoint, or from the beginning.
    """
    began = monotonic()
    back = go_back(copies, run.mesh.world)
    if back is None:
        return None
    if back.generation is None:
        run.say(f"in memory: {_nothing(back)}; going on from the last checkpoint on disk")
        return None
    run.optimizer.steps = back.content["optimizer_steps"]
    run.optimizer.spread()
    state = back.content["state"]
    loaded = LoadedState(
        back.generation, state["consumed_train_samples"], state["consumed_valid_samples"], state
    )
    progress = Progress.after(loaded, run.config.precision)
    took = monotonic() - began
    run.say(f"in memory: {_found(back)}, in {took:.2f} s; no checkpoint was read")
    return dataclasses.replace(run, progress=progress, curve=curve_of(back.content))


def _found(back: Back) -> str:
    steps = back.reached - (back.generation or 0)
    text = f"all ranks are back at iteration {back.generation}, {steps} step(s) are lost"
    if back.lost:
        pairs = [f"{rank}'s from rank {source}" for rank, source in back.lost.items()]
        text += f"; states of lost ranks: {', '.join(pairs)}"
    return text


def _nothing(back: Back) -> str:
    ranks = ", ".join(map(str, back.lost))
    return f"nobody has the state of rank(s) {ranks} any more"


def newest_on_disk(run: Run) -> int:
    """Return the iteration of the newest checkpoint in --save; 0 for none."""
    folder = run.config.checkpoint.save
    if folder is None:
        return 0
    root = Path(folder)
    return on_first(run.mesh, lambda: commit.newest(root) or 0)
