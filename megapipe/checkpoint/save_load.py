"""Save and resume: tensors through torch's distributed checkpoint as safetensors, everything else as JSON.

Tensors are saved under global names in their full shapes, so any tp, pp, dp and schedule loads what any other wrote.
Nothing on disk is a pickle and nothing is unpickled. Every check is made on all ranks together: all raise or none.
`shards` is imported by a run that saves or loads: torch.distributed.checkpoint takes a second.
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
from megapipe.distributed.layout import layout_of
from megapipe.distributed.meeting.together import on_first, share_of, together
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.optim.lr import LRSchedule, WeightDecay
from megapipe.optim.optimizer import Optimizer

STATE = "state.json"


@dataclasses.dataclass(frozen=True)
class LoadedState:
    """The state that a run goes on with; all zero with --finetune; with --no-load-optim the rate begins anew.

    Attributes:
        state: what was given to `save_checkpoint`.
        other: settings of the checkpoint's run that this one has changed, see `resume.changed_settings`.
        schedule: the checkpoint's learning-rate curve if the flags ask for it, else None: use that of the flags.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schedule: LRSchedule | None = None
    other: Sequence[str] = ()


def check_save(directory: str | Path, iteration: int, mesh: ProcessMesh, needed: int = 0) -> None:
    """Call before training. Raises: CheckpointError if a run that starts at `iteration` could not save there.

    Args:
        needed: bytes of a checkpoint, as far as they are known.
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
        # A write that is tried: rights alone do not know of quotas, read-only mounts and root squashing.
        probe = Path(tempfile.mkdtemp(prefix="iter_0.tmp-", dir=root))
        commit.write_durably(probe / STATE, "{}")
        shutil.rmtree(probe)

    on_first(mesh, check)
    import_module(
        "megapipe.checkpoint.shards"
    )  # now: who knows what is installed when the first save is due


def refuse_save(config: CheckpointConfig, start: Path | None) -> None:
    """Refuse what `check_save` would, without a model and without making a folder. start: the checkpoint to load.

    Raises: CheckpointError.
    """
    if config.save is not None:
        root = Path(config.save)
        if config.moe_use_upcycling and commit.iterations_in(root):
            raise CheckpointError(
                f"--save {root} has checkpoints already: experts were made there. To go on with them leave out "
                f"--moe-use-upcycling and use --load {root}, or give another folder: --save {root}-upcycled"
            )
        anew = start is None or config.finetune or config.moe_use_upcycling
        after = 0 if anew or start is None else commit.iteration_of(start)
        commit.refuse_to_overwrite(root, after)


def refuse_load(folder: Path, config: Config, contents: Mapping[str, str]) -> None:
    """Refuse the settings that `load_checkpoint` would, without a model. Damage is its to see, file by file.

    Raises: CheckpointError.
    """
    try:
        commit.read_manifest(folder)
    except commit.Damaged:
        if config.checkpoint.ckpt_step is None and commit.iterations_in(folder.parent)[
            0
        ] < commit.iteration_of(folder):
            return  # an older one is taken then
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
    """Write DIRECTORY/iter_NNNNNNN and point to it. Collective over the mesh; the folder must be shared by all ranks.

    Args:
        state: what else the run needs, as JSON: at least consumed_train_samples and consumed_valid_samples.
        schedule: the learning-rate curve in use; default: that of the flags.
        background: writes it from the second one on; its last one must be finished.
    Returns: the checkpoint's folder; None while it is being written.
    Raises: CheckpointError on all ranks if any cannot write; previous checkpoints are as they were.
    """
    from megapipe.checkpoint import shards

    kept = None if config.checkpoint.no_save_optim else optimizer
    text = _content(iteration, state, config, optimizer, schedule)
    folder = Path(on_first(mesh, lambda: str(commit.begin(Path(directory), iteration))))
    try:
        together(mesh, lambda: _see(folder, mesh))
        with shards.whole_weights(optimizer):
            tensors = shards.tensors_of(stages, {} if kept is None else kept.state(), mesh)
            if background is not None and background.fits(tensors):
                background.start(folder, iteration, tensors, {STATE: text})
                return None
            writer = together(mesh, lambda: shards.write(folder, tensors, mesh), folder)
            on_first(mesh, lambda: commit.write_durably(folder / STATE, text))
            # Each rank what it has written itself: a listing of a shared folder may lack what others have just made.
            mine = [*writer.mine, *([STATE] if mesh.world.rank == 0 else [])]
            parts = mesh.world.gather_json(together(mesh, lambda: commit.digest(folder, mine)))
            files = {name: entry for part in parts for name, entry in part.items()}
            on_first(mesh, lambda: shards.all_there(folder, writer.everyones, files))
            saved = Path(on_first(mesh, lambda: str(commit.commit(folder, iteration, files))))
        if background is not None:
            together(mesh, lambda: background.learn(saved, writer.mine))
    except CheckpointError:
        if mesh.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return saved


def find_checkpoint(config: CheckpointConfig, mesh: ProcessMesh | None = None) -> Path | None:
    """The folder that --load and --ckpt-step name; None to start fresh, which the first rank says.

    Args:
        mesh: all ranks get what the first one finds; None to look alone and quietly, before there are processes.
    Raises: CheckpointError if there is none and --exit-on-missing-checkpoint, or a damaged pointer.
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
    """Read a checkpoint into the stages and the optimizer, after every file has been checked. Collective.

    Args:
        optimizer: None to load the weights alone, as --finetune and --no-load-optim do.
        checked: its files have been compared with the manifest.
        contents: of this run's data and tokenizer, see `same.contents`, to be compared with state["contents"].
    Raises: CheckpointError on all ranks: damage, another model, other learning-rate settings. Nothing is changed then.
    """
    from megapipe.checkpoint import shards

    flags = config.checkpoint
    with_optimizer = None if _weights_alone(config) else optimizer
    if not checked:
        files = together(mesh, lambda: commit.read_manifest(folder))
        together(mesh, lambda: commit.verify(folder, files, share_of(files, mesh)))
    content, other = together(
        mesh, lambda: _read_state(folder, with_optimizer is not None, config, contents)
    )
    with shards.whole_weights(optimizer):
        held = {} if with_optimizer is None else with_optimizer.state()
        tensors = shards.tensors_of(stages, held, mesh)
        tensors = together(mesh, lambda: shards.loadable(folder, tensors))
        needed = {
            key: fact
            for row in mesh.pp.gather_json(shards.facts_of(tensors))
            for key, fact in row.items()
        }
        together(mesh, lambda: shards.compare(folder, needed, with_optimizer is not None))
        together(mesh, lambda: shards.read(folder, tensors, mesh))
        shards.from_twins(stages, mesh)
        params = dict(pair for stage in stages for pair in stage.named_parameters())
        for param in params.values():
            if (owner := params.get(layout_of(param).tied_to or "")) is not None:
                param.data.copy_(owner.data)
        if with_optimizer is not None:
            with_optimizer.load_state(held)
            with_optimizer.steps = content["optimizer_steps"]
        elif optimizer is not None:
            optimizer.reload_main()
    if flags.finetune:
        return LoadedState()
    schedule = None
    if with_optimizer is not None and config.optimizer.use_checkpoint_opt_param_scheduler:
        saved = dict(content["opt_param_scheduler"])
        schedule = LRSchedule(**saved | {"weight_decay": WeightDecay.loaded(saved["weight_decay"])})
    state = content["state"]
    if with_optimizer is None:  # as in Megatron-LM: a warm-up for moments that are zero again
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
    flags = config.checkpoint
    return (
        flags.finetune
        or flags.no_load_optim
        or config.optimizer.freeze_all_layers
        or config.data.skip_train
    )


