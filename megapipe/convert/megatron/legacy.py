"""Read Megatron-LM's `torch` checkpoints: a file for each rank of the model.

Each tensor-, pipeline- and expert-parallel rank has saved its slices of tensors, with layers
numbered from 0 in each model chunk. The plain optimizer knows parameters only by number: the
numbers of a group count its parameters in the order of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from functools import partial
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
FILE = "model_optim_rng.pt"
_STATE_FILE = "distrib_optim.pt"
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters that --decoupled-lr puts in a group of their own."""
Rank = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel rank."""
Chunk = Mapping[str, Tensor]
"""A rank's slices of a model chunk's tensors, in module order, by megapipe's names."""
Kinds = dict[str, dict[str, Tensor]]
"""Tensors of the optimizer by kind (exp_avg, exp_avg_sq, master) and megapipe's name."""


class LegacyTensors:
    """The tensors in the files of all ranks of a checkpoint.

    `shapes` and `read` know whole tensors by megapipe's names. `rows` returns the state of the
    distributed optimizer, which is stored as flat vectors. `pieces` returns over how many ranks a
    tensor is split. A rank is a tuple of its tensor-, pipeline- and expert-parallel ranks.

    Attributes:
        folder: the folder of the ranks' folders.
        paths: {rank: path of its file}.
        contents: {rank: content of its file}.
        common: the first rank's content.
        tp, pp, ep: numbers of tensor-parallel, of pipeline and of expert-parallel ranks.
        etp: number of ranks that share an expert, 1 or `tp`.
        chunks: {rank: its model chunks}. A chunk is {megapipe's name: the rank's slice}.
        copies: names of weights that two stages have, such as a tied head, with unequal values.

    Raises: CheckpointError if a file is missing or is not of Megatron-LM's GPT.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = _files(folder)
        self.contents: dict[Rank, dict[str, Any]] = {}
        for rank, path in self.paths.items():
            content = read_torch(path)
            if not isinstance(content, dict) or "args" not in content or not _models(content):
                raise CheckpointError(f"{path} is not of Megatron-LM: it has no args and no model")
            self.contents[rank] = content
        self.common = next(iter(self.contents.values()))
        args = self.common["args"].fields()

        # Without pipeline parallelism, the second number of a folder's name is the expert rank.
        has_ep = (args.get("expert_model_parallel_size") or 1) > 1
        if has_ep and not any(e for _, _, e in self.paths):
            self.paths = {(t, 0, e): path for (t, e, _), path in self.paths.items()}
            self.contents = {(t, 0, e): content for (t, e, _), content in self.contents.items()}
        self.tp, self.pp, self.ep = (1 + max(numbers) for numbers in zip(*self.paths, strict=True))
        # None, or absent in older versions: experts are split as all other weights.
        self.etp: int = args.get("expert_tensor_parallel_size") or self.tp
        self._check_ranks()

        self.chunks = {rank: list(self._chunks(*rank)) for rank in sorted(self.paths)}
        self.copies: Set[str] = set()
        # By kind and name: {tensor-parallel rank: its slice, or its slice of each expert}.
        self._parts: dict[tuple[str, str], dict[int, list[Tensor]]] = {}
        self._collect()

    def _check_ranks(self) -> None:
        """Raise CheckpointError for a missing rank's file, or an unsupported split of experts."""
        ranks = [(t, p, e) for e in range(self.ep) for p in range(self.pp) for t in range(self.tp)]
        missing = [rank for rank in ranks if rank not in self.paths]
        # Experts that tensor-parallel ranks do not split are spread over these ranks too. Then not
        # every pair of a tensor- and an expert-parallel rank has a file.
        if self.ep > 1 and self.etp != self.tp:
            dense = {rank[:2] for rank in self.paths}
            experts = {rank[1:] for rank in self.paths}
            missing = [r for r in ranks if r[:2] not in dense or r[1:] not in experts]
        if missing:
            names = ", ".join(rank_folder(rank, self.pp, self.ep) for rank in missing)
            raise CheckpointError(f"{self.folder} lacks {names}")
        if self.etp not in (1, self.tp):
            raise CheckpointError(
                f"{self.folder}: --expert-tensor-parallel-size {self.etp} is neither 1 nor "
                f"--tensor-model-parallel-size {self.tp}; save once more with "
                "--ckpt-format torch_dist"
            )

    def _chunks(self, t: int, p: int, e: int) -> Iterator[Chunk]:
        """Yield each model chunk of a rank as a dict from megapipe's name to the rank's slice.

        Layers are numbered as in the whole model.

        Args:
            t, p, e: the tensor-, pipeline- and expert-parallel rank.
        """
        # All ranks of a pipeline rank have the same layers.
        models = {rank[1]: _models(content) for rank, content in self.contents.items()}
        for v, model in enumerate(_models(self.contents[t, p, e])):
            # The first chunks of all pipeline ranks come before the second chunk of any.
            first = 0
            for q, others in models.items():
                first += sum(_layers(other) for w, other in enumerate(others) if (w, q) < (v, p))
            chunk = {}
            for name, x in model.items():
                if isinstance(x, Tensor) and "_extra_state" not in name:
                    chunk[common_name(_renumbered(name, first))] = x
            yield chunk

    def _collect(self) -> None:
        """Gather all ranks' slices by kind and name. `copies` gets weights with unequal copies."""
        experts: dict[tuple[str, str, int], dict[tuple[int, int], Tensor]] = {}
        seen: set[tuple[int, int]] = set()
        for rank in self.chunks:
            t, p, e = rank
            for kind, name, x in self._tensors(rank):
                if (its := of_expert(name)) is not None:
                    whole, number = its
                    piece = t if self.etp > 1 else 0
                    experts.setdefault((kind, whole, piece), {})[e, number] = x
                # Expert-parallel ranks have equal dense tensors: the first one's are read.
                elif (t, p) not in seen:
                    self._add_dense(kind, name, t, x)
            seen.add((t, p))
        # In the order of ranks, and of experts on a rank: their numbers in the whole model.
        for kind, name, piece in sorted(experts):
            parts = experts[kind, name, piece]
            ordered = [parts[place] for place in sorted(parts)]
            self._parts.setdefault((kind, name), {})[piece] = ordered

    def _add_dense(self, kind: str, name: str, t: int, x: Tensor) -> None:
        """Keep a rank's slice of a tensor without experts, or compare it with an earlier stage's.

        If a weight has other values than on the earlier stage, the name is added to `copies`.

        Args:
            kind: exp_avg, exp_avg_sq, master, or "" for a weight.
            name: megapipe's name of the tensor.
            t: the tensor-parallel rank of the slice.
            x: the slice.
        """
        slices = self._parts.setdefault((kind, name), {})
        if t not in slices:
            slices[t] = [x]
        elif not kind and not torch.equal(slices[t][0], x):
            self.copies |= {name}

    def _tensors(self, rank: Rank) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, megapipe's name, slice) for each weight and optimizer state of a rank.

        The kind is exp_avg, exp_avg_sq, master, or "" for weights.
        """
        weights: dict[str, Tensor] = {}
        for chunk in self.chunks[rank]:
            weights |= chunk
        kinds = {"": weights} | self._state(rank)
        for kind, tensors in kinds.items():
            for name, x in tensors.items():
                yield kind, name, x

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the first tensor-parallel rank's slices, by megapipe's name.

        A tensor of experts has all experts of the layer as first dimension.

        Args:
            kind: exp_avg, exp_avg_sq, master, or "" for the model's weights.
        Raises: CheckpointError if a rank lacks a tensor, or has it in another shape.
        """
        found = {}
        for (its_kind, name), slices in self._parts.items():
            if its_kind != kind:
                continue
            shapes = {(len(its), *x.shape) for its in slices.values() for x in its}
            if len(slices) != self.pieces(name) or len(shapes) > 1:
                text = f"{name} is missing on a rank, or has another shape there"
                if kind:
                    text = f"{kind} of {text}; convert the weights alone with --no-load-optim"
                raise CheckpointError(f"{self.folder}: {text}")
            (shape,) = shapes
            found[name] = shape if is_experts(name) else shape[1:]
        return found

    def pieces(self, name: str) -> int:
        """Return over how many ranks a tensor is split, if the layout splits a dimension."""
        return self.etp if is_experts(name) else self.tp

    def read(self, kind: str, name: str, layout: Layout) -> Tensor:
        """Return a whole tensor in the shape in which megapipe saves it.

        Args:
            kind: exp_avg, exp_avg_sq, master, or "" for the model's weights.
            name: megapipe's name of the parameter.
            layout: the parameter's layout, which gives that shape.
        """
        slices = self._parts[kind, name]
        if is_experts(name):
            return joined([torch.stack(experts) for experts in slices.values()], layout)
        return joined([one for (one,) in slices.values()], layout)

    def rows(self) -> list[list[Row]] | None:
        """Return the distributed optimizer's state, stored as flat vectors, or None without it.

        Returns: for each tensor-parallel rank a list: a Row for each model chunk of all pipeline
            ranks.
        Raises: CheckpointError if the model has experts, or if a file has an unknown form.
        """
        first = min(self.paths)
        if not (self.paths[first].parent / _STATE_FILE).exists():
            return None
        if any(is_experts(name) for _, name in self._parts):
            raise CheckpointError(
                f"{self.folder}: the distributed optimizer's rows of a model with experts are not "
                "read; convert the weights alone with --no-load-optim"
            )
        found: list[list[Row]] = []
        for t in range(self.tp):
            found.append([])
            for p in range(self.pp):
                found[t] += self._rows(t, p)
        return found

    def _rows(self, t: int, p: int) -> Iterator[Row]:
        """Yield a Row, the distributed optimizer's flat state, for each model chunk of a rank.

        Raises: CheckpointError if the file of the ranks `t` and `p` has an unknown form.
        """
        path = self.paths[t, p, 0].parent / _STATE_FILE
        content = read_torch(path)
        if not content.get("buckets_coalesced"):
            raise CheckpointError(
                f"{path} has a form that is not known; "
                "convert the weights alone with --no-load-optim"
            )
        for v, chunk in enumerate(self.chunks[t, p, 0]):
            # One item for each type of parameters, and all parameters have one type.
            (state,) = content[v].values()
            yield Row(len(state["param"]), partial(_part, state), [list(chunk)])

    def _state(self, rank: Rank) -> Kinds:
        """Return the plain optimizer's state on a rank: {kind: {megapipe's name: tensor}}.

        The kinds are exp_avg, exp_avg_sq and master. The dict is empty if no state was saved.
        """
        optimizers = self.contents[rank].get("optimizer") or {}
        # With expert parallelism there are two: of dense parameters, and of experts.
        if not isinstance(optimizers, list | tuple):
            optimizers = [optimizers]
        found: Kinds = {}
        for outer in optimizers:
            # 16-bit weights have an optimizer around torch's, which holds their main parameters.
            inner = outer.get("optimizer", outer)
            if "state" in inner and "param_groups" in inner:
                mains = outer.get("fp32_from_fp16_params")
                self._add_state(rank, inner, mains, found)
        return found

    def _add_state(
        self, rank: Rank, optimizer: Mapping[str, Any], mains: Any, found: Kinds
    ) -> None:
        """Add the state of one optimizer of a rank to `found`.

        Args:
            optimizer: the state dict of torch's optimizer, which numbers the parameters.
            mains: the float32 main parameters of each group; None if the weights are float32.
            found: {kind: {megapipe's name: tensor}}, to be filled.
        Raises: CheckpointError if a group has another number of parameters, or other shapes, than
            Megatron-LM's rule for groups gives.
        """
        groups = optimizer["param_groups"]
        problem = (
            f"{self.paths[rank]}: the optimizer's parameters cannot be distinguished; "
            "convert the weights alone with --no-load-optim"
        )
        decoupled = any(group.get("is_decoupled_lr") for group in groups)
        # Numbers and main parameters of a group are in the order of the group's parameters.
        for group, main in zip(groups, mains or [[] for _ in groups], strict=True):
            params = self._params(rank, group, decoupled)
            if len(params) != len(group["params"]):
                raise CheckpointError(problem)
            for i, (name, x) in enumerate(params):
                state = dict(optimizer["state"].get(group["params"][i], {}))
                if main:
                    state["master"] = main[i]
                for kind, value in state.items():
                    # The number of steps is a tensor without dimensions.
                    if not isinstance(value, Tensor) or value.ndim == 0:
                        continue
                    if value.shape != x.shape:
                        raise CheckpointError(problem)
                    found.setdefault(kind, {})[name] = value

    def _params(
        self, rank: Rank, group: Mapping[str, Any], decoupled: bool
    ) -> list[tuple[str, Tensor]]:
        """Return (name, weight) of the parameters in an optimizer's group, in order of number.

        Args:
            rank: the rank that saved the group.
            group: one of torch's param_groups, with Megatron-LM's settings of the group.
            decoupled: whether embedding and head have a group with a learning rate of their own.
        """
        of_decay = group.get("wd_mult", 1.0) != 0
        of_ends = bool(group.get("is_decoupled_lr"))
        of_experts = bool(group.get("is_expert_parallel"))
        found = []
        for chunk in self.chunks[rank]:
            for name, x in chunk.items():
                # The router's bias is no parameter: training moves it without a gradient.
                if name.endswith("expert_bias"):
                    continue
                # Megatron-LM's rule for groups: matrices decay, norms and biases do not.
                decays = x.ndim > 1
                is_end = decoupled and name in _ENDS
                is_expert = self.ep > 1 and is_experts(name)
                if (decays, is_end, is_expert) == (of_decay, of_ends, of_experts):
                    found.append((name, x))
        return found


