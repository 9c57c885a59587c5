"""Call the functions that a Megatron config asks to be called around a step's passes.

They are no_sync_func, grad_sync_func, param_sync_func and finalize_model_grads_func. With them
Megatron's DistributedDataParallel and finalize_model_grads work under any table. The first three
are a function, or a list of one per chunk where a rank has several chunks. A single no_sync_func
may serve all chunks. finalize_model_grads_func is one function. None, or absent, asks for nothing.
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
    """Check that a Megatron config asks for nothing that megapipe does not implement.

    Raises: ConfigError naming each field of REFUSED that is set, and each number of ranks that is
        not the mesh's. None and 1 say nothing about the number of ranks.
    """
    # A field that is ignored in silence would train another model than the user asked for.
    problems = []
    for name in REFUSED:
        if value := getattr(config, name, None):
            problems.append(
                f"config.{name} is {value}, which megapipe's schedules do not implement"
            )
    sizes = {
        "tensor_model_parallel_size": mesh.tp.size,
        "pipeline_model_parallel_size": mesh.pp.size,
        "context_parallel_size": mesh.cp.size,
    }
    for name, size in sizes.items():
        value = getattr(config, name, None)
        if value not in (None, 1, size):  # 1 is Megatron's default, and says nothing
            problems.append(f"config.{name} is {value}, and the mesh has {size}")
    if problems:
        raise ConfigError(problems)


class GradSync:
    """A switch that keeps a stage's gradients from synchronising until they are complete.

    The synchronisation of a stage is on while its last backward runs. If the config has a
    grad_sync_func, the synchronisation is on only during the call of that function, after the
    stage's last pass. The engine enters `off` for a step and `around_last_backward` for each last
    backward. It calls `on_stage_done` after a stage's last pass, and `finalize` at the end.

    If there is one no_sync_func for all chunks, it switches all of them together. This is safe: the
    synchronisation is on for no longer than one backward, in which no gradient of another chunk
    arrives.

    Args:
        config: the Megatron config.
        chunks: the modules of this rank by stage, in ascending order.
    """

    def __init__(self, config: Any, chunks: Mapping[int, nn.Module]) -> None:
        self.config = config
        self.chunks = chunks
        self._no_sync = _per_chunk(config, "no_sync_func", len(chunks), one_for_all=True)
        self._grad_sync = self._by_stage("grad_sync_func")
        self._param_sync = self._by_stage("param_sync_func")
        self._off: dict[int, AbstractContextManager[Any]] = {}

    def _by_stage(self, name: str) -> dict[int, Callable[..., Any]]:
        found = _per_chunk(self.config, name, len(self.chunks))
        return dict(zip(self.chunks, found, strict=True)) if found else {}

    @contextmanager
    def off(self, training: bool) -> Iterator[None]:
        """Call param_sync_func of every chunk, and turn synchronisation off within this context.

        training: whether the step has backwards; without them nothing is turned off.
        """
        for stage, sync in self._param_sync.items():
            sync(self.chunks[stage].parameters())
        try:
            if training:
                for which in range(len(self._no_sync)):
                    self._turn_off(which)
            yield
        finally:
            # Also after an error, which may come while one of them is on.
            for which in list(self._off):
                self._turn_on(which)

    def _turn_off(self, which: int) -> None:
        # Entered by hand: contexts of several chunks overlap, and do not end in the order of a
        # stack.
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
        # One function for all chunks, or the one of the stage.
        which = 0
        if len(self._no_sync) > 1:
            which = list(self.chunks).index(stage)
        self._turn_on(which)
        yield
        self._turn_off(which)

    def around_last_backward(self, stage: int) -> AbstractContextManager[None]:
        """Return a context for a stage's last backward, in which gradients synchronise."""
        return nullcontext() if self._grad_sync else self._on(stage)

    def on_stage_done(self, stage: int) -> None:
        """Call grad_sync_func of a stage whose gradients are complete."""
        # A table may run W after the last backward, so only here every gradient is there.
        if self._grad_sync:
            with self._on(stage):
                self._grad_sync[stage](self.chunks[stage].parameters())

    def finalize(self, tokens: Tensor | None, pg_collection: Any, force_all_reduce: bool) -> None:
        """Call finalize_model_grads_func([chunks], tokens), if the config has it.

        Args:
            tokens: number of tokens of the losses on this rank, a tensor []; None without
                calculate_per_token_loss.
            pg_collection: the process groups, passed on as a keyword if the function takes it.
            force_all_reduce: passed on in the same way.
        """
        finalize = getattr(self.config, "finalize_model_grads_func", None)
        if finalize is None:
            return
        given = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
        # A function of the user's own may take neither of them.
        names = inspect.signature(finalize).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in names.values()):
            given = {name: value for name, value in given.items() if name in names}
        finalize(list(self.chunks.values()), tokens, **given)


def _per_chunk(
    config: Any, name: str, chunks: int, *, one_for_all: bool = False
) -> Sequence[Callable[..., Any]]:
    """Return the functions in a config's field: () if it is not set, else one for each chunk.

    With `one_for_all` it may be one function for all chunks.

    Args:
        config: the Megatron config.
        name: the name of the field.
        chunks: number of chunks.
        one_for_all: whether a single function is allowed for several chunks.
    Raises: ConfigError for another number of functions.
    """
    found = getattr(config, name, None)
    if found is None:
        return ()
    functions = list(found) if isinstance(found, list | tuple) else [found]
    if len(functions) != chunks and not (one_for_all and len(functions) == 1):
        raise ConfigError(
            f"config.{name} has {len(functions)} functions for {chunks} model chunks; "
            "give one of each per chunk"
        )
    return functions
