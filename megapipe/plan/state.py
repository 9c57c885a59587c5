"""Bytes that a rank keeps of a parameter: weight, gradient, optimizer state, main parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from megapipe.config import Config, OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.optim.traits import traits_of
from megapipe.partition.layout import FLAG as LAYOUT
from megapipe.plan.plan import OfPlan, ParameterBytes, Plan
from megapipe.schedule.simulate import memory_steps, run_clock

GIB = 2**30


# A plan asks for each of its parts and choices, and finding a rule may import a user's file.
@lru_cache(maxsize=8)
def bytes_of_state(optimizer: OptimizerConfig, half: bool) -> tuple[int, int, int]:
    """Return the bytes of (gradient, optimizer state, main parameter) for one parameter.

    Args:
        half: whether weights have 16 bits. Only then there may be a main parameter in float32.
    Raises: ConfigError if --optimizer names an unknown optimizer.
    """
    size = {"fp32": 4, "bf16": 2}
    # Adam's moments alone have flags for their types.
    kept_as = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    moments = sum(size[kept_as.get(name, "fp32")] for name in traits_of(optimizer).state)
    master = 4 * (half and optimizer.main_params_dtype == "fp32")
    return size[optimizer.main_grads_dtype], moments, master


def bytes_of_parameter(
    config: Config, own: Iterable[OfPlan], *, experts: bool = False
) -> tuple[float, ParameterBytes]:
    """Return the bytes that a rank keeps for one parameter between steps.

    Args:
        own: the optional features of the plan. Sharding is one: a rank then keeps a shard of weight
            and gradient.
        experts: the parameter is an expert's.
    Returns: (bytes of weight, gradient and optimizer state together, (bytes of weight, of
        gradient)).
    """
    par = config.parallel
    stored = whole_parameter(config)
    for one in own:
        stored = one.stored(stored, experts=experts)
    _, moments, master = bytes_of_state(config.optimizer, config.precision.half)
    state = moments + master
    if par.enable_optimizer_post_validation:
        # An update may be undone until V, from a second copy of what it changes.
        state += moments + (master or config.precision.element_bytes)
    # ZeRO-1 splits the state alone, over the ranks that have the same parameters.
    ranks = 1
    if par.splits_optimizer:
        ranks = config.expert_replicas if experts else config.weight_replicas
    return sum(stored) + state / ranks, stored


def whole_parameter(config: Config) -> ParameterBytes:
    """Return the bytes of one parameter's weight and gradient without sharding."""
    gradient, *_ = bytes_of_state(config.optimizer, config.precision.half)
    return ParameterBytes(config.precision.element_bytes, gradient)


def bytes_at_peak(plan: Plan, config: Config) -> list[dict[str, float]]:
    """Return, for each rank, {use: bytes at the rank's peak of memory}, which add up to the peak.

    The uses are "weights", "gradients", "optimizer", "activations" and "gathered": the gathered
    weights and gradients, with buffers of CUDA graphs.
    """
    of_parameter = (
        bytes_of_parameter(config, plan.own.values())[1],
        bytes_of_parameter(config, plan.own.values(), experts=True)[1],
    )
    dense, expert = of_parameter
    # The state is a sum over parameters, so plans without a summand say what the others are.
    no_gradient = replace(
        plan,
        state=dense.weight,
        of_expert=expert.weight,
        whole=plan.whole._replace(gradient=0),
        stored=dense._replace(gradient=0),
    )
    no_optimizer = replace(plan, state=sum(dense), of_expert=sum(expert))
    costs = plan.costs
    clock = run_clock(plan.schedule, costs)
    whole_alone = replace(costs, **{f"mem_{letter}": 0.0 for letter in "bwsorkp"})
    curves = memory_steps(plan.schedule, costs, clock)
    of_whole = memory_steps(plan.schedule, whole_alone, clock)
    rows = []
    for rank, peak in enumerate(plan.peak_bytes):
        weights = no_gradient.state_bytes[rank]
        state = plan.state_bytes[rank]
        both = no_optimizer.state_bytes[rank]
        time, most, step = max(curves[rank], key=lambda moment: moment[1])
        gathered = 0.0
        for then, held, by in of_whole[rank]:
            if (then, by) <= (time, step):
                gathered = held
        rows.append(
            {
                "weights": weights,
                "gradients": both - weights,
                "optimizer": state - both,
                "activations": most - gathered,
                # Some parts of a plan, such as CUDA graphs, keep more than the table needs.
                "gathered": peak - state - (most - gathered),
            }
        )
    return rows


def refuse_too_much(plan: Plan, config: Config, device: float = 0.0) -> None:
    """Refuse a plan that needs more memory than --memory-limit-gib.

    Args:
        device: bytes of a device; 0 if not known.
    Raises: ConfigError that names the rank and the uses of its memory.
    """
    gib = config.parallel.memory_limit_gib
    need, rank = max((need, rank) for rank, need in enumerate(plan.peak_bytes))
    if gib is None or need <= gib * GIB:
        return
    state = plan.state_bytes[rank]
    also = "".join(f" and {one.holds}" for one in plan.own.values() if one.holds)
    others = ["a schedule that holds less (v-min)"]
    if config.model.recompute_granularity != "full":
        others.append("--recompute-granularity full")
    if plan.before is None:
        others.append(f"{LAYOUT} auto, which looks for a split that fits")
    enough = need / GIB * 1.01
    remedy = f"Use --memory-limit-gib {enough:.3g}, a larger "
    # A limit above the memory of the device would be no remedy.
    if 0 < device < enough * GIB:
        more = enough - device / GIB
        remedy = f"That is {more:.3g} GiB more than a device of --rates has. Use a larger "
    raise ConfigError(
        f"--memory-limit-gib {gib:g} is less than pipeline rank {rank} of {plan.schedule.name} is "
        f"predicted to need, {need / GIB:.3g} GiB: {state / GIB:.3g} for parameters, gradients "
        f"and optimizer, {(need - state) / GIB:.3g} for activations{also}.\n"
        f"      {remedy}"
        "--pipeline-model-parallel-size or --tensor-model-parallel-size, "
        f"{', '.join(others[:-1])}{' or ' * (len(others) > 1)}{others[-1]}."
    )