def rank_folder(rank: Rank, pp: int, ep: int) -> str:
    """Return the name of a rank's folder, such as mp_rank_01_000.

    Args:
        rank: (tensor-parallel rank, pipeline rank, expert-parallel rank).
        pp: number of pipeline ranks. With only one, the name has no pipeline rank.
        ep: number of expert-parallel ranks. With only one, the name has no expert-parallel rank.
    """
    t, p, e = rank
    name = f"mp_rank_{t:02d}"
    if pp > 1:
        name += f"_{p:03d}"
    if ep > 1:
        name += f"_{e:03d}"
    return name


def _part(state: Mapping[str, Tensor], kind: str, start: int, stop: int) -> Tensor:
    """Return elements start to stop - 1 of the flat vector of a kind, such as exp_avg or master."""
    key = "param" if kind == "master" else kind
    return state[key][start:stop]


def _files(folder: Path) -> dict[Rank, Path]:
    """Return {(tensor-, pipeline-, expert-parallel rank): path of the rank's file}.

    The ranks are the numbers in the names of folders. A number that a name lacks is 0.

    Raises: CheckpointError if no folder has the name of a rank.
    """
    found = {}
    for path in folder.glob("mp_rank_*"):
        if match := _RANK.fullmatch(path.name):
            t, p, e = (int(number or 0) for number in match.groups())
            found[t, p, e] = path / FILE
    if not found:
        names = "no mp_rank_XX, no mp_rank_XX_YYY and no mp_rank_XX_YYY_ZZZ"
        raise CheckpointError(f"{folder} has {names}")
    return dict(sorted(found.items()))


def _models(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state dict of each model chunk in `content`, a rank's file; [] without a model."""
    if "model" in content:
        return [content["model"]]
    count = sum(re.fullmatch(r"model\d+", key) is not None for key in content)
    return [content[f"model{v}"] for v in range(count)]


def _layers(model: Mapping[str, Any]) -> int:
    """Return the number of layers in the state dict of a model chunk."""
    matches = map(_LAYER.fullmatch, model)
    return 1 + max((int(match[2]) for match in matches if match), default=-1)


def _renumbered(name: str, first: int) -> str:
    """Return a parameter's name with `first` added to its layer's number; other names stay."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{int(match[2]) + first}.{match[3]}"
