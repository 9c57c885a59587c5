"""Keep the run's state in memory while it trains, and go back to it when ranks start again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from megapipe.checkpoint import commit
from megapipe.checkpoint.memory import slots
from megapipe.checkpoint.memory.back import Back, go_back
from megapipe.checkpoint.memory.cliques import Clique, clique_of
from megapipe.checkpoint.memory.copies import Copies
from megapipe.checkpoint.memory.relayout import Kept, State, pieces, size_of
from megapipe.checkpoint.save_load import LoadedState, content_of, curve_of
from megapipe.distributed.groups import host_group_of
from megapipe.distributed.layout import untrained
from megapipe.distributed.meeting.together import on_first, together
from megapipe.optim.buffers import ALIGN
from megapipe.training.progress import Progress
from megapipe.training.run import Run


def kept_by(run: Run) -> Copies | None:
    """Return the training states that this rank keeps in shared memory, its own and its peers'.

    Collective over the world.

    Returns: the states. None if no flag asks for copies, or if no launcher would start a lost rank
        again.
    Raises: CheckpointError on all ranks if a machine's shared memory has no room, or if all copies
        of a state would be on one machine.
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
    state = state_of(run)
    clique = clique_of(config, run.mesh)
    sizes = run.mesh.world.gather_json(size_of(state))
    every = config.checkpoint.non_persistent_save_interval
    assert every is not None
    same = (config.model, config.parallel, config.optimizer, config.precision)
    make = partial(
        Copies,
        clique=clique,
        sizes=[sizes[rank] for rank in clique.axis.ranks],
        state=state,
        every=every,
        world=config.world_size,
        layout=sha256(repr(same).encode()).hexdigest()[:16],
    )
    copies = together(run.mesh, lambda: make(slots.own_folder()), slots.SHARED)
    run.say(kept_line(sizes, clique, every))
    return copies


def state_of(run: Run) -> State:
    """Return the tensors of this rank's training state, a list for each stage."""
    mesh = run.mesh
    found = []
    for n, module in enumerate(run.modules):
        stage = [Kept(x) for x in untrained(module)]
        for b, flat in run.optimizer.placed_flats(n):
            filled = max((b.rows(name).stop * ALIGN for name in b.own), default=0)
            stage.append(Kept(flat, filled, b.replicas is mesh.edp is not mesh.dp_cp))
        found.append(stage)
    return found


def kept_line(sizes: Sequence[int], clique: Clique, every: int) -> str:
    """Return a line for the log: the bytes of states that this rank keeps in shared memory.

    Args:
        sizes: bytes of each rank's state.
        clique: this rank and the ranks with which it exchanges copies of states.
        every: steps between two copies.
    """
    own = clique.axis.ranks[clique.axis.rank]
    text = f"in memory after every {every} step(s), twice: {sizes[own]:,} bytes of rank {own}"
    if clique.sends:
        others = [rank for rank in clique.axis.ranks if rank != own]
        theirs = sum(sizes[rank] for rank in others)
        text += f", which also keeps {theirs:,} of rank(s) {', '.join(map(str, others))}"
    return text


def follow(run: Run, copies: Copies) -> None:
    """Make each step of a run copy the training state into memory.

    Args:
        run: the run, whose progress is already loaded.
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
    """Go back to the newest step with every rank's state in memory; return the run there.

    Args:
        run: a fresh run, whose modules and optimizer are loaded in place.
        copies: the states in memory.
    Returns: None if there is no such step: the run starts from a checkpoint, or from the beginning.
    """
    began = monotonic()
    config = run.config
    world = run.mesh.world
    minutes = config.parallel.distributed_timeout_minutes
    group = partial(host_group_of, [world.ranks], world.rank, minutes)
    find = partial(pieces, state_of(run), world.rank, config)
    back = go_back(copies, world, group, find if config.checkpoint.elastic else None)
    if back is None:
        return None
    if back.generation is None:
        n = newest_on_disk(run)
        start = f"the checkpoint of iteration {n} on disk" if n else "the start or --load on disk"
        run.say(f"in memory: {_nothing(back, copies)}; going on from {start}")
        return None
    run.optimizer.steps = back.content["optimizer_steps"]
    run.optimizer.spread()
    state = back.content["state"]
    loaded = LoadedState(
        back.generation, state["consumed_train_samples"], state["consumed_valid_samples"], state
    )
    progress = Progress.after(loaded, run.config.precision)
    took = monotonic() - began
    run.say(f"in memory: {_found(back, copies)}, in {took:.2f} s; no checkpoint was read")
    return dataclasses.replace(run, progress=progress, curve=curve_of(back.content))


def _found(back: Back, copies: Copies) -> str:
    steps = back.reached - (back.generation or 0)
    text = f"all ranks are back at iteration {back.generation}, {steps} step(s) are lost"
    if back.world != copies.name.world:
        text += f"; there were {back.world} ranks, and there are {copies.name.world}"
    if back.lost:
        pairs = [f"{rank}'s from rank {source}" for rank, source in back.lost.items()]
        text += f"; states of lost ranks: {', '.join(pairs)}"
    return text


def _nothing(back: Back, copies: Copies) -> str:
    if not back.lost:
        return (
            f"the states are of another number of ranks than {copies.name.world}, which --elastic "
            "would take"
        )
    ranks = ", ".join(map(str, back.lost))
    return f"nobody has the state of rank(s) {ranks} any more"


def newest_on_disk(run: Run) -> int:
    """Return the iteration of the newest checkpoint in --save; 0 if there is none.

    Collective over the world.
    """
    folder = run.config.checkpoint.save
    if folder is None:
        return 0
    root = Path(folder)
    return on_first(run.mesh, lambda: commit.newest(root) or 0)
