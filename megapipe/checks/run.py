"""Everything that is wrong with a configuration, at once, before any process group exists.

Each function below looks at one matter and yields complete texts; where another module already knows the rule (what a
schedule can mean, how layers divide, what a data file must hold) it is asked, not repeated.
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
from megapipe.checks.model import latent_problems, offload_problems, recompute_problems, variant_problems
from megapipe.checks.numbers import check_numbers, division, divisors, near
from megapipe.checks.pipeline import pipeline_problems
from megapipe.checks.refused import refusals
from megapipe.checks.training import training_problems
from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.config.notes import either, flag
from megapipe.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megapipe.errors import ConfigError
from megapipe.optim.lr import LRSchedule

Problems = Iterator[str]
_TOLD = 128
"""Most ranks of a pipeline of which a table is made, for its problems, before the number of processes fits: 2 s."""


def validate(config: Config, *, has_cuda: bool, own_data: bool = False) -> Tokenizer:
    """Refuse a run that cannot be what its flags say. Changes nothing, starts nothing, reads files but no tokens.

    Args:
        config: with `world_size` from the launcher.
        has_cuda: can torch use a GPU here?
        own_data: does the program give its data sets?
    Returns: the tokenizer, which a start reads once: its file may be large, and slow to parse.
    Raises: ConfigError with every problem.
    """
    tokenizer, unread = answer(lambda: build_tokenizer(config.data))
    problems = [
        *flag_problems(config, own_data=own_data),
        *path_problems(config),
        *unread,
        *tokenizer_problems(config, tokenizer),
    ]
    problems += machine_problems(check_numbers(config)[0], has_cuda)
    if problems or tokenizer is None:
        raise ConfigError(problems)
    return tokenizer


def flag_problems(config: Config, *, own_data: bool = False) -> list[str]:
    """Problems with the flags by themselves, wherever they are used. own_data: see `validate`."""
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
    """An embedding that does not fit the tokenizer, if that could be read."""
    sound, _ = check_numbers(config)
    # Of numbers that are none the tokenizer would be another.
    return [*vocabulary_problems(sound, tokenizer.vocab_size)] if tokenizer and sound.data == config.data else []


def vocabulary_problems(config: Config, vocab_size: int) -> Problems:
    """An embedding too small for the tokenizer, or that does not divide by the tensor-parallel size."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    rows = model.padded_vocab(vocab_size)
    if rows < vocab_size:
        yield (
            f"--padded-vocab-size {rows} is less than the {vocab_size} ids of the tokenizer. "
            f"Use --padded-vocab-size {_up(vocab_size, 128 * tp)}, or leave it out."
        )
    elif rows % tp:
        to = model.make_vocab_size_divisible_by
        given = f"--padded-vocab-size {rows}" if model.padded_vocab_size else f"a vocabulary padded to {rows} rows"
        remedy = f"--padded-vocab-size {_up(rows, tp)}" if model.padded_vocab_size else ""
        yield (
            f"{given} does not divide by --tensor-model-parallel-size {tp}: {division(rows, tp)}. "
            f"Use {remedy or f'--make-vocab-size-divisible-by {_up(to, tp)}'}."
        )


def _model(config: Config) -> Problems:
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    hidden, heads, positions = m.hidden_size, m.num_attention_heads, m.max_position_embeddings
    if m.multi_latent_attention:
        yield from latent_problems(m)
    elif hidden and heads and m.kv_channels is None and hidden % heads:
        yield (
            f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}: {division(hidden, heads)}. "
            f"Use --hidden-size {near(hidden, heads)}, or give the size of a head with --kv-channels."
        )
    elif hidden and heads and m.position_embedding_type == "rope" and int(m.head_dim * m.rotary_percent) % 2:
        yield (
            f"--position-embedding-type rope turns pairs, but --rotary-percent {m.rotary_percent} of a head of "
            f"{m.head_dim} is {int(m.head_dim * m.rotary_percent)}, an odd number."
        )
    elif hidden and heads and m.position_embedding_type == "rope" and int(m.head_dim * m.rotary_percent) == 0:
        yield (
            f"--rotary-percent {m.rotary_percent:g} of a head of {m.head_dim} turns no channel. "
            f"Use at least --rotary-percent {2 / m.head_dim:g}, or --position-embedding-type none."
        )
    if m.group_query_attention and heads and heads % m.num_query_groups:
        yield (
            f"--num-attention-heads {heads} does not divide by --num-query-groups {m.num_query_groups}: "
            f"{division(heads, m.num_query_groups)}. Use --num-query-groups {either(divisors(heads))}."
        )
    widths = _widths(config)
    if widths.get("--ffn-hidden-size") == 0:
        yield f"--swiglu makes an MLP of width 0 from --hidden-size {hidden}. Give --ffn-hidden-size."
    for name, width in widths.items():
        if width % tp:
            yield (
                f"{name} {width} does not divide by --tensor-model-parallel-size {tp}: {division(width, tp)}. "
                f"Use --tensor-model-parallel-size {either(_tensor_sizes(config))}."
            )
    if positions and config.batch.seq_length and config.batch.seq_length > positions:
        yield (
            f"--seq-length {config.batch.seq_length} is above --max-position-embeddings {positions}. "
            f"Use --max-position-embeddings {config.batch.seq_length}."
        )
    yield from fp8_problems(config)


