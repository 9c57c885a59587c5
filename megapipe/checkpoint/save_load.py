"""Save and resume: tensors by torch's distributed checkpoint as safetensors, the rest as JSON.

Tensors are saved under global names in their full shapes, so any tp, pp, dp and schedule loads a
checkpoint of any other. Nothing on disk is a pickle and nothing is unpickled. Every check is made
on all ranks together: all raise or none.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megapipe.checkpoint import commit
from megapipe.checkpoint.background import Background
from megapipe.checkpoint.resume import changed_settings, resume_problems, settings, unnamed
from megapipe.config import CheckpointConfig, Config
from megapipe.distributed.meeting.together import on_first, share_of, together
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.optim.lr import LRSchedule, WeightDecay
from megapipe.optim.optimizer import Optimizer

STATE = "state.json"


@dataclasses.dataclass(frozen=True)
class LoadedState:
    """The state with which a run continues. With --finetune all attributes have their defaults.

    Attributes:
        iteration: steps so far.
        consumed_train_samples: samples that were trained on.
        consumed_valid_samples: samples that evaluations have read.
        state: all that `save_checkpoint` was given as `state`, also the two counts of samples.
        schedule: the checkpoint's learning-rate curve under
            --use-checkpoint-opt_param-scheduler; None for the curve of this run's flags.
        other: a text for each setting that this run has changed, from `resume.changed_settings`.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schedule: LRSchedule | None = None
    other: Sequence[str] = ()


def check_save(directory: str | Path, iteration: int, mesh: ProcessMesh, needed: int = 0) -> None:
    """Check before training that a run can save, and remove leftovers of interrupted saves.

    Collective over the mesh.

    Args:
        directory: the folder of --save.
        iteration: the iteration from which the run starts.
        needed: bytes that a checkpoint takes at least; 0 if not known.
    Raises: CheckpointError on all ranks if the run cannot save.
    """
    root = Path(directory)

    def check() -> None:
        root.mkdir(parents=True, exist_ok=True)
        commit.refuse_to_overwrite(root, iteration)
        if left := commit.clear(root):
            print(
                f"removed from {root} what interrupted saves had left: {', '.join(left)}",
                flush=True,
            )
        commit.refuse_without_room(root, needed)
        # A write is tried: rights know nothing of quotas, read-only mounts and root squashing.
        probe = Path(tempfile.mkdtemp(prefix="iter_0.tmp-", dir=root))
        commit.write_durably(probe / STATE, "{}")
        shutil.rmtree(probe)

    on_first(mesh, check)
    # Now, as packages may be installed or removed until the first save is due.
    import_module("megapipe.checkpoint.shards")


def refuse_save(config: CheckpointConfig, start: Path | None) -> None:
    """Check, without a model and without writing, that a run overwrites no checkpoint in --save.

    Without --save nothing is checked. `check_save` also checks room and rights.

    Args:
        config: the checkpoint flags.
        start: the checkpoint to load; None for none.
    Raises: CheckpointError if --save has later checkpoints than the run starts from. With
        --moe-use-upcycling any checkpoint there is an error.
    """
    if config.save is None:
        return
    root = Path(config.save)
    if config.moe_use_upcycling and commit.iterations_in(root):
        raise CheckpointError(
            f"--save {root} has checkpoints already: experts were made there. To go on with them "
            f"leave out --moe-use-upcycling and use --load {root}, or give another folder: "
            f"--save {root}-upcycled"
        )
    # Experts are made of a dense model, and such a run begins at 0, as fine-tuning does.
    after = 0
    if start is not None and not config.finetune and not config.moe_use_upcycling:
        after = commit.iteration_of(start)
    commit.refuse_to_overwrite(root, after)


