"""Saves that are killed before each of their disk operations, in forks of one process without threads."""

import builtins
import hashlib
import json
import os
import pathlib
import shutil
import signal
import traceback

import torch
from torch import nn

from megapipe.checkpoint import commit
from megapipe.checkpoint.save_load import load_checkpoint, save_checkpoint
from megapipe.config import BatchConfig, Config, OptimizerConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.optimizer import Optimizer

CONFIG = Config(batch=BatchConfig(micro_batch_size=1, train_iters=10), optimizer=OptimizerConfig(lr=1e-3))


class Toy:
    """One matrix and its optimizer, all filled with the number of the iteration."""

    def __init__(self, iteration):
        self.stage = nn.Linear(3, 2)
        self.optimizer = Optimizer([self.stage], CONFIG.optimizer, ProcessMesh.single())
        self.optimizer.steps = iteration
        for flat in (self.optimizer.buffers[0].main, *(x for flats in self.optimizer.moments.values() for x in flats)):
            flat.fill_(iteration)

    def save(self, root, background=None):
        state = {"consumed_train_samples": self.optimizer.steps, "consumed_valid_samples": 0}
        args = ([self.stage], self.optimizer, state, CONFIG, ProcessMesh.single())
        return save_checkpoint(root, self.optimizer.steps, *args, background=background)

    def load(self, folder):
        """The iteration, if all that was loaded is of one."""
        loaded = load_checkpoint(folder, [self.stage], self.optimizer, CONFIG, ProcessMesh.single())
        values = {loaded.iteration, loaded.consumed_train_samples, self.optimizer.steps}
        for kind in ({"": dict(self.stage.named_parameters())} | self.optimizer.state()).values():
            values |= {value for tensor in kind.values() for value in tensor.flatten().tolist()}
        assert len(values) == 1, f"a mixture: {values}"
        return loaded.iteration


def load_newest(root):
    iteration = commit.newest(root)
    return None if iteration is None else Toy(0).load(commit.folder_of(root, iteration))


# Everything that a save does to the disk goes through one of these.
POINTS = [
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "mkdir"),
    (os, "open"),
    (os, "close"),
    (builtins, "open"),
    (pathlib.Path, "open"),
    (hashlib, "file_digest"),
    (shutil, "rmtree"),
]


def save_and_die(root, iteration, point, log):
    """Save; before disk operation number `point`, kill this process. Writes the names of all operations to `log`."""
    names = []

    def watched(name, real):
        def call(*args, **kwargs):
            if len(names) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            names.append(name)
            return real(*args, **kwargs)

        return call

    toy = Toy(iteration)
    for owner, name in POINTS:
        setattr(owner, name, watched(name, getattr(owner, name)))
    toy.save(root)
    done = list(names)
    log.write_text(json.dumps(done))


def in_a_fork(work, *args):
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_everywhere(base, start, outcomes):
    """Save iteration 2 after `start` (a checkpoint, or nothing), killed before each of its disk operations in turn."""
    torch.set_num_threads(1)
    origin = base / "origin"
    origin.mkdir()
    if start:
        Toy(start).save(origin)
    shutil.copytree(origin, base / "whole")
    assert in_a_fork(save_and_die, base / "whole", 2, -1, base / "log") == 0
    names = json.loads((base / "log").read_text())
    for point in range(len(names)):
        root = base / str(point)
        shutil.copytree(origin, root)
        assert in_a_fork(save_and_die, root, 2, point, base / "log") == -signal.SIGKILL
        found = load_newest(root)
        commit.clear(root)  # as the next run does when it begins
        Toy(3 if found == 2 else 2).save(root)
        assert load_newest(root) == (3 if found == 2 else 2)
        assert not [name for name in os.listdir(root) if "tmp" in name]
        outcomes.put((names[point], found))
    outcomes.put(None)
