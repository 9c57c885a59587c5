"""Pretrain a GPT: the whole of a user's program. Copy it to bring your own model, data or loss.

torchrun --nproc-per-node 2 pretrain_gpt.py <flags>; see scripts/ for complete command lines, --help for all flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config import Config
from megapipe.data.loader import Batch
from megapipe.errors import UserError
from megapipe.flags.parse import parse, stop
from megapipe.models.provider import gpt_provider
from megapipe.training.pretrain import pretrain


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


def main(argv: Sequence[str] | None = None) -> None:
    """Flags in, trained model out; a problem the user can mend ends in one message and exit status 2."""
    try:
        pretrain(parse(Config, argv), gpt_provider, forward_step)
    except (UserError, KeyboardInterrupt) as error:
        stop(error)


if __name__ == "__main__":
    main()
