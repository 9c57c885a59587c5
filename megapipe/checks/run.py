"""All problems of a configuration at once, before any process group exists.

A function below checks one subject and yields whole sentences. Where another room knows a rule,
such as the meaning of a schedule or the contents of a data file, that room is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from megapipe.checks.batch import batch_problems, sound_batch
from megapipe.checks.context import context_problems
from megapipe.checks.experts import expert_problems
from megapipe.checks.fp8 import fp8_problems
from megapipe.checks.inputs import (
    answer,
    ask,
    checkpoint_problems,
    data_problems,
    machine_problems,
    path_problems,
    profile_problems,
)
from megapipe.checks.model import (
    latent_problems,
    offload_problems,
    recompute_problems,
    variant_problems,
    yarn_problems,
)
from megapipe.checks.numbers import check_numbers, division, divisors, near
from megapipe.checks.pipeline import pipeline_problems
from megapipe.checks.refused import refusals
from megapipe.checks.training import training_problems
from megapipe.config import Config, ModelConfig
from megapipe.config.layers import inline, layer_config
from megapipe.config.notes import either, flag
from megapipe.data.tokenizers.tokenizer import Tokenizer, assumed_vocab_size, build_tokenizer
from megapipe.errors import ConfigError
from megapipe.optim.lr import LRSchedule

Problems = Iterator[str]
_LARGEST = 128
"""Limit on the ranks of a pipeline whose table is made, in 2 s, before the world size fits."""


def validate(config: Config, *, has_cuda: bool, own_data: bool = False) -> Tokenizer:
    """Refuse a run that its flags do not allow. It starts nothing, and reads files but no tokens.

    Args:
        config: its `world_size` is the launcher's.
        has_cuda: whether torch can use a GPU here.
        own_data: whether the program gives its own data sets.

    Returns: the tokenizer, so that a start reads its file once; it may be large, and slow to parse.

    Raises: ConfigError with every problem.
    """
    tokenizer, unread = answer(lambda: build_tokenizer(config.data))
    problems = [
        *flag_problems(config, own_data=own_data),
        *path_problems(config),
        *unread,
        *tokenizer_problems(config, tokenizer),
    ]
    # Of sound values alone: a wrong one would be reported twice.
    problems += machine_problems(check_numbers(config)[0], has_cuda)
    if problems or tokenizer is None:
        raise ConfigError(problems)
    return tokenizer


def flag_problems(config: Config, *, own_data: bool = False) -> list[str]:
    """Return the problems that the flags have on any machine.

    Args:
        own_data: whether the program gives its own data sets.
    """
    # Each wrong value is at its default from here on. One typing error then gives one line and not
    # a dozen.
    sound, problems = check_numbers(config)
    sound, unclear = sound_batch(sound)
    problems += unclear
    problems += refusals(sound)
    problems += _model(sound)
    problems += variant_problems(sound.model)
    problems += _overrides(sound)
    problems += recompute_problems(sound.model)
    problems += offload_problems(sound.model, sound.parallel.offload_modules)
    problems += _length(sound)
    problems += expert_problems(sound)
    problems += context_problems(sound)
    problems += _layout(sound)
    problems += _learning_rate(sound)
    problems += training_problems(sound)
    problems += data_problems(sound, own_data=own_data)
    problems += checkpoint_problems(sound)
    problems += profile_problems(sound)
    return problems


def tokenizer_problems(config: Config, tokenizer: Tokenizer | None) -> list[str]:
    """Return the problems of the size of the embedding for this tokenizer.

    Args:
        tokenizer: None if it could not be read; then there are none.
    """
    sound, _ = check_numbers(config)
    # With wrong numbers at their defaults the tokenizer would be another one.
    if tokenizer is None or sound.data != config.data:
        return []
    return [*vocabulary_problems(sound, tokenizer.vocab_size)]


def vocabulary_problems(config: Config, vocab_size: int) -> Problems:
    """Yield the problem of an embedding with too few rows, or with rows that do not divide.

    Args:
        vocab_size: the number of ids of the tokenizer.
    """
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    rows = model.padded_vocab(vocab_size)
    if rows < vocab_size:
        yield (
            f"--padded-vocab-size {rows} is less than the {vocab_size} ids of the tokenizer. "
            f"Use --padded-vocab-size {_up(vocab_size, 128 * tp)}, or leave it out."
        )
    elif rows % tp:
        if model.padded_vocab_size:
            given = f"--padded-vocab-size {rows}"
            remedy = f"--padded-vocab-size {_up(rows, tp)}"
        else:
            given = f"a vocabulary padded to {rows} rows"
            to = _up(model.make_vocab_size_divisible_by, tp)
            remedy = f"--make-vocab-size-divisible-by {to}"
        yield (
            f"{given} does not divide by --tensor-model-parallel-size {tp}: "
            f"{division(rows, tp)}. Use {remedy}."
        )


def _model(config: Config) -> Problems:
    """Yield problems of widths, heads and positions that do not fit each other or the ranks."""
    m = config.model
    tp = config.parallel.tensor_model_parallel_size
    length = config.batch.seq_length
    yield from latent_problems(m) if m.multi_latent_attention else _heads(m)
    heads = m.num_attention_heads
    if m.group_query_attention and heads and heads % m.num_query_groups:
        yield (
            f"--num-attention-heads {heads} does not divide by --num-query-groups "
            f"{m.num_query_groups}: {division(heads, m.num_query_groups)}. "
            f"Use --num-query-groups {either(divisors(heads))}."
        )
    widths = _widths(config)
    # The default of a gated MLP is two thirds of 4 h in steps of 64, which is 0 for a small h.
    if widths.get("--ffn-hidden-size") == 0:
        yield (
            f"--swiglu makes an MLP of width 0 from --hidden-size {m.hidden_size}. "
            "Give --ffn-hidden-size."
        )
    for name, width in widths.items():
        if width % tp:
            yield (
                f"{name} {width} does not divide by --tensor-model-parallel-size {tp}: "
                f"{division(width, tp)}. "
                f"Use --tensor-model-parallel-size {either(_tensor_sizes(config))}."
            )
    positions = m.max_position_embeddings
    # Beyond the table of learned positions a look-up would fail on the device, in the middle of a
    # step.
    if positions and length and length > positions:
        yield (
            f"--seq-length {length} is above --max-position-embeddings {positions}. "
            f"Use --max-position-embeddings {length}."
        )
    yield from fp8_problems(config)


def _heads(m: ModelConfig) -> Problems:
    """Yield the first problem of a head's size and of its rotated channels."""
    hidden = m.hidden_size
    heads = m.num_attention_heads
    if not hidden or not heads:
        return
    # Without a head's size there is no rotation to check.
    if m.kv_channels is None and hidden % heads:
        yield (
            f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}: "
            f"{division(hidden, heads)}. Use --hidden-size {near(hidden, heads)}, "
            "or give the size of a head with --kv-channels."
        )
        return
    if not m.rotates:
        return
    yield from yarn_problems(m)
    # Channels turn in pairs, so their number must be even.
    turned = int(m.head_dim * m.rotary_percent)
    if turned % 2:
        yield (
            f"--position-embedding-type {m.position_embedding_type} turns pairs, but "
            f"--rotary-percent {m.rotary_percent} of a head of {m.head_dim} is {turned}, "
            "an odd number."
        )
    elif turned == 0:
        yield (
            f"--rotary-percent {m.rotary_percent:g} of a head of {m.head_dim} turns no channel. "
            f"Use at least --rotary-percent {2 / m.head_dim:g}, "
            "or --position-embedding-type none."
        )


