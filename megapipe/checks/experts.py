"""Checks of a model's experts: their router, limits, split over ranks, and upcycling."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from megapipe.checks.numbers import division, divisors, near, start_of
from megapipe.config import BatchConfig, Config, ModelConfig
from megapipe.config.model.moe import layer_frequency
from megapipe.config.notes import either

_INSTEAD = {
    "quantile_balancing": (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type none"
    ),
}


def expert_problems(config: Config) -> Iterator[str]:
    """Yield all problems of the flags of mixture-of-experts layers."""
    model = config.model
    upcycled = config.checkpoint.moe_use_upcycling
    if not model.has_experts:
        return
    if upcycled:
        yield from _upcycling(config)
    yield from _layers(model)
    yield from _choice(model, upcycled)
    yield from _groups(model)
    yield from _balance(model)
    yield from _limits(model, config.batch)
    yield from _split(config)
    yield from _mapping(config)


def _mapping(config: Config) -> Iterator[str]:
    """Yield the problem of --use-tp-pp-dp-mapping if etp x ep differs from tp x cp.

    The flag numbers pipeline ranks before data-parallel ranks. With different products a rank would
    have the experts of one stage and the other layers of another stage.
    """
    par = config.parallel
    of_layer = par.tensor_model_parallel_size * par.context_parallel_size
    of_experts = par.etp * par.expert_model_parallel_size
    # With other numbers of ranks the two grids would put a rank on two stages. Megatron-LM refuses
    # this, too.
    several = par.pipeline_model_parallel_size > 1
    if par.use_tp_pp_dp_mapping and several and of_layer != of_experts:
        yield (
            "--use-tp-pp-dp-mapping numbers the pipeline before data parallel, so that the dense "
            "layers and the experts must have equally many ranks in it: "
            f"--tensor-model-parallel-size {par.tensor_model_parallel_size} x "
            f"--context-parallel-size {par.context_parallel_size} = {of_layer}, "
            f"--expert-tensor-parallel-size {par.etp} x --expert-model-parallel-size "
            f"{par.expert_model_parallel_size} = {of_experts}. "
            "Leave --use-tp-pp-dp-mapping out, or make both equal."
        )


def _layers(model: ModelConfig) -> Iterator[str]:
    """Yield the problem of a --moe-layer-freq that cannot be read, or does not fit the layers."""
    text = model.moe_layer_freq
    layers = model.num_layers
    try:
        frequency = layer_frequency(text)
    except ValueError:
        yield (
            f"--moe-layer-freq {text}: an integer of at least 1, or a list with a 0 or 1 for each "
            'layer, such as "([0]*3+[1]*58)" (in quotes)'
        )
        return
    if isinstance(frequency, int) or layers is None:
        return
    if len(frequency) != layers:
        yield (
            f"--moe-layer-freq {text} says {len(frequency)} layers, and --num-layers {layers}. "
            "Make both agree."
        )
    elif not any(frequency):
        yield (
            f"--moe-layer-freq {text} leaves no layer for --num-experts {model.experts}. "
            "Leave one of them out."
        )


def _choice(model: ModelConfig, upcycled: bool) -> Iterator[str]:
    """Yield problems of --moe-router-topk: more than the experts, or 1 with an idle router.

    Args:
        upcycled: whether the experts are made from a dense model, by --moe-use-upcycling.
    """
    k = model.moe_router_topk
    experts = model.experts
    if k > experts:
        yield (
            f"--moe-router-topk {k} is more than --num-experts {experts}. "
            f"Use --moe-router-topk {experts}, or fewer."
        )
    # Its derivative is 0: no gradient reaches the router.
    plain = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if k == 1 and plain and not upcycled and not model.by_sinkhorn:
        yield (
            "--moe-router-topk 1: the softmax over one expert is 1, and the router would learn "
            "nothing. Add --moe-router-pre-softmax."
        )


def _groups(model: ModelConfig) -> Iterator[str]:
    """Yield the first problem of groups of experts, such as a wrong --moe-router-num-groups."""
    k = model.moe_router_topk
    experts = model.experts
    groups = model.moe_router_num_groups
    chosen = model.moe_router_group_topk
    if chosen is None or groups is None:
        return
    size = experts // groups
    if experts % groups:
        yield (
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}: "
            f"{division(experts, groups)}. Use --num-experts {near(experts, groups)}."
        )
    elif chosen > groups or k < chosen or k > chosen * size:
        yield (
            f"--moe-router-group-topk {chosen}: at most --moe-router-num-groups {groups} and "
            f"--moe-router-topk {k}, and together the groups must have {k} experts, "
            f"each has {size}."
        )
    elif model.group_scores > size:
        yield (
            f"--moe-router-group-score-topk {model.group_scores}: a group has {size} experts. "
            f"Use {size}, or fewer."
        )


def _balance(model: ModelConfig) -> Iterator[str]:
    """Yield problems of the balancing losses and their coefficients."""
    flag = "--moe-router-load-balancing-type"
    kinds = model.moe_router_load_balancing_type
    weights = model.moe_aux_loss_coeff
    for kind in kinds:
        if kind in _INSTEAD:
            yield f"{flag} {kind} is not implemented. Use {_INSTEAD[kind]}."
    # Neither is a loss: none has no loss, and sinkhorn balances by its choice.
    alone = [kind for kind in ("none", "sinkhorn") if kind in kinds]
    if len(set(kinds)) < len(kinds) or (len(kinds) > 1 and alone):
        single = alone[0] if alone else "none"
        yield f"{flag} {' '.join(kinds)}: each loss once, and {single} alone."
    if len(kinds) != len(weights):
        one_each = "1 number" if len(kinds) == 1 else f"{len(kinds)} numbers"
        given = " ".join(f"{weight:g}" for weight in weights)
        yield f"--moe-aux-loss-coeff {given}: give {one_each}, one for each of {' '.join(kinds)}."


def _limits(model: ModelConfig, batch: BatchConfig) -> Iterator[str]:
    """Yield the problem of a --moe-expert-capacity-factor that is too small.

    The factor is too small if an expert would take less than one token of a microbatch.

    Args:
        batch: the flags of batch and sequence, which give the number of tokens.
    """
    factor = model.moe_expert_capacity_factor
    if factor is None or factor < 0:
        return
    if factor == 0:
        yield (
            "--moe-expert-capacity-factor 0 drops every token. "
            "Use 1.0, or leave it out to drop none."
        )
    # Of a whole microbatch: ranks that share its tokens have less of both, choices and capacity.
    chosen = (batch.micro_batch_size or 0) * (batch.seq_length or 0) * model.moe_router_topk
    if 0 < chosen * factor < model.experts:
        share = chosen / model.experts * factor
        yield (
            f"--moe-expert-capacity-factor {factor:g} leaves an expert less than one of {chosen} "
            f"choices of a microbatch: {chosen} / {model.experts} x {factor:g} = {share:.2g}. "
            "Use 1.0, or leave it out to drop none."
        )


def _split(config: Config) -> Iterator[str]:
    """Yield problems of the split of experts over expert- and tensor-parallel ranks."""
    model = config.model
    par = config.parallel
    world = config.world_size
    tp = par.tensor_model_parallel_size
    pp = par.pipeline_model_parallel_size
    ep = par.expert_model_parallel_size
    etp = par.etp
    yield from _widths(config)
    if model.experts % ep:
        # The remedy must suit both: the experts, and the processes that there are.
        fitting = gcd(world // pp // etp, model.experts)
        yield (
            f"--num-experts {model.experts} is not divisible by --expert-model-parallel-size "
            f"{ep}: {division(model.experts, ep)}. "
            f"Use --expert-model-parallel-size {either(divisors(fitting))}, or "
            f"--num-experts {near(model.experts, ep)}."
        )
    # Without sequence parallelism, tensor-parallel ranks would route the same tokens.
    if tp > 1 and not model.sequence_parallel and (ep > 1 or etp != tp):
        differs = f"--expert-tensor-parallel-size {etp}"
        if ep > 1:
            differs = f"--expert-model-parallel-size {ep}"
        yield (
            f"{differs} with --tensor-model-parallel-size {tp} needs ranks that have tokens of "
            "their own. Add --sequence-parallel."
        )
    # Experts lie on a grid of their own over the same processes. Where the dense grid does not fit
    # either, `_layout` has a line.
    ranks = etp * ep * pp
    if world % ranks and world % par.ranks_of_a_replica == 0:
        whole = lcm(ranks, par.ranks_of_a_replica)
        fitting = gcd(world // pp, model.experts)
        yield (
            f"{world} processes are not --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {ep} x --pipeline-model-parallel-size {pp} x ranks with "
            f"the same experts: {division(world, ranks)}. "
            f"{start_of(whole, world)}, or use "
            f"--expert-model-parallel-size {either(divisors(fitting))} and "
            "--expert-tensor-parallel-size 1."
        )


def _widths(config: Config) -> Iterator[str]:
    """Yield a problem for each expert width that is no multiple of the ranks that split it."""
    model = config.model
    par = config.parallel
    tp = par.tensor_model_parallel_size
    tensor = "--tensor-model-parallel-size"
    by = tensor if par.expert_tensor_parallel_size is None else "--expert-tensor-parallel-size"
    widths = []
    # Without these two flags experts are as wide as the MLP, which is checked with the model.
    if model.moe_ffn_hidden_size or par.expert_tensor_parallel_size is not None:
        widths.append(("--moe-ffn-hidden-size", model.expert_ffn, by, par.etp))
    shared = model.moe_shared_expert_intermediate_size or 0
    widths.append(("--moe-shared-expert-intermediate-size", shared, tensor, tp))
    for name, width, by, ranks in widths:
        if width % ranks:
            yield (
                f"{name} {width} is not divisible by {by} {ranks}: {division(width, ranks)}. "
                f"Use {name} {near(width, ranks)}."
            )


def _upcycling(config: Config) -> Iterator[str]:
    """Yield problems of --moe-use-upcycling, which makes experts from a dense model's MLPs.

    A flag is a problem if the model would not compute the same as the dense model at first.
    """
    model = config.model
    name = "--moe-use-upcycling"
    granularity = "--moe-upcycling-granularity"
    pieces = config.checkpoint.moe_upcycling_granularity
    # Equal experts are together the dense MLP if the weights of a token's experts add up to 1.
    if model.by_sinkhorn:
        yield (
            f"{name}: weights under sinkhorn add up to less than 1. "
            "Use --moe-router-load-balancing-type aux_loss."
        )
    elif model.moe_router_score_function == "softmax" and model.moe_router_pre_softmax:
        yield (
            f"{name}: with --moe-router-pre-softmax the weights of a token's experts add up to "
            "less than 1, and the model would not begin as the dense one. "
            "Leave --moe-router-pre-softmax out."
        )
    elif model.moe_router_topk == 1:
        yield (
            f"{name}: the weight of one expert alone is not 1, or the router learns nothing. "
            "Use --moe-router-topk 2."
        )
    if model.hidden_size is None or model.num_layers is None:
        return
    dense = model.ffn * pieces
    width = model.expert_ffn
    if dense % width:
        yield (
            f"{name}: MLPs of --ffn-hidden-size {model.ffn} x {granularity} {pieces} cannot be cut "
            f"into experts of {width}: {division(dense, width)}. "
            "Leave --moe-ffn-hidden-size out: experts then have --ffn-hidden-size."
        )
        return
    slices = dense // width
    counts = {"--num-experts": model.experts, "--moe-router-topk": model.moe_router_topk}
    for flag, value in counts.items():
        if value % slices:
            yield (
                f"{name}: an MLP becomes {slices} experts of {width}, and {flag} {value} is no "
                f"multiple of that. Use {flag} {near(value, slices)}."
            )
    yield from _cut_copies(model, slices)
    try:
        sparse = [model.has_experts_in(layer) for layer in range(model.num_layers)]
    except (ValueError, IndexError):  # reported by _layers
        return
    if pieces > 1 and not all(sparse):
        yield (
            f"{name}: layers without experts keep the dense model's MLPs. "
            f"Give their width, --ffn-hidden-size {dense} --moe-ffn-hidden-size {width}, "
            f"and leave {granularity} out."
        )


def _cut_copies(model: ModelConfig, slices: int) -> Iterator[str]:
    """Yield the problem of --moe-router-num-groups that separates experts of one MLP.

    Upcycling cuts each copy of the dense MLP into `slices` experts. Together they compute what the
    MLP did, so a token must choose all of them, and they must be in one group.

    Args:
        slices: the number of experts from one copy of the MLP.
    """
    groups = model.moe_router_num_groups
    chosen = model.moe_router_group_topk
    if chosen is None or groups is None or model.experts % groups or model.experts % slices:
        return
    size = model.experts // groups
    if size % slices == 0:
        return
    copies = model.experts // slices
    # Each group has whole copies, and the chosen groups have enough experts.
    sound = []
    for n in range(chosen, copies + 1):
        if copies % n == 0 and model.moe_router_topk <= chosen * (model.experts // n):
            sound.append(str(n))
    remedy = "Leave"
    if sound:
        remedy = f"Use --moe-router-num-groups {' or '.join(sound)}, or leave"
    yield (
        f"--moe-use-upcycling: an MLP becomes {slices} experts that a token chooses together, and "
        f"--moe-router-num-groups {groups} makes groups of {size}, which separate them. {remedy} "
        "--moe-router-num-groups and --moe-router-group-topk out."
    )
