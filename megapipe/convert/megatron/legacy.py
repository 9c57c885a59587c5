"""Megatron-LM's `torch` checkpoints: a file for each tensor-, pipeline- and expert-parallel rank, read where they lie.

Layers are numbered anew on each rank and in each virtual stage. The plain optimizer knows parameters by number only: of
each group those that the group has, in the order of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.convert.megatron.experts import is_experts, of_expert
from megapipe.convert.megatron.flat import Row
from megapipe.convert.megatron.names import common_name, joined
from megapipe.convert.megatron.pickles import read_torch
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"(.*decoder\.layers\.)(\d+)\.(.*)")
_FILE, _STATE_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
Rank = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel."""
Chunk = Mapping[str, Tensor]
"""Tensors of one model chunk of a rank in module order, by name in the whole model."""


class LegacyTensors:
    """The ranks' files.

    Attributes:
        copies: tensors of which a later stage has other numbers than the first that has them.
    Raises: CheckpointError if one is missing, or is none of Megatron-LM's GPT.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = _files(folder)
        self.contents: dict[Rank, dict[str, Any]] = {r: read_torch(path) for r, path in self.paths.items()}
        for rank, content in self.contents.items():
            if not isinstance(content, dict) or "args" not in content or not _models(content):
                raise CheckpointError(f"{self.paths[rank]} is not of Megatron-LM: it has no args and no model")
        self.common = next(iter(self.contents.values()))
        args = self.common["args"].fields()
        if (args.get("expert_model_parallel_size") or 1) > 1 and not any(e for _, _, e in self.paths):
            # one pipeline rank is not in the names: the second number is of experts
            self.paths = {(t, 0, e): path for (t, e, _), path in self.paths.items()}
            self.contents = {(t, 0, e): content for (t, e, _), content in self.contents.items()}
        self.tp, self.pp, self.ep = (1 + max(numbers) for numbers in zip(*self.paths, strict=True))
        self.etp: int = args.get("expert_tensor_parallel_size") or self.tp
        self._complete()
        self.chunks = {rank: list(self._chunks(*rank)) for rank in sorted(self.paths)}
        self.copies: Set[str] = set()
        self._parts: dict[tuple[str, str], list[list[Tensor]]] = {}
        its_experts: dict[tuple[str, str, int], dict[tuple[int, int], Tensor]] = {}
        dense: set[tuple[int, int]] = set()
        for (t, p, e), chunks in self.chunks.items():
            kinds = {"": {name: x for chunk in chunks for name, x in chunk.items()}} | self._state((t, p, e))
            for kind, name, x in ((kind, *pair) for kind, held in kinds.items() for pair in held.items()):
                if (its := of_expert(name)) is not None:
                    its_experts.setdefault((kind, its[0], t if self.etp > 1 else 0), {})[e, its[1]] = x
                elif (t, p) not in dense:
                    held = self._parts.setdefault((kind, name), [])
                    if len(held) == t:
                        held.append([x])
                    elif not kind and not torch.equal(held[t][0], x):  # a later stage's copy
                        self.copies |= {name}
            dense.add((t, p))
        for (kind, name, _), experts in sorted(its_experts.items(), key=lambda pair: pair[0]):
            self._parts.setdefault((kind, name), []).append(
                [x for _, x in sorted(experts.items(), key=lambda one: one[0])]
            )

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Shapes as the first tensor-parallel rank has them: `read` checks the others."""
        first = {name: held[0] for (its, name), held in self._parts.items() if its == kind}
        return {name: (len(x),) * is_experts(name) + tuple(x[0].shape) for name, x in first.items()}

    def pieces(self, name: str) -> int:
        """The number of ranks that share a tensor if it is one of those that ranks share."""
        return self.etp if is_experts(name) else self.tp

    def read(self, kind: str, name: str, layout: Layout) -> Tensor:
        """A whole tensor in the shape in which we save it."""
        parts = self._parts[kind, name]
        return joined([torch.stack(part) if is_experts(name) else part[0] for part in parts], layout)

    def rows(self) -> list[list[Row]] | None:
        """The distributed optimizer's state by tensor-parallel rank; None if there is none."""
        if not (self.paths[min(self.paths)].parent / _STATE_FILE).exists():
            return None
        if any(is_experts(name) for _, name in self._parts):
            raise CheckpointError(
                f"{self.folder}: the distributed optimizer's rows of a model with experts are not read; "
                "convert the weights alone with --no-load-optim"
            )
        return [[row for p in range(self.pp) for row in self._rows(t, p)] for t in range(self.tp)]

    def _complete(self) -> None:
        """Raises: CheckpointError if a rank's file is missing."""
        grid = [(t, p, e) for e in range(self.ep) for p in range(self.pp) for t in range(self.tp)]
        if self.ep == 1 or self.etp == self.tp:
            missing = [rank for rank in grid if rank not in self.paths]
        else:  # experts lie over tensor-parallel ranks too: some pairs of numbers do not occur
            dense, its_experts = {rank[:2] for rank in self.paths}, {rank[1:] for rank in self.paths}
            missing = [rank for rank in grid if rank[:2] not in dense or rank[1:] not in its_experts]
        if missing:
            raise CheckpointError(f"{self.folder} lacks {', '.join(self._folder_of(rank) for rank in missing)}")
        if self.etp not in (1, self.tp):
            raise CheckpointError(
                f"{self.folder}: --expert-tensor-parallel-size {self.etp} is neither 1 nor "
                f"--tensor-model-parallel-size {self.tp}; save once more with --ckpt-format torch_dist"
            )

    def _folder_of(self, rank: Rank) -> str:
        t, p, e = rank
        stage = f"_{p:03d}" if self.pp > 1 else ""
        return f"mp_rank_{t:02d}{stage}" + (f"_{e:03d}" if self.ep > 1 else "")

    def _chunks(self, t: int, p: int, e: int) -> Iterator[Chunk]:
        """Virtual stage v of all ranks comes before v + 1 of any."""
        models = {rank[1]: _models(content) for rank, content in self.contents.items()}  # layers are those of any t, e
        for v, model in enumerate(_models(self.contents[t, p, e])):
            before = [m for w in range(v) for q in range(self.pp) for m in models[q][w : w + 1]]
            first = sum(map(_layers, [*before, *(m for q in range(p) for m in models[q][v : v + 1])]))
            yield {
                common_name(_renumbered(name, first)): x
                for name, x in model.items()
                if isinstance(x, Tensor) and "_extra_state" not in name
            }

    def _state(self, rank: Rank) -> dict[str, dict[str, Tensor]]:
        """The state of the optimizer, or of the two of dense parameters and experts where those are split."""
        outers = self.contents[rank].get("optimizer") or {}
        found: dict[str, dict[str, Tensor]] = {}
        for outer in outers if isinstance(outers, list | tuple) else [outers]:
            inner = outer.get("optimizer", outer)
            if "state" in inner and "param_groups" in inner:
                self._group(rank, outer, inner, found)
        return found

    def _group(
        self, rank: Rank, outer: Mapping[str, Any], inner: Mapping[str, Any], found: dict[str, dict[str, Tensor]]
    ) -> None:
        params = [
            (name, x) for chunk in self.chunks[rank] for name, x in chunk.items() if not name.endswith("expert_bias")
        ]
        mains = outer.get("fp32_from_fp16_params") or [[] for _ in inner["param_groups"]]
        for group, main in zip(inner["param_groups"], mains, strict=True):
            apart = any(other.get("is_decoupled_lr") for other in inner["param_groups"])
            its = [
                (name, x)
                for name, x in params
                if (x.ndim > 1) == (group.get("wd_mult", 1.0) != 0)
                and (apart and name in _ENDS) == bool(group.get("is_decoupled_lr"))
                and (self.ep > 1 and is_experts(name)) == bool(group.get("is_expert_parallel"))
            ]
            numbers = group["params"]
            given = [inner["state"].get(n, {}) | ({"master": main[i]} if main else {}) for i, n in enumerate(numbers)]
            states = [{k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim} for state in given]
            if len(its) != len(numbers) or any(
                value.shape != x.shape for (_, x), state in zip(its, states, strict=True) for value in state.values()
            ):
                raise CheckpointError(
                    f"{self.paths[rank]}: the optimizer's parameters cannot be told apart; convert the weights alone "
                    "with --no-load-optim"
                )
            for (name, _), state in zip(its, states, strict=True):
                for kind, value in state.items():
                    found.setdefault(kind, {})[name] = value

    def _rows(self, t: int, p: int) -> Iterator[Row]:
        path = self.paths[t, p, 0].parent / _STATE_FILE
        content = read_torch(path)
        if not content.get("buckets_coalesced"):
            raise CheckpointError(
                f"{path} has a form that is not known; convert the weights alone with --no-load-optim"
            )
        for v, chunk in enumerate(self.chunks[t, p, 0]):
            (state,) = content[v].values()

            def read(kind: str, start: int, stop: int, state: Mapping[str, Tensor] = state) -> Tensor:
                return state["param" if kind == "master" else kind][start:stop]

            yield Row(len(state["param"]), read, [list(chunk)])


def _files(folder: Path) -> dict[Rank, Path]:
    """Files by the numbers in their folders' names, the first ones where there are fewer."""
    names = [match for path in folder.glob("mp_rank_*") if (match := _RANK.fullmatch(path.name))]
    if not names:
        raise CheckpointError(f"{folder} has no mp_rank_XX, no mp_rank_XX_YYY and no mp_rank_XX_YYY_ZZZ")
    found = {(int(m[1]), int(m[2] or 0), int(m[3] or 0)): folder / m[0] / _FILE for m in names}
    return dict(sorted(found.items()))


def _models(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Models of the virtual stages."""
    if "model" in content:
        return [content["model"]]
    return [content[f"model{v}"] for v in range(sum(bool(re.fullmatch(r"model\d+", key)) for key in content))]


def _layers(model: Mapping[str, Any]) -> int:
    return 1 + max((int(match[2]) for name in model if (match := _LAYER.fullmatch(name))), default=-1)


def _renumbered(name: str, first: int) -> str:
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + first}.{match[3]}"
