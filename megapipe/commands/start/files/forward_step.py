"""A microbatch and its loss, as GPT pretraining has them: what a program of its own gives to `pretrain` instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.data.loader import Batch


def get_batch(data_iterator: Iterator[Batch] | None) -> Batch | None:
    """The next microbatch; None on stages that hold neither the embedding nor the loss and so read no data."""
    return None if data_iterator is None else next(data_iterator)


def loss_func(loss_mask: Tensor, token_losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Token losses [b, s] -> (their sum, number of tokens, what to report)."""
    loss, tokens = (token_losses * loss_mask).sum(), loss_mask.sum()
    return loss, tokens, {"lm loss": torch.stack((loss.detach(), tokens))}


def forward_step(data_iterator: Iterator[Batch] | None, model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch through one stage."""
    batch = get_batch(data_iterator)
    if batch is None:
        return model(), None
    output = model(batch.tokens, batch.position_ids, labels=batch.labels)
    return output, partial(loss_func, batch.loss_mask)
