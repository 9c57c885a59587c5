"""Load the newest undamaged checkpoint, whatever has happened to later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megapipe.checkpoint import commit
from megapipe.checkpoint.save_load import find_checkpoint, load_checkpoint
from megapipe.config import CheckpointConfig
from megapipe.distributed.meeting.together import on_first, share_of, together
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.training.progress import Progress
from megapipe.training.report.lines import banner
from megapipe.training.run import Run


def newest_sound(config: CheckpointConfig, mesh: ProcessMesh) -> Path | None:
    """Return the checkpoint to load, with its files verified; None to start fresh.

    The result is the same on all ranks; each verifies a part of the files. A checkpoint that
    --ckpt-step names is never replaced by an older one. If an older one is sound, the damaged
    checkpoints in the folder of --save are renamed, so that this run can save there.

    Args:
        config: the checkpoint flags.
        mesh: this rank's mesh.
    Raises: CheckpointError with all damage, if no checkpoint is sound, or not the one of
        --ckpt-step.
    """
    # Looked up again, now that this run has the lock on --save: the last owner may have saved.
    path = find_checkpoint(config, mesh)
    if path is None:
        return None
    root = path.parent
    found: list[str] = []
    damaged: list[Path] = []
    # From the newest back: a crash or a full disk damages the last save, seldom an older one.
    while problems := _damage(path, mesh):
        found += problems
        damaged.append(path)
        iteration = commit.iteration_of(path)
        there = on_first(mesh, lambda: commit.iterations_in(root))
        older = [n for n in there if n < iteration]
        if config.ckpt_step is not None or not older:
            raise CheckpointError(found)
        path = commit.folder_of(root, older[-1])
    if damaged:
        sound = path
        renamed = on_first(mesh, lambda: _set_aside(config, sound, damaged))
        if mesh.world.rank == 0:
            lost = commit.iteration_of(damaged[0]) - commit.iteration_of(path)
            going_on = f"going on from {path}: {lost} iterations are lost{renamed}"
            print(banner("WARNING: DAMAGED CHECKPOINT", *found, going_on), flush=True)
    return path


def _damage(folder: Path, mesh: ProcessMesh) -> list[str]:
    """Return a text for each problem of a checkpoint. Each rank verifies a part of its files."""

    def verify_share() -> list[str]:
        try:
            files = commit.read_manifest(folder)
            commit.verify(folder, files, share_of(files, mesh))
        except commit.Damaged as error:
            return list(error.problems)
        return []

    # Each rank reads its share of the bytes; the problems are put together in rank order.
    everyone = mesh.world.gather_json(together(mesh, verify_share))
    # Several ranks may have read parts of one damaged file: each text once.
    return list(dict.fromkeys(text for of_rank in everyone for text in of_rank))


def _set_aside(config: CheckpointConfig, sound: Path, damaged: list[Path]) -> str:
    """Rename damaged checkpoints, if they are in the folder of --save.

    Args:
        config: the checkpoint flags.
        sound: the checkpoint that is loaded instead.
        damaged: the folders of damaged ones.
    Returns: the end of a message, which names the renamed folders.
    """
    if config.save is None or not sound.parent.samefile(config.save):
        return ""
    # First the pointer: if the process is killed here, it names a checkpoint that exists.
    commit.point_to(sound.parent, commit.iteration_of(sound))
    for folder in damaged:
        folder.rename(commit.aside(folder, "damaged"))
    return "; the damaged ones are renamed to .damaged-..."


def resumed(run: Run, contents: Mapping[str, str]) -> Run:
    """Load the newest undamaged checkpoint, and return the run with its progress and curve.

    Returns `run` itself if there is nothing to load. With --moe-use-upcycling the checkpoint is
    first converted to one with experts in --save. Collective over the world.

    Args:
        run: a fresh run, whose modules and optimizer are loaded in place.
        contents: digests of data and tokenizer, compared with the checkpoint's.
    """
    config = run.config
    path = newest_sound(config.checkpoint, run.mesh)
    if path is None:
        return run
    if config.checkpoint.moe_use_upcycling:
        dense = path
        path = _with_experts(path, run)
        run.say(f"  experts of {config.model.experts} made of the MLPs of {dense}: {path}")
        # The new checkpoint begins at iteration 0, with the settings of this run.
        config = config.with_fields(finetune=True)
    # checked: newest_sound has just read every byte.
    loaded = load_checkpoint(
        path, run.modules, run.optimizer, config, run.mesh, checked=True, contents=contents
    )
    # Megatron-LM's line.
    run.say(f"  successfully loaded checkpoint from {path} at iteration {loaded.iteration}")
    if loaded.other:
        others = "; ".join(loaded.other)
        run.say(f"WARNING: goes on with other settings than {path.name}: {others}")
    progress = Progress.after(loaded, config.precision)
    return replace(run, progress=progress, curve=loaded.schedule or run.curve)


def _with_experts(dense: Path, run: Run) -> Path:
    """Return a checkpoint in --save whose MoE experts are copies of a dense checkpoint's MLPs.

    Rank 0 converts the checkpoint (--moe-use-upcycling). Collective over the world.

    dense: the folder of the dense checkpoint.
    """
    from megapipe.convert.upcycle import upcycle

    target = Path(str(run.config.checkpoint.save))
    return Path(on_first(run.mesh, lambda: str(upcycle(dense, target, run.config))))