def _of_model(config: Config, *, of_layer: bool = False) -> list[str]:
    return [
        *_model(config),
        *variant_problems(config.model),
        *refusals(config, of_layer=of_layer),
    ]


def _overrides(config: Config) -> Problems:
    """Each layer that differs must be sound by itself; alike ones are named by the first."""
    model = config.model
    if model.per_layer_overrides is None or model.num_layers is None:
        return
    if unreadable := ask(lambda: layer_config(model, 0)):
        yield from unreadable
        return
    said = {*check_numbers(config)[1], *_of_model(config)}
    for changed in dict.fromkeys(layer_config(model, layer) for layer in range(model.layers)):
        layer = next(n for n in range(model.layers) if layer_config(model, n) == changed)
        sound, problems = check_numbers(replace(config, model=changed))
        for line in [*problems, *_of_model(sound, of_layer=True)]:
            if line not in said:
                yield f"--per-layer-overrides, layer {layer}: {line}"


def _length(config: Config) -> Problems:
    batch = config.batch
    if batch.train_iters is None and batch.train_samples is None:
        yield "--train-iters (or --train-samples) is missing, for example --train-iters 1000"
    if batch.train_iters is not None and batch.train_samples is not None:
        return
    mine, other = ("iters", "samples") if batch.train_samples is None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if value := getattr(config.optimizer, f"{name}_{other}"):
            yield (
                f"{flag(f'{name}_{other}')} {value} counts {other}, but --train-{mine} counts {mine}. "
                f"Use {flag(f'{name}_{mine}')}, or --train-{other}."
            )


def _layout(config: Config) -> Problems:
    """World size, batch, schedule, layers: each needs the one before."""
    par = config.parallel
    tp, pp, world = par.tensor_model_parallel_size, par.pipeline_model_parallel_size, config.world_size
    cp, ranks = par.context_parallel_size, par.ranks_of_a_replica
    if world % ranks:
        yield (
            f"{world} processes are not --tensor-model-parallel-size {tp} x "
            + f"--context-parallel-size {cp} x " * (cp > 1)
            + f"--pipeline-model-parallel-size {pp} x data-parallel ranks: {division(world, ranks)}.\n"
            f"      Start a multiple of {ranks}, such as torchrun --nproc-per-node {ranks}"
            + _layouts(config)
            * (cp == 1)
        )
    if world % ranks or not config.batch.micro_batch_size:
        if pp <= _TOLD:
            yield from pipeline_problems(config, None)
    else:
        yield from batch_problems(config)


def _learning_rate(config: Config) -> Problems:
    t, batch = config.optimizer, config.batch
    for low, name in ((t.min_lr, "--min-lr"), (t.lr_warmup_init, "--lr-warmup-init")):
        if t.lr is not None and low > t.lr:
            yield f"{name} {low:g} is above --lr {t.lr:g}. Use {name} {t.lr / 10:g}."
    ends, low = t.decoupled_lr, t.min_lr if t.decoupled_min_lr is None else t.decoupled_min_lr
    if ends is not None and low > ends:
        yield f"--decoupled-min-lr {low:g} is above --decoupled-lr {ends:g}. Use --decoupled-min-lr {ends / 10:g}."
    # The curve needs a batch, a length, and the length one way to count.
    fits = batch.micro_batch_size and config.data_parallel_size
    if t.lr is not None and fits and (batch.train_iters is None) != (batch.train_samples is None):
        yield from ask(lambda: LRSchedule.of(config))


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _widths(config: Config) -> dict[str, int]:
    """Widths that tensor-parallel ranks share, by the flag that sets each."""
    m = config.model
    widths = {
        "--hidden-size": m.hidden_size if m.depths else None,  # a depth's projection is split by its rows
        "--num-attention-heads": m.num_attention_heads,
        "--num-query-groups": m.num_query_groups if m.group_query_attention else None,
        "--ffn-hidden-size": m.ffn if m.ffn_hidden_size or m.hidden_size else None,
    }
    return {name: width for name, width in widths.items() if width is not None}


def _tensor_sizes(config: Config) -> list[int]:
    """Tensor-parallel sizes that fit the widths and, if any do, the number of processes; 1 always fits the widths."""
    fits = divisors(gcd(config.world_size, *(_widths(config).values() or (1,))))
    return [d for d in fits if config.world_size % (d * config.parallel.pipeline_model_parallel_size) == 0] or fits


def _layouts(config: Config) -> str:
    """Tensor x pipeline sizes that these processes and this model allow, largest first."""
    world, layers = config.world_size, config.model.num_layers or 1
    sizes = [(t, p) for t in _tensor_sizes(config) for p in divisors(gcd(world // t, layers))]
    sizes.sort(key=lambda size: (-size[0] * size[1], size))
    return ", or use tensor x pipeline " + ", ".join(f"{t} x {p}" for t, p in sizes[:6]) + "."
