"""The way from flags to stages: which schedule, in how many stages, with which layers.

Megatron's ways to say it exclude one another, see config.parallel; here they are compared with what the schedule has.
"""

from __future__ import annotations

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.partition.layout import AUTO, depths_of, parse_layout
from megapipe.partition.layout import FLAG as LAYOUT
from megapipe.partition.spans import nearly_even, partition
from megapipe.schedule import (
    SCHEDULES,
    Costs,
    Placement,
    Schedule,
    ScheduleError,
    entry_of,
    is_file,
    loop,
    share_of_window,
    vee,
)
from megapipe.schedule.catalogue import usual
from megapipe.schedule.costs_file import load_costs

COSTS = "--pipeline-costs"
PER_STAGE, PER_RANK = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"


def schedule_name(config: Config) -> str:
    """The schedule asked for; without a name 1f1b, or interleaved for several stages on a rank.

    Raises: ConfigError as `chunks_of`.
    """
    return config.parallel.pipeline_schedule or usual(chunks_of(config))


def is_searched(name: str) -> bool:
    """Is it a schedule that takes a search?"""
    return not is_file(name) and entry_of(name).searched


def kept_shares(schedule: Schedule, some: int) -> tuple[float, ...]:
    """Share of its microbatches that each position of the chain does not compute again."""
    kept, place = share_of_window(schedule, some), schedule.placement
    copies = [[len(kept[s]) for s in range(place.num_stages) if place.position(s) == at] for at in range(place.chain)]
    return tuple(sum(numbers) / schedule.num_microbatches for numbers in copies)


def forwards(config: Config, microbatches: int) -> int:
    """The forwards of a step, at the stages that the flags ask for.

    Raises: ConfigError as `chunks_of`.
    """
    return config.parallel.pipeline_model_parallel_size * (chunks_of(config) or 1) * microbatches


def counts_of(config: Config, placement: Placement) -> tuple[int, ...]:
    """Layers at each position of the chain; for `auto` the even split, which its search replaces.

    Raises: ConfigError if the layers do not divide as the flags say.
    """
    par, layers = config.parallel, config.model.layers
    text = par.pipeline_model_parallel_layout
    if text == AUTO:
        return nearly_even(layers, placement.chain)
    if text is not None:
        counts = parse_layout(text)
        if sum(counts) != layers:
            raise ConfigError(
                f"{LAYOUT} {text} lists {sum(counts)} layers, but --num-layers is {layers}. Make them equal."
            )
        return counts
    spans = partition(
        layers,
        placement,
        account_for_embedding=par.account_for_embedding_in_pipeline_split,
        account_for_loss=par.account_for_loss_in_pipeline_split,
        first=par.decoder_first_pipeline_num_layers,
        last=par.decoder_last_pipeline_num_layers,
    )
    return tuple(span.count for span in spans[: placement.chain])