def _of_model(config: Config, *, of_layer: bool = False) -> list[str]:
    return [
        *_model(config),
        *variant_problems(config.model),
        *refusals(config, of_layer=of_layer),
    ]


def _overrides(config: Config) -> Problems:
    """Yield the problems of layers that --per-layer-overrides changes.

    Of equal layers the first is named.
    """
    model = config.model
    if model.per_layer_overrides is None or model.num_layers is None:
        return
    if unreadable := ask(lambda: layer_config(model, 0)):
        yield from unreadable
        return
    # Problems of the whole model are reported already; a layer has only its own.
    known = {*check_numbers(config)[1], *_of_model(config)}
    first: dict[ModelConfig, int] = {}
    for layer in range(model.layers):
        # A model of 100 layers may have two kinds of them: each kind is checked once.
        first.setdefault(layer_config(model, layer), layer)
    for changed, layer in first.items():
        sound, problems = check_numbers(replace(config, model=changed))
        for line in [*problems, *_of_model(sound, of_layer=True)]:
            if line not in known:
                yield f"--per-layer-overrides, layer {layer}: {line}"


def _length(config: Config) -> Problems:
    """Yield problems of the length of the run: none is given, or others count in another unit.

    The units are iterations and samples.
    """
    batch = config.batch
    if batch.train_iters is None and batch.train_samples is None:
        yield "--train-iters (or --train-samples) is missing, for example --train-iters 1000"
    # Both lengths together are refused by a note of their fields.
    if batch.train_iters is not None and batch.train_samples is not None:
        return
    mine, other = ("iters", "samples") if batch.train_samples is None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if value := getattr(config.optimizer, f"{name}_{other}"):
            yield (
                f"{flag(f'{name}_{other}')} {value} counts {other}, but --train-{mine} counts "
                f"{mine}. Use {flag(f'{name}_{mine}')}, or --train-{other}."
            )