def refuse_load(folder: Path, config: Config, contents: Mapping[str, str]) -> None:
    """Check, without a model, that this run's settings can continue from a checkpoint.

    A damaged checkpoint is no error if the run may take an older one, that is without --ckpt-step.

    Args:
        folder: the checkpoint.
        config: the flags of this run.
        contents: {name: digest} of this run's data and tokenizer files.
    Raises: CheckpointError if the run could not continue from the checkpoint.
    """
    try:
        commit.read_manifest(folder)
    except commit.Damaged:
        # A run takes an older checkpoint then, unless the flags name this one.
        oldest = commit.iterations_in(folder.parent)[0]
        if config.checkpoint.ckpt_step is None and oldest < commit.iteration_of(folder):
            return
        raise
    _read_state(folder, not _weights_alone(config), config, contents)


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    stages: Sequence[nn.Module],
    optimizer: Optimizer | None,
    state: Mapping[str, Any],
    config: Config,
    mesh: ProcessMesh,
    schedule: LRSchedule | None = None,
    background: Background | None = None,
) -> Path | None:
    """Write DIRECTORY/iter_NNNNNNN and point to it. Collective over the mesh.

    Args:
        directory: the folder of --save, which all ranks must share.
        iteration: steps so far.
        stages: this rank's stages.
        optimizer: the optimizer; None if nothing is trained.
        state: other state of the run, as JSON: at least consumed_train_samples and
            consumed_valid_samples.
        schedule: the learning-rate curve in use; default: the curve of the flags.
        background: the asynchronous saves of --async-save; the last one must be finished. The
            first checkpoint of a run is written without it, before this function returns. So is
            one that does not fit the files of the first, see `Background.fits`.
    Returns: the checkpoint's folder; None if `background` is still writing it.
    Raises: CheckpointError on all ranks if any cannot write; earlier checkpoints are unchanged.
    """
    # torch.distributed.checkpoint takes a second, and not every run saves.
    from megapipe.checkpoint import shards

    kept = None if config.checkpoint.no_save_optim else optimizer
    content = content_of(iteration, state, config, kept, optimizer, schedule)
    content |= {"config": dataclasses.asdict(config), "torch": torch.__version__}
    text = json.dumps(content, indent=1) + "\n"
    folder = Path(on_first(mesh, lambda: str(commit.begin(Path(directory), iteration))))
    try:
        together(mesh, lambda: _see(folder, mesh))
        # Under ZeRO-1 the weights of the last update may not be gathered yet.
        if optimizer is not None:
            optimizer.gathers.settle()
        saved = shards.saved_by(optimizer, with_state=kept is not None)
        tensors = shards.tensors_of(stages, saved, mesh)
        if background is not None and background.fits(tensors):
            shards.fill(folder, tensors, saved.shards, background.keys, mesh)
            background.start(folder, iteration, tensors, {STATE: text})
            return None
        written = shards.write(folder, tensors, saved.shards, mesh)
        on_first(mesh, lambda: commit.write_durably(folder / STATE, text))
        # Each rank reads its own files back: a listing of a shared folder may lack files that
        # others have just made.
        mine = [*written]
        if mesh.world.rank == 0:
            mine.append(STATE)
        parts = mesh.world.gather_json(together(mesh, lambda: commit.digest(folder, mine)))
        files = dict(pair for part in parts for pair in part.items())
        everyones = [name for names in mesh.world.gather_json(written) for name in names]
        on_first(mesh, lambda: shards.all_there(folder, everyones, files))
        done = Path(on_first(mesh, lambda: str(commit.commit(folder, iteration, files))))
        # The first save shows the writer the form of all that follow.
        if background is not None:
            together(mesh, lambda: background.learn(done, written))
    except CheckpointError:
        if mesh.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return done


def find_checkpoint(config: CheckpointConfig, mesh: ProcessMesh | None = None) -> Path | None:
    """Return the folder that --load and --ckpt-step name; None to start from random weights.

    It is None without --load, or if --load has no checkpoint. Collective if `mesh` is given.

    Args:
        config: the checkpoint flags.
        mesh: all ranks: the first looks for the others, and prints a line if there is no
            checkpoint. With None this process looks by itself and prints nothing.
    Raises: CheckpointError if the checkpoint of --ckpt-step is missing, or the pointer to the
        newest checkpoint is damaged. Also if there is none, with --exit-on-missing-checkpoint.
    """
    if config.load is None:
        return None
    root = Path(config.load)

    def look() -> int | None:
        if config.ckpt_step is not None:
            commit.require(root, config.ckpt_step)
            return config.ckpt_step
        iteration = commit.newest(root)
        if iteration is None and config.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {root} holds no checkpoint, and --exit-on-missing-checkpoint is given"
            )
        return iteration

    iteration = on_first(mesh or ProcessMesh.single(), look)
    if iteration is None:
        if mesh is not None and mesh.world.rank == 0:
            print(f"--load {root} holds no checkpoint; starting from random weights", flush=True)
        return None
    return commit.folder_of(root, iteration)


