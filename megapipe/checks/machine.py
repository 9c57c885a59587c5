"""A laptop's torch, built for CPUs alone, runs the cluster's script: what of the flags names a GPU is done by the CPU.

A torch that could use a GPU and sees none is another matter: there something is broken, and the run is refused.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config

_ON_A_CPU = (
    ("model", "transformer_impl", "transformer_engine", "local", "layers of plain torch, as this torch has no CUDA"),
    ("model", "attention_backend", "fused", "auto", "torch's attention on the CPU, as this torch has no CUDA"),
    ("parallel", "distributed_backend", "nccl", "gloo", "gloo on the CPU, as this torch has no CUDA"),
)


def on_cpus(config: Config) -> Config:
    """The configuration as a build of torch without CUDA can run it; `holding` says what was replaced."""
    for section, field, asked, taken, because in _ON_A_CPU:
        part = getattr(config, section)
        if getattr(part, field) == asked:
            line = (f"--{field.replace('_', '-')} {asked}", because)
            changed = {section: replace(part, **{field: taken}), "noop_flags": (*config.noop_flags, line)}
            config = replace(config, **changed)
    return config
