"""The table of a run whose activations are moved out of the way, to the host or by computing them again: as flags ask,
as a file says, or because --memory-limit-gib leaves no room for all."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.schedule import Costs, Schedule

LIMIT = "--memory-limit-gib"
FLOPS_PER_BYTE = 8000.0
"""FLOPs of a device while a byte goes to the host or back, where --offload-time does not say: 400 TFLOP/s, 50 GB/s."""


class Copies(NamedTuple):
    """Copies that flags ask for.

    Attributes:
        flag: the one that asks, or leaves no room.
        share: of each microbatch's bytes that may go, and of keys and values of slices all. time: of a copy each way
            over a forward and an input gradient with its weights'; None: by bytes. chunks: only the first so many
            stages of a rank.
        input: bytes that a forward begins from, which stay where it runs twice. modules: of --offload-modules, whose
            part of the bytes goes.
    """

    flag: str
    share: float
    time: float | None
    chunks: int | None
    input: float
    modules: tuple[str, ...] = ()

    @classmethod
    def asked(cls, config: Config) -> Self | None:
        """Return the copies that flags ask for; None if none does."""
        par = config.parallel
        if not (par.fine_grained_activation_offloading or par.cpu_offload):
            return None
        flag = "--cpu-offload" if par.cpu_offload else "--fine-grained-activation-offloading"
        return cls.of(config, flag)

    @classmethod
    def of(cls, config: Config, flag: str) -> Self:
        """The copies of a run, for that reason."""
        par, model = config.parallel, config.model
        shared = par.context_parallel_size * (par.tensor_model_parallel_size if model.sequence_parallel else 1)
        tokens = (config.batch.seq_length or 0) * (config.batch.micro_batch_size or 1) / shared
        given = par.activation_offload_fraction, par.offload_time, par.offload_chunk_num
        input_bytes = tokens * model.hidden * config.precision.element_bytes
        return cls(flag, *given, input_bytes, par.offload_modules)

    def priced(self, costs: Costs, byte: float) -> Costs:
        """The costs of stages, by stage as the plan counts them, with those of copies, of so much for a byte."""
        held = costs.mem_b if isinstance(costs.mem_b, tuple) else (costs.mem_b,)
        keys = costs.mem_k if isinstance(costs.mem_k, tuple) else (costs.mem_k,) * len(held)  # which go whole
        goes = costs.mem_o if self.modules and isinstance(costs.mem_o, tuple) else held
        copied = tuple(self.share * max(0.0, x - k) + k for x, k in zip(goes, keys, strict=True))
        took = tuple(byte * x for x in copied)
        if self.time is not None:
            parts = (x if isinstance(x, tuple) else (x,) * len(held) for x in (costs.f, costs.b, costs.w))
            took = tuple(self.time * sum(x) for x in zip(*parts, strict=True))
        elif costs.o or costs.l:
            return replace(costs, mem_o=copied, mem_r=(self.input,) * len(held))
        return replace(costs, o=took, l=took, mem_o=copied, mem_r=(self.input,) * len(held))

    def check(self, schedule: Schedule, costs: Costs) -> None:
        """Raises: ConfigError if --offload-modules names nothing that can go."""
        names = " ".join(self.modules)
        if isinstance(costs.mem_o, tuple) and not any(costs.mem_o) and self.modules:
            raise ConfigError(
                f"--offload-modules {names}: nothing of what a forward keeps is theirs, so "
                f"{self.flag} has nothing to copy. Name others, or leave --offload-modules out, so that all may go."
            )
        if schedule.cuts and self.modules and "core_attn" not in self.modules:
            raise ConfigError(
                f"--offload-modules {names}: keys and values of slices go with every copy, and are "
                "core_attn's. Add core_attn, or leave the slices out."
            )
