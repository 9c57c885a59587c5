"""The microbatch and the loss of GPT pretraining; a program can give `pretrain` its own instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.data.loader import Batch


def get_batch(data_iterator: Iterator[Batch] | None) -> Batch | None:
    """Return the next microbatch; None without an iterator, as on a stage that reads no data."""
    return None if data_iterator is None else next(data_iterator)


def loss_func(loss_mask: Tensor, token_losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (the sum of token losses, the number of tokens, {name: [sum, number] to report}).

    Args:
        loss_mask: [b, s], the weight of each token's loss.
        token_losses: [b, s], the cross entropy of each token.
    """
    # A sum and a count, not a mean: microbatches and ranks may have different numbers of tokens,
    # and their means would have equal weights.
    loss = (token_losses * loss_mask).sum()
    tokens = loss_mask.sum()
    return loss, tokens, {"lm loss": torch.stack((loss.detach(), tokens))}


def forward_step(data_iterator: Iterator[Batch] | None, model: nn.Module) -> tuple[Tensor, Any]:
    """Run one microbatch through one stage.

    Returns: (output of the stage, loss function of that output), like Megatron-LM's. The function
        is None on a stage that reads no batch.

    Args:
        data_iterator: yields the stage's microbatches; None if it reads none.
        model: the stage.
    """
    batch = get_batch(data_iterator)
    if batch is None:
        return model(), None
    output = model(batch.tokens, batch.position_ids, labels=batch.labels)
    return output, partial(loss_func, batch.loss_mask)
