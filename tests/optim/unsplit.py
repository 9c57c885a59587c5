"""A model that is only parameters, trained on given gradients under any mesh, and unsplit with torch's AdamW."""

import torch
from torch import nn
from whole_step import take_step

from megapipe.config import OptimizerConfig
from megapipe.distributed.layout import Layout, set_layout
from megapipe.optim.optimizer import Optimizer

LAYERS = 11  # so that layer 10 sorts after layer 2
EMBEDDING, HEAD = "embedding.weight", "output_layer.weight"
# name: full shape, split dimension
MODEL = {
    EMBEDDING: ((24, 6), 0),
    **{f"layers.{n}.fc.weight": ((2, 6, 5), 1) for n in range(LAYERS)},
    **{f"layers.{n}.fc.bias": ((6,), None) for n in range(LAYERS)},
    "final.weight": ((6,), None),
    HEAD: ((24, 6), 0),
}
TRAIN = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)


class Bag(nn.Module):
    """A stage with given parameters and no layers."""

    def __init__(self, params):
        super().__init__()
        self._parameters.update(params)


def full(name, salt, dtype):
    shape, _ = MODEL[name]
    seed = 1000 * salt + (list(MODEL).index(name) if salt or name != HEAD else 0)  # the tied head starts as its owner
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def split(x, name, tp):
    """A rank's slice, as the matrix that a layer would hold."""
    dim = MODEL[name][1]
    return x if dim is None else x.chunk(tp.size, dim)[tp.rank].flatten(0, -2).clone()


def stages_of(mesh, dtype=torch.float64, tied=True):
    """The toy's parameters of this rank: layers spread evenly, embedding first, head last."""
    p = mesh.pp.size
    rank_of = {name: int(name.split(".")[1]) * p // LAYERS for name in MODEL if name.startswith("layers")}
    rank_of |= {EMBEDDING: 0, "final.weight": p - 1, HEAD: p - 1}
    params = {}
    for name, (shape, dim) in MODEL.items():
        if rank_of[name] == mesh.pp.rank:
            layout = Layout(shape, dim, tied_to=EMBEDDING if tied and name == HEAD else None)
            params[name] = set_layout(nn.Parameter(split(full(name, 0, dtype), name, mesh.tp)), layout)
    return [Bag(params)]


def train(mesh, steps=4, dtype=torch.float64, settings=TRAIN, tied=True, grad=full):
    """Parameters after some steps on given gradients, and what each step said."""
    stages = stages_of(mesh, dtype, tied)
    optimizer = Optimizer(stages, settings, mesh)
    infos = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for name, param in stages[0].named_parameters():
            part = split(grad(name, step, torch.float64), name, mesh.tp)
            param.main_grad.add_(part.to(param.main_grad.dtype) * (mesh.dp.rank + 1))
        infos.append(take_step(optimizer, 1e-2 * step, grad_scale=0.5, count_zeros=True))
    return {n: p.detach() for n, p in stages[0].named_parameters()}, infos, optimizer.params_norm()


def reference(steps=4, dp=1):
    """The same with torch's optimizer, clipping and tied parameter, unsplit, in float64."""
    params = {name: nn.Parameter(full(name, 0, torch.float64)) for name in MODEL if name != HEAD}
    matrices = [p for p in params.values() if p.ndim > 1]
    vectors = [p for p in params.values() if p.ndim == 1]
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    norms = []
    for step in range(1, steps + 1):
        for name, param in params.items():
            param.grad = full(name, step, torch.float64) * 0.5 * (dp * (dp + 1) // 2)
        params[EMBEDDING].grad += full(HEAD, step, torch.float64) * 0.5 * (dp * (dp + 1) // 2)
        norms.append(float(nn.utils.clip_grad_norm_(params.values(), 0.5)))
        for group in adam.param_groups:
            group["lr"] = 1e-2 * step
        adam.step()
    params[HEAD] = params[EMBEDDING]
    return {n: p.detach() for n, p in params.items()}, norms