def chunks_of(config: Config) -> int | None:
    """Return the stages of a rank in a chain that the flags ask for, None if they leave it open.

    Raises: ConfigError if the layers, or the stages of a layout, do not divide so.
    """
    par, ranks = config.parallel, config.parallel.pipeline_model_parallel_size
    layout = par.pipeline_model_parallel_layout
    if layout is not None and layout != AUTO:
        stages = len(parse_layout(layout))
        if stages % ranks:
            near = [n for n in (stages // ranks * ranks, stages // ranks * ranks + ranks) if n]
            raise ConfigError(
                f"{LAYOUT} {layout} lists {stages} stages, which --pipeline-model-parallel-size {ranks} does not "
                f"divide. List {' or '.join(map(str, near))} stages; a stage may be empty."
            )
        return stages // ranks
    if (count := par.num_layers_per_virtual_pipeline_stage) is None or config.model.num_layers is None:
        return par.num_virtual_stages_per_pipeline_rank
    extra = par.account_for_embedding_in_pipeline_split + par.account_for_loss_in_pipeline_split
    layers = config.model.layers + extra
    chunks, rest = divmod(layers, ranks * count)
    if rest:
        fitting = [n for n in range(1, layers + 1) if layers % (ranks * n) == 0]
        near = sorted(fitting, key=lambda n: (abs(n - count), n))[:2]
        ways = [f"--num-layers {n * ranks * count - extra}" for n in (chunks, chunks + 1) if n * ranks * count > extra]
        ways += [f"{PER_STAGE} {n}" for n in near]
        raise ConfigError(
            f"--num-layers {config.model.layers} does not fill stages of {PER_STAGE} {count} on {ranks} ranks: "
            f"{layers} = {ranks * count} x {chunks} + {rest}{f', with {extra} counted as layers' if extra else ''}.\n"
            f"      Use {', or '.join(ways)}."
        )
    return chunks


def other_stages(config: Config, schedule: Schedule) -> str | None:
    """A sentence on how the schedule's stages differ from those asked for; None if they do not."""
    par, place, chunks = config.parallel, schedule.placement, chunks_of(config)
    layout, name, ranks = par.pipeline_model_parallel_layout, schedule.name, place.num_ranks
    more = ", or use --pipeline-schedule interleaved" if (chunks or 1) > 1 and name in SCHEDULES else ""
    cuts = f"but {name} on {ranks} ranks cuts the model in {place.chain}"
    if chunks is None:
        return None
    if par.num_virtual_stages_per_pipeline_rank is not None:
        held = {len(place.stages_on(rank)) for rank in range(ranks)}
        if held == {chunks}:
            return None
        return f"{PER_RANK} {chunks}, but {name} has {max(held)} on each rank. Leave it out{more}."
    if chunks * ranks == place.chain:
        return None
    if (count := par.num_layers_per_virtual_pipeline_stage) is not None:
        return f"{PER_STAGE} {count} makes {chunks * ranks} stages, {cuts}. Leave it out{more}."
    return f"{LAYOUT} {layout} lists {chunks * ranks} stages, {cuts}. List {place.chain} stages{more}."


def _filled(config: Config) -> tuple[int, ...]:
    """Stages of a rank among which a search may choose: what the flags ask for, or those of 1, 2 and 4 that the layers
    fill."""
    if asked := chunks_of(config):
        return (asked,)
    fitting = []
    for chunks in (1, 2, 4):
        try:
            counts_of(config, loop(config.parallel.pipeline_model_parallel_size, chunks))
        except ConfigError:
            continue
        fitting.append(chunks)
    return tuple(fitting) or (1,)


def placements(config: Config) -> tuple[Placement, ...]:
    """Placements that a search may choose.

    Raises: ConfigError if --pipeline-costs names the stages of none.
    """
    ranks, costs = config.parallel.pipeline_model_parallel_size, given_costs(config)
    places = [x for v in _filled(config) for x in ([loop(ranks, v)] if v != 2 else [loop(ranks, v), vee(ranks)])]
    if costs is None:
        return tuple(places)
    timed = [x for x in (costs.f, costs.b, costs.w) if isinstance(x, tuple)]
    fitting = [place for place in places if all(len(x) == place.chain + config.model.depths for x in timed)]
    of_chain(config, costs, (fitting or places)[0])
    return tuple(fitting)


def given_costs(config: Config) -> Costs | None:
    """The costs of --pipeline-costs.

    Raises: ConfigError if it is no costs file.
    """
    path = config.parallel.pipeline_costs
    try:
        return None if path is None else load_costs(path)
    except ScheduleError as error:
        raise ConfigError(f"{COSTS} {error}") from None


def of_chain(config: Config, costs: Costs, place: Placement) -> Costs:
    try:
        chain = place.with_depths((0,) * config.model.depths)  # lists name depths behind the stages, if any
        costs.check(chain)
        costs.lag(0, min(1, place.num_ranks - 1), place.num_ranks)
    except ScheduleError as error:
        raise ConfigError(
            f"{COSTS} {config.parallel.pipeline_costs}: {error} Write it again for these flags, with "
            "megapipe plan --measure --save-costs FILE, or give numbers in place of lists."
        ) from None
    return costs.of_positions(place.chain)


def ranks_of_depths(config: Config, place: Placement) -> tuple[tuple[int, ...], ...]:
    """The rank of each depth: one choice, or those among which `auto` may choose.

    place: of the model's own chain.
    Raises: ConfigError if a layout lists others than there are.
    """
    number, layout = config.model.depths, config.parallel.pipeline_model_parallel_layout
    own = place.rank_of[: place.main]
    if layout is not None and layout != AUTO:
        listed = depths_of(layout)
        if listed and len(listed) != number:
            raise ConfigError(
                f"{LAYOUT} {layout} lists {len(listed)} m, but --mtp-num-layers is {number}. Make them equal."
            )
        if listed:
            return (tuple(own[at] for at in listed),)
    beside = (own[-1],) * number
    if layout != AUTO or place.num_ranks == 1 or place.num_chains > 1 or not number:
        return (beside,)
    # In the order of the chain, as a layout string can say it: with the loss, and on the ranks before it.
    ways = [tuple(sorted(range(max(len(own) - skip - number, 0), len(own) - skip))[:number]) for skip in (0, 1)]
    spread = [tuple(own[at] for at in way) for way in ways if len(way) == number]
    return tuple(dict.fromkeys((beside, *spread)))
