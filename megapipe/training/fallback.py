"""The checkpoint that --load goes on from: the newest that is sound, whatever happened to those after it."""

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
    """The checkpoint to load, its files checked; the same on all ranks, which share the reading. None: start fresh.

    One that --ckpt-step names is never replaced by another. In the folder of --save damaged ones are set aside under
    another name, so that this run can save there.

    Raises: CheckpointError if none is sound, with everything that is wrong.
    """
    path = find_checkpoint(config, mesh)  # again, now that --save is this run's alone: who had it may have saved since
    if path is None:
        return None
    root, found, damaged = path.parent, list[str](), list[Path]()
    # From the newest on back: what a crash or a full disk spoils is the last save, seldom more.
    while problems := _damage(path, mesh):
        found += problems
        damaged.append(path)
        older = [n for n in on_first(mesh, lambda: commit.iterations_in(root)) if n < commit.iteration_of(path)]
        if config.ckpt_step is not None or not older:
            raise CheckpointError(found)
        path = commit.folder_of(root, older[-1])
    if damaged:
        sound = path
        aside = on_first(mesh, lambda: _set_aside(config, sound, damaged))
        if mesh.world.rank == 0:
            lost = commit.iteration_of(damaged[0]) - commit.iteration_of(path)
            going_on = f"going on from {path}: {lost} iterations are lost{aside}"
            print(banner("WARNING: DAMAGED CHECKPOINT", *found, going_on), flush=True)
    return path


def _damage(folder: Path, mesh: ProcessMesh) -> list[str]:
    def look() -> list[str]:
        try:
            files = commit.read_manifest(folder)
            commit.verify(folder, files, share_of(files, mesh))
        except commit.Damaged as error:
            return list(error.problems)
        return []

    return list(dict.fromkeys(text for row in mesh.world.gather_json(together(mesh, look)) for text in row))


def _set_aside(config: CheckpointConfig, sound: Path, damaged: list[Path]) -> str:
    if config.save is None or not sound.parent.samefile(config.save):
        return ""
    commit.point_to(sound.parent, commit.iteration_of(sound))
    for folder in damaged:
        folder.rename(commit.aside(folder, "damaged"))
    return "; the damaged ones are renamed to .damaged-..."


def resumed(run: Run, contents: Mapping[str, str]) -> Run:
    """The run where it begins: behind the newest sound checkpoint that it is to load, whose weights it then has."""
    path, config = newest_sound(run.config.checkpoint, run.mesh), run.config
    if path is None:
        return run
    if config.checkpoint.moe_use_upcycling:
        dense, path = path, _with_experts(path, run)
        run.say(f"  experts of {config.model.experts} made of the MLPs of {dense}: {path}")
        config = config.with_fields(finetune=True)
    loaded = load_checkpoint(path, run.modules, run.optimizer, config, run.mesh, checked=True, contents=contents)
    run.say(f"  successfully loaded checkpoint from {path} at iteration {loaded.iteration}")
    if loaded.other:
        run.say(f"WARNING: goes on with other settings than {path.name}: {'; '.join(loaded.other)}")
    return replace(run, progress=Progress.after(loaded, config.precision), curve=loaded.schedule or run.curve)


def _with_experts(dense: Path, run: Run) -> Path:
    """Make a checkpoint of this run's model in --save (--moe-use-upcycling), on the first rank."""
    from megapipe.convert.upcycle import upcycle

    target = Path(str(run.config.checkpoint.save))
    return Path(on_first(run.mesh, lambda: str(upcycle(dense, target, run.config))))