def _content(
    iteration: int,
    state: Mapping[str, Any],
    config: Config,
    optimizer: Optimizer | None,
    schedule: LRSchedule | None,
) -> str:
    """All that is no tensor, as JSON."""
    kept = None if config.checkpoint.no_save_optim else optimizer
    content = {
        "iteration": iteration,
        "state": dict(state),
        "optimizer_steps": None if kept is None else kept.steps,
        "opt_param_scheduler": None if optimizer is None else settings(config, schedule),
        "config": dataclasses.asdict(config),
        "torch": torch.__version__,
    }
    return json.dumps(content, indent=1) + "\n"


def _see(folder: Path, mesh: ProcessMesh) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {mesh.world.rank} does not see {folder}, which rank 0 has made: "
            "--save must be a folder that all machines share"
        )


def _read_state(
    folder: Path, with_optimizer: bool, config: Config, contents: Mapping[str, str] | None
) -> tuple[dict[str, Any], list[str]]:
    """The content of the file, and a list of what this run changes of it."""
    changed: dict[str, str] = {}
    try:
        content = json.loads((folder / STATE).read_text())
        model, scheduler = content["config"]["model"], content["opt_param_scheduler"]
        (
            content["iteration"],
            content["state"]["consumed_train_samples"],
            content["state"]["consumed_valid_samples"],
        )
        if content["state"].get("iteration", content["iteration"]) != content["iteration"]:
            raise ValueError
        if not config.checkpoint.finetune:
            changed = changed_settings(
                content["config"], content["state"].get("contents"), config, contents
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder / STATE} is not the state of a run") from None
    problems = resume_problems(model, scheduler if with_optimizer else None, config, folder.name)
    if problems := problems + unnamed(changed, config, folder.name):
        raise CheckpointError(problems)
    return content, list(changed.values())
