"""Continue a text with a trained checkpoint: the quickest way to see what a model has learned.

megapipe generate --load runs/quickstart/checkpoints --prompt "def main("
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megapipe.checkpoint.save_load import find_checkpoint, load_checkpoint
from megapipe.checkpoint.saved_config import require_provider, saved_config
from megapipe.config import CheckpointConfig, Config, DataConfig
from megapipe.config.data import TokenizerType
from megapipe.config.notes import flag
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError, ConfigError
from megapipe.flags.parse import parse
from megapipe.flags.stop import say
from megapipe.models.provider import find_provider, gpt_provider, stage_provider
from megapipe.partition.spans import whole
from megapipe.tensor_parallel.rng import initialize

MOST = 100_000
"""The largest --num-tokens: each token reads the whole window again."""


@dataclass(frozen=True)
class Flags:
    """Continue a text with a trained checkpoint, which has the model's sizes and the tokenizer."""

    load: str | None = None
    """Folder of checkpoints."""
    ckpt_step: int | None = None
    """Iteration to load. Default: the newest."""
    model_provider: str | None = None
    """Function that builds the model, if it is your own: MODULE:NAME or FILE.py:NAME. It is never
    taken from the checkpoint."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer, if it is not the training's."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer, if it has moved since the training."""
    vocab_file: str | None = None
    """vocab.json of a GPT2BPETokenizer, if it has moved."""
    merge_file: str | None = None
    """merges.txt of a GPT2BPETokenizer, if it has moved."""
    prompt: str = ""
    """Text to continue."""
    num_tokens: int = 100
    """The number of tokens to add."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token each time."""
    top_k: int = 50
    """Draw from this many likeliest tokens; 0 for all."""
    seed: int = 1234
    """Seed of the draw."""


def main(argv: Sequence[str]) -> None:
    """Load the checkpoint and print the continued text."""
    flags = parse(Flags, argv)
    if problems := list(_problems(flags)):
        raise ConfigError(problems)
    checkpoint = CheckpointConfig(load=flags.load, ckpt_step=flags.ckpt_step, finetune=True)
    folder = find_checkpoint(checkpoint)
    if folder is None:
        raise CheckpointError(f"--load {flags.load} holds no checkpoint")
    require_provider(folder, flags.model_provider)
    saved = saved_config(folder)
    model_config = saved.model
    tokenizer = build_tokenizer(_tokenizer(saved.data, flags))
    rows = model_config.padded_vocab_size or 0
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, and the embedding of {folder.name} {rows} rows"
        )

    provider = find_provider(flags.model_provider) if flags.model_provider else gpt_provider
    # Depths of multi-token prediction are in the checkpoint, and draw nothing.
    modules = [
        stage_provider(provider)(model_config, x, Axis())
        for x in whole(model_config.layers, model_config.depths)
    ]
    for n, module in enumerate(modules):
        initialize(module, 0, Axis())
        if saved.precision.bf16 or saved.precision.fp16:
            modules[n] = module.to(torch.bfloat16 if saved.precision.bf16 else torch.float16)
    load_checkpoint(
        folder,
        modules,
        None,
        Config(model=model_config, checkpoint=checkpoint),
        ProcessMesh.single(),
    )
    model = modules[0]
    try:
        ids = tokenizer.encode(flags.prompt) or [tokenizer.eod]
    except ValueError as error:  # a NullTokenizer takes numbers
        raise ConfigError(f"--prompt {flags.prompt}: {error}") from None
    new = generate(
        model.float().eval(),
        ids,
        flags,
        tokenizer.vocab_size,
        model_config.max_position_embeddings or 0,
    )
    for sentence in _idle(flags, tokenizer.vocab_size):
        say(sentence)
    print(f"{folder}:\n{tokenizer.decode([*ids, *new])}")