def load_checkpoint(
    folder: Path,
    stages: Sequence[nn.Module],
    optimizer: Optimizer | None,
    config: Config,
    mesh: ProcessMesh,
    *,
    checked: bool = False,
    contents: Mapping[str, str] | None = None,
) -> LoadedState:
    """Read a checkpoint into the stages and the optimizer, after checking every file. Collective.

    Args:
        folder: the checkpoint.
        stages: this rank's stages.
        optimizer: None to load the weights alone, as --finetune and --no-load-optim do.
        config: the flags of this run.
        checked: whether the files have been compared with the manifest already.
        contents: {name: digest} of this run's data and tokenizer files, to be compared with the
            saved digests; None to compare nothing.
    Raises: CheckpointError on all ranks for damage, another model, or other settings that no flag
        allows. The stages and the optimizer are unchanged then.
    """
    from megapipe.checkpoint import facts, shards

    with_optimizer = None if _weights_alone(config) else optimizer
    if not checked:
        files = together(mesh, lambda: commit.read_manifest(folder))
        together(mesh, lambda: commit.verify(folder, files, share_of(files, mesh)))
    content, other = together(
        mesh, lambda: _read_state(folder, with_optimizer is not None, config, contents)
    )
    saved = shards.saved_by(optimizer, with_state=with_optimizer is not None)
    tensors = shards.tensors_of(stages, saved, mesh)
    tensors = together(mesh, lambda: facts.loadable(folder, tensors))
    # A tensor that no stage needs is one too many, and that takes the keys of all stages.
    of_ranks = mesh.pp.gather_json(facts.facts_of(tensors))
    needed = dict(pair for of_rank in of_ranks for pair in of_rank.items())
    together(mesh, lambda: facts.compare(folder, needed, with_optimizer is not None))
    together(mesh, lambda: shards.read(folder, tensors, saved.shards, mesh))
    shards.from_twins(stages, mesh)
    shards.to_uses(stages)
    if with_optimizer is not None:
        with_optimizer.steps = content["optimizer_steps"]
    # Main parameters follow the weights if they were not read.
    elif optimizer is not None:
        optimizer.reload_main()
    if optimizer is not None:
        optimizer.loaded()
    if config.checkpoint.finetune:
        return LoadedState()
    schedule = None
    if with_optimizer is not None and config.optimizer.use_checkpoint_opt_param_scheduler:
        schedule = curve_of(content)
    state = content["state"]
    if with_optimizer is None:
        # As in Megatron-LM: the rate warms up again for moments that are zero.
        state["skipped_samples"] = state["consumed_train_samples"]
    return LoadedState(
        content["iteration"],
        state["consumed_train_samples"],
        state["consumed_valid_samples"],
        state,
        schedule,
        other,
    )


def _weights_alone(config: Config) -> bool:
    """Return whether a run loads weights without the optimizer's state, by its flags."""
    flags = config.checkpoint
    if config.optimizer.freeze_all_layers or config.data.skip_train:
        return True
    return flags.finetune or flags.no_load_optim


def content_of(
    iteration: int,
    state: Mapping[str, Any],
    config: Config,
    kept: Optimizer | None,
    optimizer: Optimizer | None,
    schedule: LRSchedule | None,
) -> dict[str, Any]:
    """Return the part of state.json that changes during a run.

    Together with the tensors this is the whole state of the run.

    Args:
        iteration: steps so far.
        state: other state of the run, such as consumed_train_samples.
        config: the flags of this run.
        kept: the optimizer, if its state is saved too; else None.
        optimizer: the optimizer; None if nothing is trained.
        schedule: the learning-rate curve in use; None for the curve of the flags.
    """
    return {
        "iteration": iteration,
        "state": dict(state),
        "optimizer_steps": None if kept is None else kept.steps,
        "opt_param_scheduler": None if optimizer is None else settings(config, schedule),
    }


def curve_of(content: Mapping[str, Any]) -> LRSchedule:
    """Return the learning-rate curve in the content of a state.json."""
    saved = dict(content["opt_param_scheduler"])
    saved["weight_decay"] = WeightDecay.loaded(saved["weight_decay"])
    return LRSchedule(**saved)


def _see(folder: Path, mesh: ProcessMesh) -> None:
    """Check that this rank sees the folder that the first rank made."""
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {mesh.world.rank} does not see {folder}, which rank 0 has made: "
            "--save must be a folder that all machines share"
        )


def _read_state(
    folder: Path, with_optimizer: bool, config: Config, contents: Mapping[str, str] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return (content of state.json, texts on settings that differ from the run that saved).

    Args:
        folder: the checkpoint.
        with_optimizer: the optimizer's state will be loaded, so its settings are compared.
        config: the flags of this run.
        contents: digests of this run's data and tokenizer; None to compare nothing.
    Raises: CheckpointError if this run cannot continue from the checkpoint.
    """
    changed: dict[str, str] = {}
    try:
        content = json.loads((folder / STATE).read_text())
        model = content["config"]["model"]
        scheduler = content["opt_param_scheduler"]
        state = content["state"]
        if state.get("iteration", content["iteration"]) != content["iteration"]:
            raise ValueError
        # A state without them is damaged, and better found here than after the weights are read.
        for key in ("consumed_train_samples", "consumed_valid_samples"):
            state[key]
        # Fine-tuning is another training, with other data.
        if not config.checkpoint.finetune:
            saved = state.get("contents")
            changed = changed_settings(content["config"], saved, config, contents)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder / STATE} is not the state of a run") from None
    # Without the optimizer's state its rates begin anew, and may be any.
    if not with_optimizer:
        scheduler = None
    problems = resume_problems(model, scheduler, config, folder.name)
    problems += unnamed(changed, config, folder.name)
    if problems:
        raise CheckpointError(problems)
    return content, list(changed.values())
