"""A run that Megatron-LM has saved: its arguments, its weights and its optimizer's state.

The state has one of two forms. The plain optimizer saves a tensor for each parameter, and so does
the distributed optimizer where it can be resharded. Otherwise the distributed optimizer saves flat
rows of numbers, see `flat.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megapipe.convert.huggingface.checks import check_names
from megapipe.convert.megatron.args import config_of
from megapipe.convert.megatron.dist import FLAT, DistributedTensors
from megapipe.convert.megatron.flat import FlatState, Row
from megapipe.convert.megatron.legacy import LegacyTensors
from megapipe.convert.megatron.names import orders, stage_layouts
from megapipe.convert.tensors import is_trained, our_layouts
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError
from megapipe.partition.spans import partition
from megapipe.schedule import loop

_WEIGHTS_ALONE = "; convert the weights alone with --no-load-optim"
Read = Callable[[str, str, Layout], Tensor]
"""(kind, name, layout) -> the whole tensor in the shape in which megapipe saves it.

The kind is exp_avg, exp_avg_sq, master, or "" for the model's weights.
"""


class Source(Protocol):
    """The tensors of a checkpoint of either format, by kind and megapipe's name.

    The kind is exp_avg, exp_avg_sq, master (float32 main parameters), or "" for weights. `shapes`
    returns the shapes of all tensors of a kind, which may be one rank's slices. `pieces` returns
    over how many ranks a tensor is split. `read` returns the whole tensor.

    Attributes:
        folder: the checkpoint's folder.
        copies: names of weights that two stages have, such as a tied head, but with unequal values.
        common: data other than tensors, by Megatron-LM's names.
    """

    folder: Path
    copies: Set[str]

    @property
    def common(self) -> Mapping[str, Any]: ...

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]: ...

    def pieces(self, name: str) -> int: ...

    def read(self, kind: str, name: str, layout: Layout) -> Tensor: ...


class SavedRun:
    """A checkpoint of Megatron-LM and the run that its arguments describe.

    Call `check` before the weights are read. `has_state` returns whether the optimizer's state was
    saved. If so, `state` checks it and returns the function that reads it.

    Args:
        folder: the folder of one checkpoint.

    Attributes:
        source: the tensors of the checkpoint.
        common: all other data in the checkpoint: arguments, iteration, and settings of the
            optimizer.
        args: the run's arguments by name.
        config: the configuration that these arguments mean.
        layouts: {name: layout} of each parameter that megapipe saves.
        tied: {name of a tied parameter: name of the parameter that owns the weight}.
        kinds: kinds of optimizer state that an import needs: exp_avg, exp_avg_sq, and for 16-bit
            weights master, the float32 main parameters.

    Raises: CheckpointError if a file is missing or damaged, or an argument not supported.
    """

    def __init__(self, folder: Path) -> None:
        is_distributed = (folder / ".metadata").exists()
        self.source: Source
        self.source = DistributedTensors(folder) if is_distributed else LegacyTensors(folder)
        self.common = self.source.common
        self.args = self.common["args"].fields() if "args" in self.common else {}
        self.config = config_of(self.args, str(folder))
        # Megatron-LM may save a repeated weight on each stage that has it, megapipe saves it once.
        self.layouts: dict[str, Layout] = {}
        self.tied: dict[str, str] = {}
        for name, layout in our_layouts(self.config.model).items():
            if layout.tied_to is None:
                self.layouts[name] = layout
            else:
                self.tied[name] = layout.tied_to
        # Weights in 16 bits have main parameters in float32.
        self.kinds = ["exp_avg", "exp_avg_sq"]
        if self.config.precision.half:
            self.kinds.append("master")

    def check(self, kind: str) -> None:
        """Check names and shapes of all tensors of a kind.

        Args:
            kind: exp_avg, exp_avg_sq, master, or "" for the model's weights.
        Raises: CheckpointError with every tensor that is missing, left over or of another shape.
        """
        needed = {}
        for name, layout in self.layouts.items():
            if not kind or is_trained(name):
                needed[name] = layout.local(Axis(size=self.source.pieces(name)))
        # Copies of a tied weight are there or not, by the number of stages that saved.
        found = self.source.shapes(kind)
        there = {name: shape for name, shape in found.items() if name not in self.tied}
        where = f"{self.source.folder}, {kind}" if kind else str(self.source.folder)
        check_names(where, needed, there, _forms)

    def has_state(self) -> bool:
        """Return whether the optimizer's state was saved, by parameter or as flat vectors."""
        if self.source.shapes("exp_avg"):
            return True
        # Tensors decide; without them, the arguments may say that none was saved.
        named = self.common.get("optimizer") or self._objects()
        return bool(named and not self.args.get("no_save_optim"))

    def state(self) -> tuple[Read, int]:
        """Check the optimizer's state. Return (function that reads it, number of updates so far).

        The function takes three arguments: a kind, a parameter's name in megapipe, and the
        parameter's layout. The kind is "" for the weight, or a kind of state such as exp_avg. The
        function returns the whole tensor in the shape in which megapipe saves it.

        Raises: CheckpointError if the state is damaged, or its form or optimizer not supported.
        """
        source = self.source
        optimizer = self.args.get("optimizer", "adam")
        if optimizer != "adam":
            raise self._refused(f": --optimizer {optimizer} is not supported")
        held = [self.common.get("optimizer")]
        if isinstance(source, LegacyTensors):
            rows = source.rows()
        else:
            assert isinstance(source, DistributedTensors)
            rows = self._rows(source)
            # Data other than tensors, of the distributed optimizer.
            keys = [key for key in self._objects() if key.endswith(".optimizer")]
            held += [source.objects[key].read() for key in keys]
        # The number stands in other places for each optimizer, and may be there many times.
        steps = {int(step) for step in _steps(held)}
        if len(steps) != 1:
            raise self._refused(" does not say after how many steps its optimizer is")
        if rows is None:
            for kind in self.kinds:
                if not source.shapes(kind):
                    kept = ", ".join(self._objects()) or "nothing of it"
                    raise self._refused(f" has no {kind} by parameter, but {kept}")
                self.check(kind)
            return source.read, steps.pop()

        # Places in rows are found now, by comparing all weights: an error comes before any writing.
        flat = FlatState(rows, self.layouts, self.tied)
        flat.find(lambda name: source.read("", name, self.layouts[name]))

        def read(kind: str, name: str, layout: Layout) -> Tensor:
            return (flat if kind else source).read(kind, name, layout)

        return read, steps.pop()

    def _refused(self, reason: str) -> CheckpointError:
        """Return the error for a state that cannot be read. It advises to take weights alone.

        Args:
            reason: the text of the error after the folder's name.
        """
        return CheckpointError(f"{self.source.folder}{reason}{_WEIGHTS_ALONE}")

    def _objects(self) -> list[str]:
        """Return the keys of the optimizer under which objects other than tensors are stored.

        Only the format `torch_dist` has them.
        """
        objects = getattr(self.source, "objects", {})
        return [key for key in objects if key.startswith("optimizer.")]

    def _rows(self, source: DistributedTensors) -> list[list[Row]] | None:
        """Return the distributed optimizer's state if it is stored as flat vectors, else None.

        Args:
            source: the tensors of the checkpoint.
        Returns: for each tensor-parallel rank a list: a Row for each model chunk of all pipeline
            ranks. A Row has the chunk's flat vectors.
        Raises: CheckpointError if the model has experts or a pipeline layout that is not supported.
        """
        if not any(FLAT.match(key) for key in source.sizes):
            return None
        if self.config.model.has_experts:
            raise CheckpointError(
                f"{source.folder}: the distributed optimizer's rows (dp_reshardable) of a model "
                "with experts are not read; save once more with "
                "--dist-ckpt-optim-fully-reshardable, or convert the weights alone with "
                "--no-load-optim"
            )
        args = self.args
        if args.get("pipeline_model_parallel_layout") is not None:
            raise self._refused(": --pipeline-model-parallel-layout is not supported")
        # Saved with rows of its own for each rank, so that the run's sizes are needed.
        tp = int(args["tensor_model_parallel_size"])
        pp = int(args["pipeline_model_parallel_size"])
        chunks = int(args.get("virtual_pipeline_model_parallel_size") or 1)
        # The stages of the run that saved, by the flags that both programs have.
        spans = partition(
            self.config.model.layers,
            loop(pp, chunks),
            account_for_embedding=bool(args.get("account_for_embedding_in_pipeline_split")),
            account_for_loss=bool(args.get("account_for_loss_in_pipeline_split")),
            first=args.get("decoder_first_pipeline_num_layers"),
            last=args.get("decoder_last_pipeline_num_layers"),
        )
        found: list[list[Row]] = []
        for t in range(tp):
            found.append([])
            for stage, span in enumerate(spans):
                # Megatron-LM numbers the groups of data-parallel ranks, and chunks on a rank.
                group = stage % pp * tp + t
                names = [x for x in stage_layouts(self.config.model, span) if is_trained(x)]
                # On the embedding's own stage, a tied head is no parameter of its own.
                if len(spans) == 1:
                    names = [name for name in names if name not in self.tied]
                found[t].append(source.row(group, stage // pp, list(orders(names))))
        return found


def _forms(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes in which Megatron-LM may save a tensor that megapipe saves as `shape`.

    These are `shape` itself, and `shape` with any two neighbouring dimensions merged. Gate and up
    of an MLP, for example, are [2, f, h] in megapipe and [2f, h] in Megatron-LM.
    """
    found = [shape]
    for n in range(len(shape) - 1):
        found.append((*shape[:n], shape[n] * shape[n + 1], *shape[n + 2 :]))
    return found


def _steps(held: Any) -> Iterator[Any]:
    """Yield every value under a key "step" or "common_step", at any depth of dicts and lists.

    Args:
        held: data of optimizers. Each value that is found is a number of steps.
    """
    # torch's Adam counts for each parameter, fused ones for a group, and `torch_dist` has one
    # common_step for all.
    if isinstance(held, dict):
        for key, value in held.items():
            if key in ("step", "common_step") and value is not None:
                yield value
            else:
                yield from _steps(value)
    elif isinstance(held, list | tuple):
        for value in held:
            yield from _steps(value)
