"""Old names of flags, which stand in scripts that people still run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Given = dict[str, list[str]]
"""Flags of ours, each with its values as typed."""
_VALUE = ["VALUE"]
_SELECTIVE = {"--recompute-granularity": ["selective"]}
OLD_NAMES: Mapping[str, Mapping[str, list[str]]] = {
    # Megatron-LM until 2023.
    "--layernorm-epsilon": {"--norm-epsilon": _VALUE},
    "--activations-checkpoint-method": {
        "--recompute-granularity": ["full"],
        "--recompute-method": _VALUE,
    },
    "--use-rotary-position-embeddings": {"--position-embedding-type": ["rope"]},
    # Megatron-LM until 2023.
    "--fp8-hybrid": {"--fp8-format": ["hybrid"]},
    "--fp8-e4m3": {"--fp8-format": ["e4m3"]},
    # The zero-bubble fork, which recomputes norms, GELU and dropout.
    "--recompute-lgd": _SELECTIVE | {"--recompute-modules": ["layernorm", "mlp"]},
    # Megatron-LM's own second names.
    "--moe-layer-recompute": _SELECTIVE | {"--recompute-modules": ["moe"]},
    "--disable-fp8-wgrad": {"--no-fp8-wgrad": []},
    "--enable-cuda-graph": {"--cuda-graph-impl": ["local"]},
    "--external-cuda-graph": {"--cuda-graph-impl": ["transformer_engine"]},
    "--disable-manual-gc-eval": {"--no-manual-gc-eval": []},
    # The fork for vocabulary parallelism.
    "--enable-vocab-parallel": {"--vocab-parallel-pipeline": []},
}
"""Each old name, with the flags and values that it means. VALUE stands for its own value."""
_UNQUOTED = "--step-batch-size-schedule"


def old_names(given: Given, others: list[tuple[str, list[str]]]) -> Iterator[str]:
    """Replace old names of flags in `others` by flags of megapipe in `given`.

    Several values of --step-batch-size-schedule, which has lost its quotes, become one.

    Yields: an error for each old name with a wrong number of values. For some old names also an
        error if the flag that replaces them is given too.
    """
    sizes = given.get(_UNQUOTED, [])
    if len(sizes) > 1:  # Megatron-LM's script for GPT-3 175B loses the quotes
        given[_UNQUOTED] = [" ".join(sizes)]
    for old, means in OLD_NAMES.items():
        typed = [values for other, values in others if other == old]
        if not typed:
            continue
        others[:] = [(other, values) for other, values in others if other != old]
        valued = _VALUE in means.values()
        if len(typed[-1]) != valued:
            takes = "takes one value" if valued else "is a switch and takes no value"
            yield f"{old} {takes}, got {' '.join(typed[-1]) or 'none'}"
            continue
        if old in ("--recompute-lgd", "--moe-layer-recompute") and (also := given.keys() & means):
            both = " and ".join(sorted(also))
            yield f"{old} is {text_of(means)} here, but {both} is given. Leave one out."
        # An old name wins over the flag that it means, as --use-rotary-position-embeddings does in
        # Megatron-LM.
        for name, values in means.items():
            given[name] = typed[-1] if values is _VALUE else values
    rope = given.get("--position-embedding-type", [""])[-1:] == ["rope"]
    if not rope and any(name == "--no-position-embedding" for name, _ in others):
        yield (
            "--no-position-embedding is ignored with --position-embedding-type rope and refused "
            "without, as in Megatron-LM. For rotary positions add --position-embedding-type rope; "
            "for no positions at all use --position-embedding-type none instead."
        )


def text_of(flags: Mapping[str, Sequence[str]]) -> str:
    """Return flags and their values as one line, as they were typed."""
    return " ".join(word for name, values in flags.items() for word in (name, *values))
