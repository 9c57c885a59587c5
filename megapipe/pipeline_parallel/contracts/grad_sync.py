"""Functions that a Megatron config asks to be called around a step's passes, so that its DistributedDataParallel and
finalize_model_grads work with any table: no_sync_func, grad_sync_func, param_sync_func, finalize_model_grads_func.

Each is a function, or where a rank has several chunks a list of one per chunk; None, or absent, asks for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError

REFUSED = (
    "cpu_offloading",
    "defer_embedding_wgrad_compute",
    "delay_wgrad_compute",
    "enable_autocast",
    "fine_grained_activation_offloading",
    "hybrid_context_parallel",
    "moe_paged_stash",
    "mtp_num_layers",
    "num_moe_experts",
    "overlap_moe_expert_parallel_comm",
)
"""Fields of a Megatron config that its schedules act on and ours do not."""


def check_config(config: Any, mesh: ProcessMesh) -> None:
    """Raises: ConfigError naming each field that is on and would do nothing here, or contradicts the mesh."""
    on = {name: value for name in REFUSED if (value := getattr(config, name, None))}
    problems = [f"config.{name} is {value}, which megapipe's schedules do not implement" for name, value in on.items()]
    sizes = {
        "tensor_model_parallel_size": mesh.tp.size,
        "pipeline_model_parallel_size": mesh.pp.size,
        "context_parallel_size": mesh.cp.size,
    }
    for name, size in sizes.items():
        if (value := getattr(config, name, None)) not in (None, 1, size):  # 1 is Megatron's default, and says nothing
            problems.append(f"config.{name} is {value}, and the mesh has {size}")
    if problems:
        raise ConfigError(problems)


class GradSync:
    """Synchronisation of gradients is off but while each stage's last backward runs, for that stage; or, with a
    grad_sync_func, while that is called when the stage is done, and no backward synchronises.

    A no_sync_func that is one for all chunks opens and closes for all. As it is closed for no longer than one backward,
    which is of one chunk, no gradient of another arrives meanwhile.

    Args:
        chunks: the modules of this rank by stage, in ascending order.
    """

    def __init__(self, config: Any, chunks: Mapping[int, nn.Module]) -> None:
        self.config, self.chunks = config, chunks
        self._no_sync = _per_chunk(config, "no_sync_func", len(chunks), one_for_all=True)
        self._of_stage = {stage: n if len(self._no_sync) > 1 else 0 for n, stage in enumerate(chunks)}
        grad_sync = _per_chunk(config, "grad_sync_func", len(chunks))
        self._grad_sync = dict(zip(chunks, grad_sync, strict=True)) if grad_sync else {}
        param_sync = _per_chunk(config, "param_sync_func", len(chunks))
        self._param_sync = dict(zip(chunks, param_sync, strict=True)) if param_sync else {}
        self._off: dict[int, AbstractContextManager[Any]] = {}

    @contextmanager
    def off(self, training: bool) -> Iterator[None]:
        """A step: param_sync_func of every chunk, then no synchronisation but where a stage ends."""
        for stage, sync in self._param_sync.items():
            sync(self.chunks[stage].parameters())
        try:
            for which in range(len(self._no_sync) if training else 0):
                self._turn_off(which)
            yield
        finally:
            for which in list(self._off):
                self._turn_on(which)

    def _turn_off(self, which: int) -> None:
        off = self._no_sync[which]()
        off.__enter__()
        self._off[which] = off

    def _turn_on(self, which: int) -> None:
        self._off.pop(which).__exit__(None, None, None)

    @contextmanager
    def _on(self, stage: int) -> Iterator[None]:
        if not self._no_sync:
            yield
            return
        self._turn_on(which := self._of_stage[stage])
        yield
        self._turn_off(which)

    def around_last_backward(self, stage: int) -> AbstractContextManager[None]:
        """While the stage's last backward runs."""
        return nullcontext() if self._grad_sync else self._on(stage)

    def on_stage_done(self, stage: int) -> None:
        if self._grad_sync:
            with self._on(stage):
                self._grad_sync[stage](self.chunks[stage].parameters())

    def finalize(self, tokens: Tensor | None, pg_collection: Any, force_all_reduce: bool) -> None:
        """finalize_model_grads_func([chunks], tokens), with those of the two keywords that it names."""
        finalize = getattr(self.config, "finalize_model_grads_func", None)
        if finalize is None:
            return
        given = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
        names = inspect.signature(finalize).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
        finalize(list(self.chunks.values()), tokens, **{k: v for k, v in given.items() if takes_all or k in names})


def _per_chunk(config: Any, name: str, chunks: int, *, one_for_all: bool = False) -> Sequence[Callable[..., Any]]:
    found = getattr(config, name, None)
    if found is None:
        return ()
    many = list(found) if isinstance(found, list | tuple) else [found]
    if len(many) != chunks and not (one_for_all and len(many) == 1):
        raise ConfigError(
            f"config.{name} has {len(many)} functions for {chunks} model chunks; give one of each per chunk"
        )
    return many