def _layout(config: Config) -> Problems:
    """Yield problems of world size, batch, schedule and layers.

    Where the world size is wrong, schedule and layers are checked with a suitable batch.
    """
    par = config.parallel
    tp = par.tensor_model_parallel_size
    pp = par.pipeline_model_parallel_size
    cp = par.context_parallel_size
    world = config.world_size
    ranks = par.ranks_of_a_replica
    if world % ranks:
        context = f"--context-parallel-size {cp} x " if cp > 1 else ""
        layouts = _layouts(config) if cp == 1 else ""
        yield (
            f"{world} processes are not --tensor-model-parallel-size {tp} x {context}"
            f"--pipeline-model-parallel-size {pp} x data-parallel ranks: "
            f"{division(world, ranks)}.\n"
            f"      Start a multiple of {ranks}, such as torchrun --nproc-per-node {ranks}{layouts}"
        )
    # The number of microbatches does not follow from such a world. The schedule is checked with
    # one that suits it, unless that takes long: the world size has to change anyway.
    if world % ranks or not config.batch.micro_batch_size:
        if pp <= _LARGEST:
            yield from pipeline_problems(config, None)
    else:
        yield from batch_problems(config)


def _learning_rate(config: Config) -> Problems:
    """Yield problems of learning rates above the peak, and of a curve that does not fit the run."""
    flags = config.optimizer
    batch = config.batch
    peak = flags.lr
    for low, name in ((flags.min_lr, "--min-lr"), (flags.lr_warmup_init, "--lr-warmup-init")):
        if peak is not None and low > peak:
            yield f"{name} {low:g} is above --lr {peak:g}. Use {name} {peak / 10:g}."
    ends = flags.decoupled_lr
    low = flags.min_lr if flags.decoupled_min_lr is None else flags.decoupled_min_lr
    if ends is not None and low > ends:
        yield (
            f"--decoupled-min-lr {low:g} is above --decoupled-lr {ends:g}. "
            f"Use --decoupled-min-lr {ends / 10:g}."
        )
    # The curve needs a batch, and the length in one unit.
    fits = batch.micro_batch_size and config.data_parallel_size
    one_length = (batch.train_iters is None) != (batch.train_samples is None)
    if peak is not None and fits and one_length:
        yield from ask(lambda: LRSchedule.of(config))


def _up(value: int, to: int) -> int:
    """Return the value rounded up to a multiple of `to`."""
    return -(-value // to) * to


def _widths(config: Config) -> dict[str, int]:
    """Return the widths that tensor-parallel ranks split, by the flag that sets each."""
    m = config.model
    widths = {
        # The projection of a depth of multi-token prediction is split by its rows.
        "--hidden-size": m.hidden_size if m.depths else None,
        "--num-attention-heads": m.num_attention_heads,
        "--num-query-groups": m.num_query_groups if m.group_query_attention else None,
        "--ffn-hidden-size": m.ffn if m.ffn_hidden_size or m.hidden_size else None,
    }
    return {name: width for name, width in widths.items() if width is not None}


def _tensor_sizes(config: Config) -> list[int]:
    """Return the tensor-parallel sizes that divide all widths of the model.

    Only sizes that suit the number of processes are returned, if there are any.
    """
    widths = _widths(config).values() or (1,)
    fits = divisors(gcd(config.world_size, *widths))
    pp = config.parallel.pipeline_model_parallel_size
    return [d for d in fits if config.world_size % (d * pp) == 0] or fits


def _layouts(config: Config) -> str:
    """Return text with the tensor x pipeline sizes that suit processes and model.

    They are at most six, largest first.
    """
    world = config.world_size
    layers = config.model.num_layers or 1
    sizes = [(t, p) for t in _tensor_sizes(config) for p in divisors(gcd(world // t, layers))]
    sizes.sort(key=lambda size: (-size[0] * size[1], size))
    shown = ", ".join(f"{t} x {p}" for t, p in sizes[:6])
    return f", or use tensor x pipeline {shown}."


def vocabulary(config: Config, tokenizer: Tokenizer | None) -> tuple[int, list[str]]:
    """Return (number of token ids, lines on assumptions).

    tokenizer: None if it cannot be read. The number is then assumed, and a line says so.
    """
    if tokenizer is not None:
        return tokenizer.vocab_size, []
    size = assumed_vocab_size(config.data)
    rows = ""
    if not config.model.padded_vocab_size:
        rows = f"; the plan assumes {size} ids"
    return size, [f"the vocabulary of --tokenizer-type {config.data.tokenizer} is not known{rows}"]


def with_vocabulary(config: Config, size: int) -> Config:
    """Return the configuration with the embedding's rows and the text of --per-layer-overrides.

    Args:
        size: the tokens of the tokenizer.
    """
    model = inline(config.model)
    return replace(config, model=replace(model, padded_vocab_size=model.padded_vocab(size)))
