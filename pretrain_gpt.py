"""Pretrain a GPT: the whole of a user's program. Copy it to bring your own model, data or loss.

torchrun --nproc-per-node 2 pretrain_gpt.py <flags>; see scripts/ for complete command lines, --help for all flags. A
batch and a loss of your own stand here in place of the imported ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.config import Config
from megapipe.errors import UserError
from megapipe.flags.parse import parse, stop
from megapipe.models.provider import gpt_provider
from megapipe.training.forward_step import forward_step as forward_step  # what programs take from here
from megapipe.training.forward_step import loss_func as loss_func
from megapipe.training.pretrain import pretrain


def main(argv: Sequence[str] | None = None) -> None:
    """Train by the flags. A problem that the user can mend ends with one message and status 2."""
    try:
        pretrain(parse(Config, argv), gpt_provider, forward_step)
    except (UserError, KeyboardInterrupt) as error:
        stop(error)


if __name__ == "__main__":
    main()
