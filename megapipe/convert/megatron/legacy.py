"""Megatron-LM's `torch` checkpoints: a file for each tensor- and pipeline-parallel rank, read where they lie.

Layers are numbered anew on each rank and in each virtual stage. The plain optimizer knows parameters by number only: of
each group those that the group has, in the order of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.convert.megatron.flat import Row
from megapipe.convert.megatron.names import common_name, joined
from megapipe.convert.megatron.pickles import read_torch
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LAYER = re.compile(r"(.*decoder\.layers\.)(\d+)\.(.*)")
_FILE, _STATE_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
Chunk = Mapping[str, Tensor]
"""Tensors of one model chunk of a rank in module order, by name in the whole model."""


class LegacyTensors:
    """The ranks' files.

    Raises: CheckpointError if one is missing, or is none of Megatron-LM's GPT.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ranks = {
            (int(match[1]), int(match[2] or 0)): path
            for path in sorted(folder.glob("mp_rank_*"))
            if (match := _RANK.fullmatch(path.name))
        }
        if not ranks:
            raise CheckpointError(f"{folder} has no mp_rank_XX and no mp_rank_XX_YYY (a third number is of experts)")
        self.tp, self.pp = (1 + max(numbers) for numbers in zip(*ranks, strict=True))
        grid = [(t, p) for p in range(self.pp) for t in range(self.tp)]
        if missing := [f"mp_rank_{t:02d}_{p:03d}" for t, p in grid if (t, p) not in ranks]:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}")
        self.paths = {rank: ranks[rank] / _FILE for rank in grid}
        self.contents: dict[tuple[int, int], dict[str, Any]] = {r: read_torch(path) for r, path in self.paths.items()}
        for rank, content in self.contents.items():
            if not isinstance(content, dict) or "args" not in content or not _models(content):
                raise CheckpointError(f"{self.paths[rank]} is not of Megatron-LM: it has no args and no model")
        self.common = self.contents[0, 0]
        self.chunks = {rank: list(self._chunks(*rank)) for rank in sorted(grid)}
        self._parts: dict[tuple[str, str], list[Tensor]] = {}
        for rank, chunks in self.chunks.items():
            kinds = {"": {name: x for chunk in chunks for name, x in chunk.items()}} | self._state(*rank)
            for kind, name, x in ((kind, *pair) for kind, held in kinds.items() for pair in held.items()):
                self._parts.setdefault((kind, name), []).append(x)

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """As of the first tensor-parallel rank: `read` checks them."""
        return {name: tuple(parts[0].shape) for (its, name), parts in self._parts.items() if its == kind}

    def read(self, kind: str, name: str, layout: Layout) -> Tensor:
        """A whole tensor in the shape in which we save it."""
        return joined(self._parts[kind, name], layout)

    def rows(self) -> list[list[Row]] | None:
        """The distributed optimizer's state by tensor-parallel rank; None if there is none."""
        if not (self.paths[0, 0].parent / _STATE_FILE).exists():
            return None
        return [[row for p in range(self.pp) for row in self._rows(t, p)] for t in range(self.tp)]

    def _chunks(self, t: int, p: int) -> Iterator[Chunk]:
        """Virtual stage v of all ranks comes before v + 1 of any."""
        models = {rank: _models(content) for rank, content in self.contents.items() if rank[0] == t}
        for v, model in enumerate(models[t, p]):
            before = [m for w in range(v) for q in range(self.pp) for m in models[t, q][w : w + 1]]
            first = sum(map(_layers, [*before, *(m for q in range(p) for m in models[t, q][v : v + 1])]))
            yield {
                common_name(_renumbered(name, first)): x
                for name, x in model.items()
                if isinstance(x, Tensor) and "_extra_state" not in name
            }

    def _state(self, t: int, p: int) -> dict[str, dict[str, Tensor]]:
        outer = self.contents[t, p].get("optimizer") or {}
        if isinstance(outer, list | tuple):
            outer = outer[0] if len(outer) == 1 else {}
        inner = outer.get("optimizer", outer)
        if "state" not in inner or "param_groups" not in inner:
            return {}
        found: dict[str, dict[str, Tensor]] = {}
        params = [(name, x) for chunk in self.chunks[t, p] for name, x in chunk.items()]
        mains = outer.get("fp32_from_fp16_params") or [[] for _ in inner["param_groups"]]
        for group, main in zip(inner["param_groups"], mains, strict=True):
            apart = any(other.get("is_decoupled_lr") for other in inner["param_groups"])
            its = [
                (name, x)
                for name, x in params
                if (x.ndim > 1) == (group.get("wd_mult", 1.0) != 0)
                and (apart and name in _ENDS) == bool(group.get("is_decoupled_lr"))
            ]
            numbers = group["params"]
            given = [inner["state"].get(n, {}) | ({"master": main[i]} if main else {}) for i, n in enumerate(numbers)]
            states = [{k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim} for state in given]
            if len(its) != len(numbers) or any(
                value.shape != x.shape for (_, x), state in zip(its, states, strict=True) for value in state.values()
            ):
                raise CheckpointError(
                    f"{self.paths[t, p]}: the optimizer's parameters cannot be told apart; convert the weights alone "
                    "with --no-load-optim"
                )
            for (name, _), state in zip(its, states, strict=True):
                for kind, value in state.items():
                    found.setdefault(kind, {})[name] = value
        return found

    def _rows(self, t: int, p: int) -> Iterator[Row]:
        path = self.paths[t, p].parent / _STATE_FILE
        content = read_torch(path)
        if not content.get("buckets_coalesced"):
            raise CheckpointError(
                f"{path} has a form that is not known; convert the weights alone with --no-load-optim"
            )
        for v, chunk in enumerate(self.chunks[t, p]):
            (state,) = content[v].values()

            def read(kind: str, start: int, stop: int, state: Mapping[str, Tensor] = state) -> Tensor:
                return state["param" if kind == "master" else kind][start:stop]

            yield Row(len(state["param"]), read, [list(chunk)])


def _models(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of the virtual stages."""
    if "model" in content:
        return [content["model"]]
    return [content[f"model{v}"] for v in range(sum(bool(re.fullmatch(r"model\d+", key)) for key in content))]


def _layers(model: Mapping[str, Any]) -> int:
    return 1 + max((int(match[2]) for name in model if (match := _LAYER.fullmatch(name))), default=-1)


def _renumbered(name: str, first: int) -> str:
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + first}.{match[3]}"
