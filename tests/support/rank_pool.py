"""Gloo processes that stay: a test file starts them once and gives them one task after another.

Tasks are found by name in the new processes, so they must lie in a module of this folder, not in a test file.
"""

import gc
import queue

import torch
import torch.distributed as dist
from programs import FORKED

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import device_mesh_of
from megapipe.distributed.mesh import SHARES, build_mesh

WORLD = 4
USUAL = tuple(SHARES.items())


def rank_main(rank, store, commands, results, world):
    gc.freeze()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    meshes = {}

    def mesh_of(pp, dp, tp, cp=1, ep=1, etp=None, shares=USUAL):
        layout = pp, dp, tp, cp, ep, etp, shares
        if layout not in meshes:
            grid = Grids.of(ParallelConfig(tp, pp, cp, ep, etp), pp * dp * cp * tp)
            device_mesh = device_mesh_of(grid, CPU)

            def group(name, sets):
                if name in ("pp", "dp", "cp", "tp"):
                    return device_mesh.get_group(name)
                groups = {ranks: dist.new_group(list(ranks)) for ranks in sets if name != "world"}
                return next((group for ranks, group in groups.items() if rank in ranks), dist.group.WORLD)

            meshes[layout] = build_mesh(grid, rank, CPU, group, device_mesh, shares=dict(shares))
        return meshes[layout]

    for scenario, layouts, args in iter(commands.get, None):
        try:
            results.put((rank, scenario(*(mesh_of(*layout) for layout in layouts), *args)))
        except BaseException as error:
            results.put((rank, error))


class Pool:
    def __init__(self, folder, world=WORLD):
        self.world = world
        self.commands = [FORKED.Queue() for _ in range(world)]
        self.results = FORKED.Queue()
        store = str(folder / "store")
        self.processes = [
            FORKED.Process(target=rank_main, args=(r, store, inbox, self.results, world), daemon=True)
            for r, inbox in enumerate(self.commands)
        ]
        for process in self.processes:
            process.start()

    def run(self, scenario, layouts, *args):
        """Results in rank order. layouts: (pp, dp, tp) or more of `mesh_of` for each mesh that the scenario takes."""
        for inbox in self.commands:
            inbox.put((scenario, layouts, args))
        results = dict(self._result() for _ in range(self.world))
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return [results[rank] for rank in range(self.world)]

    def _result(self):
        while True:
            try:
                return self.results.get(timeout=1)
            except queue.Empty:
                assert all(process.is_alive() for process in self.processes), "a rank died"

    def close(self):
        for process in self.processes:
            process.kill()
