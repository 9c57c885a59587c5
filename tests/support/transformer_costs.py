"""Costs of a transformer by the tables of the papers, for tests of what counts them."""

from __future__ import annotations

from typing import Literal

from megapipe.schedule import Costs, ScheduleError


def transformer(
    hidden: int,
    seq: int,
    heads: int,
    *,
    layers: float | tuple[int, ...] = 1,
    micro_batch_size: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    attention: Literal["plain", "flash"] = "plain",
    recompute: Literal["none", "selective", "full"] = "none",
    vocab: int = 0,
) -> Costs:
    """FLOPs and bytes per device of GPT layers in 16 bit.

    Time and M_W: Qi et al. 2023, table 1. Activations under tensor and sequence parallelism, selective (attention
    scores only) and full recompute, output layer: Korthikanti et al. 2022, sec. 4 and 5. FlashAttention keeps no
    scores and makes its backward 2.5 times its forward (Dao 2023, sec. 4.1).

    Args:
        layers: of a device share, or of each stage of the chain.
        tensor: ranks that share each layer, t.
        vocab: adds the output layer to the last stage and the embedding's dropout mask to the first.
    """
    if vocab and not isinstance(layers, tuple):
        raise ScheduleError("transformer(vocab=...) needs layers as a tuple, the layers of each stage.")
    h, s, t, sbh = hidden, seq, tensor, seq * micro_batch_size * hidden
    shared = t if sequence_parallel else 1  # what tensor parallelism alone repeats on every rank
    scores = 0.0 if attention == "flash" or recompute != "none" else 5 * heads * s * sbh / h / t
    f, w = sbh * (24 * h + 4 * s) / t, sbh * 24 * h / t
    again = {"none": 0.0, "selective": sbh * 4 * s / t, "full": f}[recompute]
    b = sbh * (24 * h + (10 if attention == "flash" else 8) * s) / t + again
    mem_b = 2 * sbh / shared if recompute == "full" else sbh * (10 / shared + 24 / t) + scores
    mem_w = sbh * (8 / shared + 24 / t)
    if not isinstance(layers, tuple):
        return Costs(f * layers, b * layers, w * layers, mem_b=mem_b * layers, mem_w=mem_w * layers)
    last = len(layers) - 1
    head, logits = 2 * sbh * vocab / t, 4 * sbh / h * vocab / t

    def stages(layer: float, first: float, output: float) -> tuple[float, ...]:
        ends = [first * (i == 0) + output * (i == last) if vocab else 0.0 for i in range(last + 1)]
        return tuple(layer * n + end for n, end in zip(layers, ends, strict=True))

    return Costs(
        stages(f, 0, head),
        stages(b, 0, head),
        stages(w, 0, head),
        mem_b=stages(mem_b, sbh / shared, 4 * sbh / shared + logits),
        mem_w=stages(mem_w, 0, 2 * sbh / shared + logits),
    )