@torch.no_grad()
def generate(
    model: nn.Module, ids: Sequence[int], flags: Flags, vocab_size: int, window: int
) -> Iterator[int]:
    """Draw one token after another; the padding of the vocabulary is never drawn."""
    draw = torch.Generator().manual_seed(flags.seed)
    seen = list(ids)
    for _ in range(flags.num_tokens):
        tokens = torch.tensor([seen[-window:]])
        getattr(model, "set_input_tensor", _nothing)(None)
        output = model(tokens, torch.arange(tokens.shape[1])[None])
        shape = tuple(getattr(output, "shape", ()))
        if shape[:2] != tuple(tokens.shape) or len(shape) != 3 or shape[2] < vocab_size:
            raise ConfigError(
                f"--model-provider {flags.model_provider}: without labels the whole model returns logits [b, s, v], "
                f"here {[*tokens.shape, vocab_size]}; it returned {[*shape] if shape else type(output).__name__}"
            )
        logits = output[0, -1, :vocab_size].float()
        if not logits.isfinite().all():
            raise CheckpointError(
                f"--load {flags.load}: after {len(seen)} tokens the model's logits are not finite, as its weights are "
                "not, or too large. Give another checkpoint, or an earlier one with --ckpt-step."
            )
        if flags.top_k:
            lowest = logits.topk(min(flags.top_k, vocab_size)).values[-1]
            logits = logits.masked_fill(logits < lowest, float("-inf"))
        if flags.temperature == 0:
            token = int(logits.argmax())
        else:
            # In float64, and with the largest logit at 0: no temperature overflows.
            probabilities = ((logits - logits.max()).double() / flags.temperature).softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=draw))
        seen.append(token)
        yield token


def _tokenizer(saved: DataConfig, flags: Flags) -> DataConfig:
    """Return the training's tokenizer with the changes of the flags.

    Raises: ConfigError for a file that this kind of tokenizer does not read.
    """
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    data = replace(
        saved, **{name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    )
    read = {"NullTokenizer": (), "GPT2BPETokenizer": ("vocab_file", "merge_file")}.get(
        data.tokenizer, names[1:2]
    )
    idle = [name for name in names[1:] if getattr(flags, name) is not None and name not in read]
    if idle:
        given = " and ".join(f"--{name.replace('_', '-')} {getattr(flags, name)}" for name in idle)
        kind = (
            "HuggingFaceTokenizer or SentencePieceTokenizer"
            if flags.tokenizer_model
            else "GPT2BPETokenizer"
        )
        raise ConfigError(f"a {data.tokenizer} does not read {given}. Add --tokenizer-type {kind}.")
    return data


def _idle(flags: Flags, vocab_size: int) -> Iterator[str]:
    """Yield a sentence for each given flag that changes nothing next to the other flags."""
    if flags.temperature == 0:
        names, why = ["top_k", "seed"], "--temperature 0 takes the likeliest token each time"
    elif flags.top_k == 1:
        names, why = ["temperature", "seed"], "--top-k 1 takes the likeliest token each time"
    elif flags.top_k >= vocab_size:
        names, why = (
            ["top_k"],
            f"the vocabulary has {vocab_size} tokens, and all of them are drawn from",
        )
    else:
        return
    for name in names:
        value = getattr(flags, name)
        if value != getattr(Flags, name):
            yield f"{flag(name)} {value} is without effect: {why}"


def _nothing(x: None) -> None:
    pass


def _problems(flags: Flags) -> Iterator[str]:
    if flags.load is None:
        yield "--load is missing: --load runs/quickstart/checkpoints"
    if not 1 <= flags.num_tokens <= MOST:
        yield f"--num-tokens {flags.num_tokens} must be at least 1 and at most {MOST}"
    if not 0 <= flags.temperature < math.inf:
        yield f"--temperature {flags.temperature} must be a number of at least 0"
    if flags.top_k < 0:
        yield f"--top-k {flags.top_k} must be at least 0"
