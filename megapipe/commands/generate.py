"""Continue a text with a trained checkpoint: the quickest way to see what a model has learned.

megapipe generate --load runs/quickstart/checkpoints --prompt "def main("
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

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
    """Load the checkpoint and print the continued text.

    Raises: ConfigError for wrong flags, CheckpointError for a checkpoint that cannot continue a
        text.
    """
    flags = parse(Flags, argv)
    if problems := list(_problems(flags)):
        raise ConfigError(problems)
    checkpoint = CheckpointConfig(load=flags.load, ckpt_step=flags.ckpt_step, finetune=True)
    folder = find_checkpoint(checkpoint)
    if folder is None:
        raise CheckpointError(f"--load {flags.load} holds no checkpoint")
    require_provider(folder, flags.model_provider)
    saved = saved_config(folder)
    tokenizer = build_tokenizer(_tokenizer(saved.data, flags))
    rows = saved.model.padded_vocab_size or 0
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, and the embedding of {folder.name} "
            f"{rows} rows"
        )
    # The whole model on one rank. Depths of multi-token prediction are in the checkpoint, so they
    # are built and loaded; nothing is drawn from them.
    modules = _modules(saved, flags.model_provider)
    config = Config(model=saved.model, checkpoint=checkpoint)
    load_checkpoint(folder, modules, None, config, ProcessMesh.single())
    model = modules[0].float().eval()
    try:
        # A text begins after the end of another document.
        ids = tokenizer.encode(flags.prompt) or [tokenizer.eod]
    # A NullTokenizer takes numbers, not words.
    except ValueError as error:
        raise ConfigError(f"--prompt {flags.prompt}: {error}") from None
    window = saved.model.max_position_embeddings or 0
    new = generate(model, ids, flags, tokenizer.vocab_size, window)
    for sentence in _idle(flags, tokenizer.vocab_size):
        say(sentence)
    print(f"{folder}:\n{tokenizer.decode([*ids, *new])}")


def _modules(saved: Config, name: str | None) -> list[nn.Module]:
    """Return the modules of the whole model before their weights are loaded.

    Args:
        saved: the configuration of the training.
        name: the value of --model-provider; None for the built-in GPT.
    Returns: the model, then each module of multi-token prediction.
    """
    provider = find_provider(name) if name else gpt_provider
    build = stage_provider(provider)
    modules = []
    for span in whole(saved.model.layers, saved.model.depths):
        module = build(saved.model, span, Axis())
        initialize(module, 0, Axis())
        # The weights keep the type that they had in the training.
        if saved.precision.bf16:
            module = module.to(torch.bfloat16)
        elif saved.precision.fp16:
            module = module.to(torch.float16)
        modules.append(module)
    return modules


@torch.no_grad()
def generate(
    model: nn.Module, ids: Sequence[int], flags: Flags, vocab_size: int, window: int
) -> Iterator[int]:
    """Yield --num-tokens new tokens, each drawn from the model's prediction for the text so far.

    Args:
        model: returns logits [b, s, v] without labels.
        ids: the tokens of the prompt, at least one.
        vocab_size: the number of ids of the tokenizer. Logits of the padding are never drawn.
        window: the number of last tokens that the model reads; 0 for all.
    Raises: ConfigError if the model returns no logits, CheckpointError if they are not finite.
    """
    draw = torch.Generator().manual_seed(flags.seed)
    seen = list(ids)
    for _ in range(flags.num_tokens):
        tokens = torch.tensor([seen[-window:]])
        logits = _next_logits(model, tokens, vocab_size, flags)
        if not logits.isfinite().all():
            raise CheckpointError(
                f"--load {flags.load}: after {len(seen)} tokens the model's logits are not finite, "
                "as its weights are not, or too large. Give another checkpoint, or an earlier one "
                "with --ckpt-step."
            )
        if flags.top_k:
            lowest = logits.topk(min(flags.top_k, vocab_size)).values[-1]
            logits = logits.masked_fill(logits < lowest, float("-inf"))
        if flags.temperature == 0:
            token = int(logits.argmax())
        else:
            # In float64, and with the largest logit at 0: no temperature overflows.
            scores = (logits - logits.max()).double() / flags.temperature
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=draw))
        seen.append(token)
        yield token


def _next_logits(model: nn.Module, tokens: Tensor, vocab_size: int, flags: Flags) -> Tensor:
    """Return the logits [vocab_size] in float32 for the token after `tokens` [1, s].

    Raises: ConfigError if the model returns anything but logits of at least `vocab_size` columns.
    """
    # A stage of the pipeline may wait for its input. The first stage has none.
    set_input = getattr(model, "set_input_tensor", None)
    if set_input is not None:
        set_input(None)
    output = model(tokens, torch.arange(tokens.shape[1])[None])
    # A model of the user's own may return no tensor at all.
    shape = tuple(getattr(output, "shape", ()))
    if shape[:2] != tuple(tokens.shape) or len(shape) != 3 or shape[2] < vocab_size:
        returned = str([*shape]) if shape else type(output).__name__
        raise ConfigError(
            f"--model-provider {flags.model_provider}: without labels the whole model returns "
            f"logits [b, s, v], here {[*tokens.shape, vocab_size]}; it returned {returned}"
        )
    last: Tensor = output[0, -1, :vocab_size]
    return last.float()


def _tokenizer(saved: DataConfig, flags: Flags) -> DataConfig:
    """Return the settings of the training's tokenizer, changed by the flags.

    Args:
        saved: the settings in the checkpoint.
    Raises: ConfigError for a file that this kind of tokenizer does not read.
    """
    files = ("tokenizer_model", "vocab_file", "merge_file")
    given = {}
    for name in ("tokenizer_type", *files):
        if (value := getattr(flags, name)) is not None:
            given[name] = value
    data = replace(saved, **given)
    # A kind that is not listed reads a model.
    read = {
        "NullTokenizer": (),
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    }.get(data.tokenizer, ("tokenizer_model",))
    idle = [name for name in files if name in given and name not in read]
    if idle:
        words = " and ".join(f"{flag(name)} {given[name]}" for name in idle)
        kind = "GPT2BPETokenizer"
        if flags.tokenizer_model:
            kind = "HuggingFaceTokenizer or SentencePieceTokenizer"
        raise ConfigError(f"a {data.tokenizer} does not read {words}. Add --tokenizer-type {kind}.")
    return data


def _idle(flags: Flags, vocab_size: int) -> Iterator[str]:
    """Yield a sentence for each given flag that changes nothing next to the other flags.

    Args:
        vocab_size: the number of ids of the tokenizer.
    """
    if flags.temperature == 0:
        names = ["top_k", "seed"]
        why = "--temperature 0 takes the likeliest token each time"
    elif flags.top_k == 1:
        names = ["temperature", "seed"]
        why = "--top-k 1 takes the likeliest token each time"
    elif flags.top_k >= vocab_size:
        names = ["top_k"]
        why = f"the vocabulary has {vocab_size} tokens, and all of them are drawn from"
    else:
        return
    for name in names:
        value = getattr(flags, name)
        # A value that equals the default counts as not given.
        if value != getattr(Flags, name):
            yield f"{flag(name)} {value} is without effect: {why}"


def _problems(flags: Flags) -> Iterator[str]:
    """Yield a sentence for each flag that is missing or out of range."""
    if flags.load is None:
        yield "--load is missing: --load runs/quickstart/checkpoints"
    if not 1 <= flags.num_tokens <= MOST:
        yield f"--num-tokens {flags.num_tokens} must be at least 1 and at most {MOST}"
    if not 0 <= flags.temperature < math.inf:
        yield f"--temperature {flags.temperature} must be a number of at least 0"
    if flags.top_k < 0:
        yield f"--top-k {flags.top_k} must be at least 0"
