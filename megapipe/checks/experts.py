"""Settings of a model's experts that contradict each other, or that Megatron-LM has and megapipe does not."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from megapipe.checks.numbers import division, divisors, near
from megapipe.config import BatchConfig, Config, ModelConfig
from megapipe.config.model.moe import layer_frequency
from megapipe.config.notes import either

_OTHER = {
    "quantile_balancing": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type none",
}


def expert_problems(config: Config) -> Iterator[str]:
    """All that is wrong with the experts."""
    model = config.model
    if not model.has_experts:
        return
    if config.checkpoint.moe_use_upcycling:
        yield from _upcycling(config)
    yield from _layers(model)
    yield from _choice(model, config.checkpoint.moe_use_upcycling)
    yield from _balance(model)
    yield from _limits(model, config.batch)
    yield from _split(config)
    yield from _mapping(config)


def _mapping(config: Config) -> Iterator[str]:
    """Refuse an order of ranks in which a rank would stand at two places of the pipeline."""
    par = config.parallel
    of_layer = par.tensor_model_parallel_size * par.context_parallel_size
    of_experts = par.etp * par.expert_model_parallel_size
    if par.use_tp_pp_dp_mapping and par.pipeline_model_parallel_size > 1 and of_layer != of_experts:
        yield (
            f"--use-tp-pp-dp-mapping numbers the pipeline before data parallel, so that the dense layers and the "
            f"experts must have equally many ranks in it: --tensor-model-parallel-size "
            f"{par.tensor_model_parallel_size} x --context-parallel-size {par.context_parallel_size} = {of_layer}, "
            f"--expert-tensor-parallel-size {par.etp} x --expert-model-parallel-size "
            f"{par.expert_model_parallel_size} = {of_experts}. Leave --use-tp-pp-dp-mapping out, or make both equal."
        )


def _layers(model: ModelConfig) -> Iterator[str]:
    text, layers = model.moe_layer_freq, model.num_layers
    try:
        frequency = layer_frequency(text)
    except ValueError:
        yield (
            f"--moe-layer-freq {text}: an integer of at least 1, or a list with a 0 or 1 for each layer, such as "
            '"([0]*3+[1]*58)" (in quotes)'
        )
        return
    if isinstance(frequency, list) and layers is not None:
        if len(frequency) != layers:
            yield f"--moe-layer-freq {text} says {len(frequency)} layers, and --num-layers {layers}. Make both agree."
        elif not any(frequency):
            yield f"--moe-layer-freq {text} leaves no layer for --num-experts {model.experts}. Leave one of them out."


def _choice(model: ModelConfig, upcycled: bool) -> Iterator[str]:
    k, experts = model.moe_router_topk, model.experts
    if k > experts:
        yield (
            f"--moe-router-topk {k} is more than --num-experts {experts}. Use --moe-router-topk {experts}, or fewer."
        )
    plain = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if k == 1 and plain and not upcycled and not model.by_sinkhorn:
        yield (
            "--moe-router-topk 1: the softmax over one expert is 1, and the router would learn nothing. "
            "Add --moe-router-pre-softmax."
        )
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if chosen is None or groups is None:
        return
    if experts % groups:
        yield (
            f"--num-experts {experts} does not divide into --moe-router-num-groups {groups}: "
            f"{division(experts, groups)}. Use --num-experts {near(experts, groups)}."
        )
    elif chosen > groups or k < chosen or k > chosen * (experts // groups):
        yield (
            f"--moe-router-group-topk {chosen}: at most --moe-router-num-groups {groups} and --moe-router-topk {k}, "
            f"and together the groups must have {k} experts, each has {experts // groups}."
        )
    elif model.group_scores > experts // groups:
        yield (
            f"--moe-router-group-score-topk {model.group_scores}: a group has {experts // groups} experts. "
            f"Use {experts // groups}, or fewer."
        )


def _balance(model: ModelConfig) -> Iterator[str]:
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    for kind in kinds:
        if kind in _OTHER:
            yield f"--moe-router-load-balancing-type {kind} is not implemented. Use {_OTHER[kind]}."
    alone = [kind for kind in ("none", "sinkhorn") if kind in kinds]
    if len(set(kinds)) < len(kinds) or (len(kinds) > 1 and alone):
        yield f"--moe-router-load-balancing-type {' '.join(kinds)}: each loss once, and {(alone or ['none'])[0]} alone."
    if len(kinds) != len(weights):
        one_each = f"{len(kinds)} number{'s' * (len(kinds) > 1)}"
        said = " ".join(f"{weight:g}" for weight in weights)
        yield f"--moe-aux-loss-coeff {said}: give {one_each}, one for each of {' '.join(kinds)}."


def _limits(model: ModelConfig, batch: BatchConfig) -> Iterator[str]:
    factor = model.moe_expert_capacity_factor
    if factor == 0:
        yield "--moe-expert-capacity-factor 0 drops every token. Use 1.0, or leave it out to drop none."
    chosen = (batch.micro_batch_size or 0) * (batch.seq_length or 0) * model.moe_router_topk
    if factor is not None and factor > 0 and 0 < chosen * factor < model.experts:
        yield (
            f"--moe-expert-capacity-factor {factor:g} leaves an expert less than one of {chosen} choices of a "
            f"microbatch: {chosen} / {model.experts} x {factor:g} = {chosen / model.experts * factor:.2g}. Use 1.0, or "
            "leave it out to drop none."
        )


def _split(config: Config) -> Iterator[str]:
    """Problems with how experts lie over ranks."""
    model, par, world = config.model, config.parallel, config.world_size
    tp, pp, ep, etp = (
        par.tensor_model_parallel_size,
        par.pipeline_model_parallel_size,
        par.expert_model_parallel_size,
        par.etp,
    )
    of_experts = par.expert_tensor_parallel_size is not None
    flag = "--expert-tensor-parallel-size" if of_experts else "--tensor-model-parallel-size"
    inner, ffn = (model.expert_ffn, "--moe-ffn-hidden-size") if model.moe_ffn_hidden_size or of_experts else (0, "")
    shared = model.moe_shared_expert_intermediate_size or 0
    for name, width, by, ranks in (
        (ffn, inner, flag, etp),
        ("--moe-shared-expert-intermediate-size", shared, "--tensor-model-parallel-size", tp),
    ):
        if width % ranks:
            remedy = f"Use {name} {near(width, ranks)}."
            yield f"{name} {width} does not divide by {by} {ranks}: {division(width, ranks)}. {remedy}"
    if model.experts % ep:
        fitting = gcd(world // pp // etp, model.experts)
        yield (
            f"--num-experts {model.experts} does not divide by --expert-model-parallel-size {ep}: "
            f"{division(model.experts, ep)}. Use --expert-model-parallel-size {either(divisors(fitting))}, or "
            f"--num-experts {near(model.experts, ep)}."
        )
    if tp > 1 and not model.sequence_parallel and (ep > 1 or etp != tp):
        differs = f"--expert-model-parallel-size {ep}" if ep > 1 else f"--expert-tensor-parallel-size {etp}"
        yield (
            f"{differs} beside --tensor-model-parallel-size {tp} needs ranks that have tokens of their own. "
            "Add --sequence-parallel."
        )
    ranks = etp * ep * pp
    if world % ranks and world % par.ranks_of_a_replica == 0:
        whole = lcm(ranks, par.ranks_of_a_replica)
        yield (
            f"{world} processes are not --expert-tensor-parallel-size {etp} x --expert-model-parallel-size {ep} x "
            f"--pipeline-model-parallel-size {pp} x ranks with the same experts: {division(world, ranks)}. "
            f"Start a multiple of {whole}, such as torchrun --nproc-per-node {whole}, or use "
            f"--expert-model-parallel-size {either(divisors(gcd(world // pp, model.experts)))} and "
            "--expert-tensor-parallel-size 1."
        )


def _upcycling(config: Config) -> Iterator[str]:
    """Settings that would not begin as the dense model."""
    model, files, name = config.model, config.checkpoint, "--moe-use-upcycling"
    if model.by_sinkhorn:
        yield f"{name}: weights beside sinkhorn add up to less than 1. Use --moe-router-load-balancing-type aux_loss."
    elif model.moe_router_score_function == "softmax" and model.moe_router_pre_softmax:
        yield (
            f"{name}: with --moe-router-pre-softmax the weights of a token's experts add up to less than 1, and the "
            "model would not begin as the dense one. Leave --moe-router-pre-softmax out."
        )
    elif model.moe_router_topk == 1:
        yield f"{name}: the weight of one expert alone is not 1, or the router learns nothing. Use --moe-router-topk 2."
    if model.hidden_size is None or model.num_layers is None:
        return
    dense, granularity = model.ffn * files.moe_upcycling_granularity, "--moe-upcycling-granularity"
    if dense % model.expert_ffn:
        yield (
            f"{name}: MLPs of --ffn-hidden-size {model.ffn} x {granularity} {files.moe_upcycling_granularity} do not "
            f"divide into experts of {model.expert_ffn}: {division(dense, model.expert_ffn)}. Leave "
            "--moe-ffn-hidden-size out: experts then have --ffn-hidden-size."
        )
        return
    slices = dense // model.expert_ffn
    for flag, value in (("--num-experts", model.experts), ("--moe-router-topk", model.moe_router_topk)):
        if value % slices:
            yield (
                f"{name}: an MLP becomes {slices} experts of {model.expert_ffn}, and {flag} {value} is no multiple of "
                f"that. Use {flag} {near(value, slices)}."
            )
    yield from _cut_copies(model, slices)
    try:
        sparse = [model.has_experts_in(layer) for layer in range(model.num_layers)]
    except (ValueError, IndexError):  # told elsewhere
        return
    if files.moe_upcycling_granularity > 1 and not all(sparse):
        yield (
            f"{name}: layers without experts keep the dense model's MLPs. Give their width, --ffn-hidden-size {dense} "
            f"--moe-ffn-hidden-size {model.expert_ffn}, and leave {granularity} out."
        )


def _cut_copies(model: ModelConfig, slices: int) -> Iterator[str]:
    """Refuse groups of experts that have some slices of a copy, and not all: a token must choose them together."""
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if chosen is None or groups is None or model.experts % groups or model.experts % slices:
        return
    size = model.experts // groups
    if size % slices:
        copies = model.experts // slices
        # Each group has whole copies, and those that are chosen have enough experts.
        sound = [
            str(n)
            for n in range(chosen, copies + 1)
            if copies % n == 0 and model.moe_router_topk <= chosen * (model.experts // n)
        ]
        other = f"Use --moe-router-num-groups {' or '.join(sound)}, or leave" if sound else "Leave"
        yield (
            f"--moe-use-upcycling: an MLP becomes {slices} experts that a token chooses together, and "
            f"--moe-router-num-groups {groups} makes groups of {size}, which cut them apart. {other} "
            "--moe-router-num-groups and --moe-router-group-topk out."
        )
