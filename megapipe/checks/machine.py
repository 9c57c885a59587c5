"""Let a torch without CUDA run a cluster's script: the CPU replaces whatever names a GPU.

A torch with CUDA that sees no GPU is refused instead, because something is broken there.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config

_NO_CUDA = "as this torch has no CUDA"
_ON_A_CPU = (
    ("transformer_impl", "transformer_engine", "local", f"layers of plain torch, {_NO_CUDA}"),
    ("attention_backend", "fused", "auto", f"torch's attention on the CPU, {_NO_CUDA}"),
    ("distributed_backend", "nccl", "gloo", f"gloo on the CPU, {_NO_CUDA}"),
)


def on_cpus(config: Config) -> Config:
    """Return the configuration with flags for GPUs replaced, for a torch without CUDA.

    `noop_flags` of the result has a line about each flag that was replaced.
    """
    for field, asked, taken, because in _ON_A_CPU:
        # Other values, such as flash, have a kernel on CPUs or are refused by `machine_problems`.
        if config.value(field) == asked:
            line = (f"--{field.replace('_', '-')} {asked}", because)
            config = config.with_fields(**{field: taken})
            # The start prints these lines, so that nobody takes a laptop's numbers for a GPU's.
            config = replace(config, noop_flags=(*config.noop_flags, line))
    return config
