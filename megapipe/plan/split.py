"""The way from flags to stages: which schedule, in how many stages, with which layers.

Megatron-LM has several flags for the number of stages and layers, and only one may be given, see
config.parallel. Here the flags are compared with the stages that the schedule has.
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
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
PER_RANK = "--num-virtual-stages-per-pipeline-rank"


def schedule_name(config: Config) -> str:
    """Return the name of the schedule in --pipeline-schedule.

    Without the flag the name is 1f1b, or interleaved if flags ask for several stages on each rank.

    Raises: ConfigError if the flags do not give each rank a whole number of stages.
    """
    return config.parallel.pipeline_schedule or usual(chunks_of(config))


def is_searched(name: str) -> bool:
    """Return whether the order of a schedule is found by a search."""
    return not is_file(name) and entry_of(name).searched


def kept_shares(schedule: Schedule, some: int) -> tuple[float, ...]:
    """Return, for each stage, the fraction of microbatches that it does not recompute.

    Args:
        schedule: the table. The two replicas of a stage in DualPipe are counted together.
        some: how many of the microbatches in flight on a stage are not recomputed.
    """
    kept = share_of_window(schedule, some)
    place = schedule.placement
    fractions = []
    for position in range(place.chain):
        # DualPipe has two stages at a position, and each has half of the microbatches.
        number = sum(len(kept[stage]) for stage in place.replicas(position))
        fractions.append(number / schedule.num_microbatches)
    return tuple(fractions)


def forwards(config: Config, microbatches: int) -> int:
    """Return the number of forwards of a step on all ranks.

    Raises: ConfigError if the flags do not give each rank a whole number of stages.
    """
    # Flags that leave the stages open mean one on each rank, as without virtual stages.
    stages = config.parallel.pipeline_model_parallel_size * (chunks_of(config) or 1)
    return stages * microbatches


def counts_of(config: Config, placement: Placement) -> tuple[int, ...]:
    """Return the number of layers of each stage, in the model's order.

    For the layout `auto` the split is even; a search replaces it later.

    Args:
        placement: the stages of the model, without multi-token prediction.
    Raises: ConfigError if the layers do not divide as the flags say.
    """
    par = config.parallel
    layers = config.model.layers
    # A layout string says everything, and excludes the other flags.
    text = par.pipeline_model_parallel_layout
    if text == AUTO:
        return nearly_even(layers, placement.chain)
    if text is not None:
        counts = parse_layout(text)
        if sum(counts) != layers:
            raise ConfigError(
                f"{LAYOUT} {text} lists {sum(counts)} layers, but --num-layers is {layers}. "
                "Make them equal."
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
    """Return the number of stages on a rank that flags ask for; None if they leave it open.

    With DualPipe this is the number for each of the two copies of the model.

    Raises: ConfigError if the layers do not fill the stages, or if the ranks do not divide the
        number of stages in a layout.
    """
    par = config.parallel
    layout = par.pipeline_model_parallel_layout
    if layout is not None and layout != AUTO:
        return _chunks_of_layout(layout, par.pipeline_model_parallel_size)
    count = par.num_layers_per_virtual_pipeline_stage
    if count is None or config.model.num_layers is None:
        return par.num_virtual_stages_per_pipeline_rank
    return _chunks_of_layers(config, count)


def _chunks_of_layout(layout: str, ranks: int) -> int:
    """Return the number of stages on a rank that a layout string has.

    Args:
        ranks: number of pipeline ranks.
    """
    stages = len(parse_layout(layout))
    chunks, rest = divmod(stages, ranks)
    if rest:
        near = [str(n * ranks) for n in (chunks, chunks + 1) if n]
        raise ConfigError(
            f"{LAYOUT} {layout} lists {stages} stages, which --pipeline-model-parallel-size "
            f"{ranks} does not divide. List {' or '.join(near)} stages; a stage may be empty."
        )
    return chunks


def _chunks_of_layers(config: Config, count: int) -> int:
    """Return the number of stages on a rank, if each stage has `count` layers.

    Raises: ConfigError if the layers do not fill the stages.
    """
    par = config.parallel
    ranks = par.pipeline_model_parallel_size
    extra = par.account_for_embedding_in_pipeline_split + par.account_for_loss_in_pipeline_split
    layers = config.model.layers + extra
    chunks, rest = divmod(layers, ranks * count)
    if not rest:
        return chunks
    # Two ways out: other layers for this size of a stage, or the nearest sizes for these layers.
    fuller = [n * ranks * count - extra for n in (chunks, chunks + 1)]
    ways = [f"--num-layers {number}" for number in fuller if number > 0]
    fitting = [n for n in range(1, layers + 1) if layers % (ranks * n) == 0]
    fitting.sort(key=lambda n: (abs(n - count), n))
    ways += [f"{PER_STAGE} {n}" for n in fitting[:2]]
    counted = f", with {extra} counted as layers" if extra else ""
    raise ConfigError(
        f"--num-layers {config.model.layers} does not fill stages of {PER_STAGE} {count} on "
        f"{ranks} ranks: {layers} = {ranks * count} x {chunks} + {rest}{counted}.\n"
        f"      Use {', or '.join(ways)}."
    )


def other_stages(config: Config, schedule: Schedule) -> str | None:
    """Return an error text that says how a schedule's stages differ from the flags.

    Returns None if they agree, or if no flag asks for a number of stages.

    Raises: ConfigError if the flags do not give each rank a whole number of stages.
    """
    par = config.parallel
    place = schedule.placement
    chunks = chunks_of(config)
    if chunks is None:
        return None
    name = schedule.name
    ranks = place.num_ranks
    # A user who asks for several stages may have meant the schedule that has any number.
    more = ""
    if chunks > 1 and name in SCHEDULES:
        more = ", or use --pipeline-schedule interleaved"
    if par.num_virtual_stages_per_pipeline_rank is not None:
        held = {len(place.stages_on(rank)) for rank in range(ranks)}
        if held == {chunks}:
            return None
        return f"{PER_RANK} {chunks}, but {name} has {max(held)} on each rank. Leave it out{more}."
    if chunks * ranks == place.chain:
        return None
    cuts = f"{chunks * ranks} stages, but {name} on {ranks} ranks cuts the model in {place.chain}"
    count = par.num_layers_per_virtual_pipeline_stage
    if count is not None:
        return f"{PER_STAGE} {count} makes {cuts}. Leave it out{more}."
    layout = par.pipeline_model_parallel_layout
    return f"{LAYOUT} {layout} lists {cuts}. List {place.chain} stages{more}."


def placements(config: Config) -> tuple[Placement, ...]:
    """Return the placements of stages on ranks among which a search may choose.

    Raises: ConfigError if none of them has as many stages as --pipeline-costs.
    """
    ranks = config.parallel.pipeline_model_parallel_size
    costs = given_costs(config)
    places = []
    for chunks in _filled(config):
        places.append(loop(ranks, chunks))
        if chunks == 2:
            places.append(vee(ranks))
    if costs is None:
        return tuple(places)
    # Lists of costs name the stages of one length of chain, and the depths after them.
    lengths = {len(x) for x in (costs.f, costs.b, costs.w) if isinstance(x, tuple)}
    fitting = [place for place in places if lengths <= {place.chain + config.model.depths}]
    # Raises with the problem, if there is one.
    of_chain(config, costs, (fitting or places)[0])
    return tuple(fitting)


def _filled(config: Config) -> tuple[int, ...]:
    """Return the numbers of stages per rank to try.

    If the flags ask for a number, it is the only one. Otherwise they are 1, 2 and 4, as far as the
    layers fill the stages, or else 1 alone.
    """
    if asked := chunks_of(config):
        return (asked,)
    fitting = []
    for chunks in (1, 2, 4):
        try:
            counts_of(config, loop(config.parallel.pipeline_model_parallel_size, chunks))
        except ConfigError:
            continue
        fitting.append(chunks)
    # If none fits, the plan of one stage a rank says why.
    return tuple(fitting) or (1,)


def given_costs(config: Config) -> Costs | None:
    """Return the costs of --pipeline-costs; None without the flag.

    Raises: ConfigError if the file is no costs file.
    """
    path = config.parallel.pipeline_costs
    if path is None:
        return None
    # The file is the user's, so its errors name the flag.
    try:
        return load_costs(path)
    except ScheduleError as error:
        raise ConfigError(f"{COSTS} {error}") from None


def of_chain(config: Config, costs: Costs, place: Placement) -> Costs:
    """Return the costs in --pipeline-costs without the values for multi-token prediction.

    Args:
        costs: the costs in the file. A list has the stages first, then the modules of multi-token
            prediction.
        place: the placement of the stages.
    Raises: ConfigError if `costs` is for other stages or ranks.
    """
    try:
        # Lists name depths after the stages, if there are any, wherever these will be.
        costs.check(place.with_depths((0,) * config.model.depths))
        costs.lag(0, min(1, place.num_ranks - 1), place.num_ranks)
    except ScheduleError as error:
        raise ConfigError(
            f"{COSTS} {config.parallel.pipeline_costs}: {error} Write it again for these flags, "
            "with megapipe plan --save-costs FILE, or give numbers in place of lists."
        ) from None
    return costs.of_positions(place.chain)


def ranks_of_depths(config: Config, place: Placement) -> tuple[tuple[int, ...], ...]:
    """Return the choices for the ranks of the modules (depths) of multi-token prediction.

    Each choice lists a rank for each depth: with two depths, ((3, 3), (2, 3)) has two choices.
    There are several only for the layout `auto`.

    Args:
        place: the placement of the stages without depths.
    Raises: ConfigError if a layout lists another number of depths than --mtp-num-layers.
    """
    number = config.model.depths
    layout = config.parallel.pipeline_model_parallel_layout
    own = place.rank_of[: place.main]
    if layout is not None and layout != AUTO:
        listed = depths_of(layout)
        if listed and len(listed) != number:
            raise ConfigError(
                f"{LAYOUT} {layout} lists {len(listed)} m, but --mtp-num-layers is {number}. "
                "Make them equal."
            )
        if listed:
            return (tuple(own[stage] for stage in listed),)
    # Megatron-LM's place for them, next to the loss.
    ways = [(own[-1],) * number]
    if layout == AUTO and place.num_ranks > 1 and place.num_chains == 1 and number:
        # One on each of the last stages, with the loss and without, in the order of the chain, as
        # a layout string can say it.
        for end in (len(own), len(own) - 1):
            stages = range(max(end - number, 0), end)
            if len(stages) == number:
                ways.append(tuple(own[stage] for stage in stages))
    return tuple(dict.fromkeys(ways))
