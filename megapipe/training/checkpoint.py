"""Save and resume: tensors through torch's distributed checkpoint as safetensors, everything else as JSON.

Tensors are saved under global names in their full shapes, so any tp, pp, dp and schedule loads what any other wrote.
Nothing on disk is a pickle and nothing is unpickled. Every check is made on all ranks together: all raise or none.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard

from megapipe.config import CheckpointConfig, Config
from megapipe.distributed.layout import Layout, layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.optim.lr import LRSchedule
from megapipe.optim.optimizer import Optimizer
from megapipe.training import commit
from megapipe.training.resume import other_settings, resume_problems, settings

T = TypeVar("T")
STATE = "state.json"


@dataclasses.dataclass(frozen=True)
class LoadedState:
    """What a run continues with; all zero with --finetune; with --no-load-optim the learning rate begins anew.

    Attributes:
        state: what was given to `save_checkpoint`.
        other: settings of the checkpoint's run that this one does not share, see `resume.other_settings`.
        schedule: the checkpoint's learning-rate curve if the flags ask for it, else None: use that of the flags.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schedule: LRSchedule | None = None
    other: Sequence[str] = ()


def check_save(directory: str | Path, iteration: int, mesh: ProcessMesh) -> None:
    """Call before training. Raises: CheckpointError if a run that starts at `iteration` could not save there."""
    root = Path(directory)

    def check() -> None:
        root.mkdir(parents=True, exist_ok=True)
        commit.refuse_to_overwrite(root, iteration)

    _on_first(mesh, check)


def refuse_save(config: CheckpointConfig, start: Path | None) -> None:
    """What `check_save` would refuse, without a model and without making a folder. start: the checkpoint to load.

    Raises: CheckpointError.
    """
    if config.save is not None:
        after = 0 if start is None or config.finetune else commit.iteration_of(start)
        commit.refuse_to_overwrite(Path(config.save), after)


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    stages: Sequence[nn.Module],
    optimizer: Optimizer | None,
    state: Mapping[str, Any],
    config: Config,
    mesh: ProcessMesh,
    schedule: LRSchedule | None = None,
) -> Path:
    """Write DIRECTORY/iter_NNNNNNN and point to it. Collective over the mesh; the folder must be shared by all ranks.

    Args:
        state: what else the run needs, as JSON: at least consumed_train_samples and consumed_valid_samples.
        schedule: the learning-rate curve in use; default: that of the flags.
    Returns: the checkpoint's folder.
    Raises: CheckpointError on all ranks if any cannot write; previous checkpoints are as they were.
    """
    kept = None if config.checkpoint.no_save_optim else optimizer
    content = {
        "iteration": iteration,
        "state": dict(state),
        "optimizer_steps": None if kept is None else kept.steps,
        "opt_param_scheduler": None if optimizer is None else settings(config, optimizer.weight_decay, schedule),
        "config": dataclasses.asdict(config),
        "torch": torch.__version__,
    }
    text = json.dumps(content, indent=1) + "\n"
    folder = Path(_on_first(mesh, lambda: str(commit.begin(Path(directory), iteration))))
    try:
        _together(mesh, lambda: _see(folder, mesh))
        tensors = _tensors(stages, {} if kept is None else kept.state(), mesh)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        _together(mesh, lambda: _quietly(save, tensors, storage_writer=writer, no_dist=mesh.device_mesh is None))
        _on_first(mesh, lambda: commit.write_durably(folder / STATE, text))
        mine = _share([path.name for path in folder.iterdir()], mesh)
        parts = mesh.world.gather_json(_together(mesh, lambda: commit.digest(folder, mine)))
        files = {name: entry for part in parts for name, entry in part.items()}
        return Path(_on_first(mesh, lambda: str(commit.commit(folder, iteration, files))))
    except CheckpointError:
        if mesh.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


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
            raise CheckpointError(f"--load {root} holds no checkpoint, and --exit-on-missing-checkpoint is given")
        return iteration

    iteration = _on_first(mesh or ProcessMesh.single(), look)
    if iteration is None:
        if mesh is not None and mesh.world.rank == 0:
            print(f"--load {root} holds no checkpoint; starting from random weights", flush=True)
        return None
    return commit.folder_of(root, iteration)


def load_checkpoint(
    folder: Path, stages: Sequence[nn.Module], optimizer: Optimizer | None, config: Config, mesh: ProcessMesh
) -> LoadedState:
    """Read a checkpoint into the stages and the optimizer, after every file has been checked. Collective.

    Args:
        optimizer: None to load the weights alone, as --finetune and --no-load-optim do.
    Raises: CheckpointError on all ranks: damage, another model, other learning-rate settings. Nothing is changed then.
    """
    flags = config.checkpoint
    with_optimizer = optimizer if not (flags.finetune or flags.no_load_optim) else None
    files = _together(mesh, lambda: commit.read_manifest(folder))
    _together(mesh, lambda: commit.verify(folder, files, _share(files, mesh)))
    content = _together(mesh, lambda: _read_state(folder, with_optimizer, config))
    held = {} if with_optimizer is None else with_optimizer.state()
    tensors = _tensors(stages, held, mesh)
    needed = {key: fact for row in mesh.pp.gather_json(_facts(tensors)) for key, fact in row.items()}
    reader = HuggingFaceStorageReader(str(folder))
    _together(mesh, lambda: _compare(folder, reader, needed, with_optimizer is not None))
    _together(mesh, lambda: _quietly(load, tensors, storage_reader=reader, no_dist=mesh.device_mesh is None))
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
    if with_optimizer is not None and config.train.use_checkpoint_opt_param_scheduler:
        saved = dict(content["opt_param_scheduler"])
        with_optimizer.weight_decay = saved.pop("weight_decay")
        schedule = LRSchedule(**saved)
    state = content["state"]
    if with_optimizer is None:  # as in Megatron-LM: a warm-up for moments that are zero again
        state["skipped_samples"] = state["consumed_train_samples"]
    return LoadedState(
        content["iteration"],
        state["consumed_train_samples"],
        state["consumed_valid_samples"],
        state,
        schedule,
        other_settings(content["config"], config),
    )


