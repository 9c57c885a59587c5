"""A model that is only parameters, in training under any mesh: what checkpoint tests save and load."""

import os
import resource
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor
from whole_step import take_step

from megapipe.checkpoint import commit, shards
from megapipe.checkpoint.background import Background
from megapipe.checkpoint.save_load import find_checkpoint, load_checkpoint, save_checkpoint
from megapipe.config import BatchConfig, CheckpointConfig, Config, ModelConfig, OptimizerConfig
from megapipe.distributed.layout import Layout, set_layout
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.sharded.saved import SavedShard

LAYERS = 11
EMBEDDING, HEAD = "embedding.weight", "output_layer.weight"
# name: full shape, split dimension, first (0), last (1) or by layer
SHAPES = {
    EMBEDDING: ((24, 6), 0),
    **{f"layers.{n}.fc.weight": ((2, 8, 5), 1) for n in range(LAYERS)},
    **{f"layers.{n}.proj.weight": ((5, 8), 1) for n in range(LAYERS)},
    **{f"layers.{n}.fc.bias": ((6,), None) for n in range(LAYERS)},
    **{f"layers.{n}.experts.weight": ((4, 2, 8, 3), 2) for n in range(0, LAYERS - 1, 5)},
    "final.weight": ((6,), None),
    HEAD: ((24, 6), 0),
}
# Without clipping every element is updated by itself: layouts agree to the bit.
CONFIG = Config(
    model=ModelConfig(num_layers=LAYERS, hidden_size=6, num_attention_heads=2),
    batch=BatchConfig(micro_batch_size=1, train_iters=100),
    optimizer=OptimizerConfig(lr=1e-2, clip_grad=0),
)
SINGLE = ProcessMesh.single()


class Toy(nn.Module):
    """This rank's parameters of a model that is only parameters; gradients are given."""

    def __init__(self, mesh, dtype=torch.float32, layers=LAYERS):
        super().__init__()
        last = mesh.pp.size - 1
        for name in SHAPES:
            layer = int(name.split(".")[1]) if name.startswith("layers") else None
            rank = layer * mesh.pp.size // LAYERS if layer is not None else 0 if name == EMBEDDING else last
            if rank == mesh.pp.rank and (layer or 0) < layers:
                weight = nn.Parameter(split(full(EMBEDDING if name == HEAD else name, 0), name, mesh).to(dtype))
                self._parameters[name] = set_layout(weight, layout(name))


def full(name, salt):
    seed = 100 * salt + list(SHAPES).index(name)
    return torch.randn(SHAPES[name][0], generator=torch.Generator().manual_seed(seed))


def layout(name):
    return Layout(*SHAPES[name], EMBEDDING if name == HEAD else None, experts="experts" in name)


def split(x, name, mesh):
    """A rank's slice, as the matrix that a layer would hold, or the stack of its experts'."""
    lies = layout(name)
    return x if lies.dim is None else lies.mine(x, mesh.tp).flatten(int(lies.experts), -2).clone()


class Run:
    """A toy in training."""

    def __init__(self, mesh, dtype=torch.float32, config=CONFIG, layers=LAYERS, shares="nothing"):
        self.mesh, self.config = mesh, config
        self.stages = [Toy(mesh, dtype, layers)]
        split = {
            "distributed": shares != "nothing",
            **dict.fromkeys(("shards_grads", "shards_weights"), shares == "all"),
        }
        self.optimizer = Optimizer(self.stages, config.optimizer, mesh, **split)

    def train(self, first, last):
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.optimizer.reduction().begin(0)
            for name, param in self.stages[0].named_parameters():
                sums = self.mesh.dp.size / self.mesh.edp.size if layout(name).experts else 1
                param.main_grad.add_(split(full(name, step), name, self.mesh) * sums)
            take_step(self.optimizer, 1e-2, grad_scale=1 / self.mesh.dp.size)
        return self

    def save(self, root, iteration, **kwargs):
        state = {"consumed_train_samples": 8 * iteration, "consumed_valid_samples": iteration, "note": "kept"}
        return save_checkpoint(root, iteration, self.stages, self.optimizer, state, self.config, self.mesh, **kwargs)

    def load(self, folder, **checkpoint):
        config = replace(self.config, checkpoint=CheckpointConfig(**checkpoint))
        return load_checkpoint(folder, self.stages, self.optimizer, config, self.mesh)

    def differing(self, whole):
        """Names of tensors that are not the slices of an unsplit run's."""
        wrong = [] if self.optimizer.steps == whole.optimizer.steps else ["steps"]
        mine, theirs = ({"": dict(r.stages[0].named_parameters()), **r.optimizer.state()} for r in (self, whole))
        with self.optimizer.gathers.whole():
            for kind, name, tensor in ((kind, *named) for kind, tensors in mine.items() for named in tensors.items()):
                # A head on its own rank has state; beside the embedding the embedding's is its state.
                want = theirs[kind][name if name in theirs[kind] else EMBEDDING].detach()
                if not torch.equal(tensor, split(want.view(SHAPES[name][0]), name, self.mesh)):
                    wrong.append(f"{kind} {name}")
        return wrong


def problems(work):
    with pytest.raises(CheckpointError) as caught:
        work()
    return caught.value.problems


# What the ranks of a pool are asked to do.


def reshard(before, after, root, dtype, shares):
    folder = Run(before, dtype, shares=shares[0]).train(1, 2).save(root, 2)
    run = Run(after, dtype, shares=shares[1])
    loaded = run.load(folder)
    wrong = run.train(3, 4).differing(Run(SINGLE, dtype).train(1, 4))
    return wrong, (loaded.iteration, loaded.consumed_train_samples, loaded.consumed_valid_samples)