def _on_first(mesh: ProcessMesh, work: Callable[[], T]) -> T:
    """`work` on the first rank only; all get its result, a text or number, or its error."""
    first = mesh.world.rank == 0
    return mesh.world.gather_json(_together(mesh, lambda: work() if first else None))[0]  # type: ignore[no-any-return]


def _together(mesh: ProcessMesh, work: Callable[[], T]) -> T:
    """`work` on every rank; an error on any becomes the same CheckpointError on all, so that none waits for another."""
    problems: list[str] = []
    try:
        result = work()
    except CheckpointError as error:
        problems += error.problems
    except OSError as error:
        problems.append(f"{error.filename or 'checkpoint'}: {error.strerror or error}")
    except CheckpointException as error:
        problems += [f"on rank {rank}: {failure}" for rank, (failure, _) in error.failures.items()]
    found = dict.fromkeys(problem for row in mesh.world.gather_json(problems) for problem in row)
    if found:
        raise CheckpointError(tuple(found))
    return result


def _share(names: Iterable[str], mesh: ProcessMesh) -> list[str]:
    """The files that this rank reads for all."""
    return sorted(names)[mesh.world.rank :: mesh.world.size]


def _see(folder: Path, mesh: ProcessMesh) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {mesh.world.rank} does not see {folder}, which rank 0 has made: "
            "--save must be a folder that all machines share"
        )


def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        call(*args, **kwargs)


def _tensors(stages: Sequence[nn.Module], held: dict[str, dict[str, Tensor]], mesh: ProcessMesh) -> dict[str, Tensor]:
    """This rank's tensors by global key, as views in saved shape. A tied weight has its owner's key, so ranks that
    hold the one or the other save one tensor and load the same."""
    params = dict(pair for stage in stages for pair in stage.named_parameters())
    layouts = {name: layout_of(param) for name, param in params.items()}
    own = {name: param.detach() for name, param in params.items() if layouts[name].tied_to not in params}
    kinds = {"": own, **{f"optimizer.{kind}.": views for kind, views in held.items()}}
    return {
        prefix + (layouts[name].tied_to or name): _placed(tensor, layouts[name], mesh)
        for prefix, views in kinds.items()
        for name, tensor in views.items()
    }


def _placed(tensor: Tensor, layout: Layout, mesh: ProcessMesh) -> Tensor:
    local = tensor.view(layout.local(mesh.tp.size))
    if layout.dim is None or mesh.tp.size == 1:
        return local
    assert mesh.device_mesh is not None, "ranks that are threads cannot save"
    return DTensor.from_local(local, mesh.device_mesh["tp"], [Shard(layout.dim)], run_check=False)


def _facts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Full shape and dtype of each tensor, as errors print them."""
    return {key: _fact(list(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


def _fact(shape: list[int], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _compare(folder: Path, reader: HuggingFaceStorageReader, needed: Mapping[str, str], with_optimizer: bool) -> None:
    """Raises: CheckpointError if keys, shapes or dtypes are not what the run needs; DCP would convert or skip some."""
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:  # safetensors and DCP have no common class for a file that is none of theirs
        raise CheckpointError(f"{folder} cannot be read as safetensors: {error}") from None
    there = {
        key: _fact(list(entry.size), entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if with_optimizer and not any(key.startswith("optimizer.") for key in there):
        raise CheckpointError(f"{folder} holds no optimizer state (--no-save-optim); add --no-load-optim")
    if not with_optimizer:
        there = {key: fact for key, fact in there.items() if not key.startswith("optimizer.")}
    wrong = [
        f"{key} is {there[key]}, not {needed[key]}" for key in needed if there.get(key, needed[key]) != needed[key]
    ]
    problems = [
        f"{folder.name} {text}: {_few(keys)}"
        for text, keys in (
            ("lacks parameters that this model has", [key for key in needed if key not in there]),
            ("has parameters that this model lacks", [key for key in there if key not in needed]),
            ("has other shapes or types (--bf16?) than this model", wrong),
        )
        if keys
    ]
    if problems:
        raise CheckpointError(problems)


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _read_state(folder: Path, optimizer: Optimizer | None, config: Config) -> dict[str, Any]:
    try:
        content = json.loads((folder / STATE).read_text())
        model, scheduler = content["config"]["model"], content["opt_param_scheduler"]
        content["iteration"], content["state"]["consumed_train_samples"], content["state"]["consumed_valid_samples"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder / STATE} is not the state of a run") from None
    if problems := resume_problems(model, None if optimizer is None else scheduler, config, folder.name):
        raise CheckpointError(problems)
    return content  # type: ignore[no-any-return]