def save(mesh, root):
    return Run(mesh).train(1, 2).save(root, 2)


def save_behind(mesh, root):
    """The second of two saves, which a process beside each rank writes."""
    background, run = Background(mesh), Run(mesh, shares="all").train(1, 2)
    assert run.save(root, 2, background=background) is not None
    assert run.train(3, 4).save(root, 4, background=background) is None
    run.train(5, 6)
    finished = background.finish()
    background.close()
    return finished


def load(mesh, folder):
    run = Run(mesh)
    run.load(folder)
    return run.train(3, 4).differing(Run(SINGLE).train(1, 4))


def reshard_on_a_gpu(before, after, root):
    """Reshard where meshes are of a CUDA device: what lies on the host is copied, as DTensor.from_local does."""
    placed, from_local = shards._placed, DTensor.from_local

    def on_cuda(tensor, layout, mesh, made):
        return placed(tensor, layout, replace(mesh, device=torch.device("cuda")), made)

    def copying(local, mesh, *args, **kwargs):
        on_host = copy(mesh)
        on_host._device_type = "cpu"
        return from_local(local if mesh.device_type == "cpu" else local.clone(), on_host, *args, **kwargs)

    shards._placed, DTensor.from_local = on_cuda, copying
    try:
        return reshard(before, after, root, torch.bfloat16, ("optimizer", "optimizer"))
    finally:
        shards._placed, DTensor.from_local = placed, from_local


def failing_save(mesh, root):
    run, real = Run(mesh), commit.digest

    def no_room(folder, names):
        raise OSError(28, "No space left on device", "a shard")

    commit.digest = no_room if mesh.world.rank == 2 else real
    try:
        return problems(lambda: run.save(root, 1))
    finally:
        commit.digest = real


def unlearned_save(mesh, root):
    """The first save of a run that is to save beside its steps, where a rank gets no memory for that."""
    background = Background(mesh)

    def no_memory(folder, names):
        raise OSError(12, "Cannot allocate memory", "rank 2's memory")

    if mesh.world.rank == 2:
        background.learn = no_memory
    try:
        return problems(lambda: Run(mesh).save(root, 1, background=background))
    finally:
        background.close()


NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"
FAILURES = {
    "memory": (shards, "allocate", RuntimeError(NO_MEMORY), f"no memory for its tensors: {NO_MEMORY}"),
    "room": (shards, "room_for", MemoryError(), "no memory for its tensors: MemoryError"),
    "copy": (SavedShard, "copy", RuntimeError("no such bucket"), "no such bucket"),
    "file": (FileSystemWriter, "_write_data", OSError(28, "No space"), "[Errno 28] No space"),
    "writer": (Background, "_start_writer", OSError(11, "no process"), "no process"),
    "own memory": (Background, "_copy", MemoryError(), "no memory for its tensors: MemoryError"),
    "read": (shards, "load", OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
    "share": (SavedShard, "allocate", MemoryError(), "no memory for its tensors: MemoryError"),
}
"""What may fail on a rank: the owner and the name of a function, its error, and the words that say so."""


def told(folder, what):
    """All problems of a save or load in which `what` fails on ranks 1 and 2."""
    words = FAILURES[what][-1]
    # The process that writes is the system's to refuse, as a file is.
    return [f"{folder}: {words}"] if what == "writer" else [f"{folder}, on rank {n}: {words}" for n in (1, 2)]


@contextmanager
def failing(mesh, what):
    owner, name, error, _ = FAILURES[what]
    real = getattr(owner, name)

    def fails(*args, **kwargs):
        raise error

    if mesh.world.rank in (1, 2):
        setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, real)


def failing_stream(mesh, root, what, waits):
    """A save, one that fails on two ranks, and one after it. Returns problems, names after them, and iterations."""
    background, run = None if waits else Background(mesh), Run(mesh, shares="all")
    try:
        run.train(1, 2).save(root, 2, background=background)
        if what == "writer" and background:
            background._end_writer()
        with failing(mesh, what):
            found = problems(lambda: run.train(3, 4).save(root, 4, background=background))
        mesh.world.barrier()  # the first rank removes what the others had begun
        left = sorted(path.name for path in root.iterdir())
        run.train(5, 6).save(root, 6, background=background)
        if background:
            background.finish()
    finally:
        if background:
            background.close()
    return found, left, commit.iterations_in(root)


def full_disk(mesh, root, shares, waits):
    """A save, one in which rank 2's files may have 100 bytes, and one after it. Returns problems and iterations."""
    background, run = None if waits else Background(mesh), Run(mesh, shares=shares)
    run.train(1, 2).save(root, 2, background=background)
    pid = os.getpid() if waits else background._writer.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    if mesh.world.rank == 2:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        if waits:
            found = problems(lambda: run.train(3, 4).save(root, 4))
        else:
            assert run.train(3, 4).save(root, 4, background=background) is None
            run.train(5, 5)
            found = problems(background.finish)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    mesh.world.barrier()  # the first rank removes what the others had begun
    left = sorted(path.name for path in root.iterdir())
    run.train(5 if waits else 6, 6).save(root, 6, background=background)
    if background:
        background.finish()
        background.close()
    again = Run(mesh, shares=shares)
    again.load(root / "iter_0000006")
    return found, left, again.differing(Run(SINGLE).train(1, 6))


def failing_read(mesh, folder, what):
    run = Run(mesh, shares="all")
    with failing(mesh, what):
        found = problems(lambda: run.load(folder))
    run.load(folder)
    return found, run.differing(Run(SINGLE).train(1, 2))


def damaged_load(mesh, folder):
    return problems(lambda: Run(mesh).load(folder))


def find(mesh, config):
    return find_checkpoint(config, mesh)
