"""CUDA graphs of a stage's passes (--cuda-graph-impl): whether a run has any, and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.plan.part import PlanFeature
from megapipe.plan.plan import OfPlan, Plan
from megapipe.schedule import Schedule
from megapipe.schedule.families.offload.rules import MOVES
from megapipe.schedule.families.sharding.runs import GATHERS, REDUCES
from megapipe.schedule.memory.slots import in_flight, splits


def graphs_line(config: Config, table: Schedule, device: str) -> str:
    """Return a line on what --cuda-graph-impl does in this run; "" without the flag.

    Args:
        table: the schedule of the run.
        device: the type of the ranks' devices, "cuda" or "cpu".
    """
    asked = config.parallel.cuda_graph_impl
    if asked == "none":
        return ""
    # A run without a GPU says so first, whatever else stands in the way.
    why = why_not(config, table)
    if device != "cuda":
        why = "CUDA graphs need a GPU"
    if why:
        return f"--cuda-graph-impl {asked}: nothing is captured: {why}"
    return (
        f"--cuda-graph-impl {asked}: after {config.parallel.cuda_graph_warmup_steps} step(s) a "
        "stage's forward is one CUDA graph for each microbatch in flight, and its backward "
        "another; no GPU has run them yet"
    )


def why_not(config: Config, table: Schedule) -> str:
    """Return the first reason why a run on GPUs captures no CUDA graphs; "" if it captures some.

    Args:
        table: the schedule of the run.
    """
    return next(_reasons(config, table), "")


def _reasons(config: Config, table: Schedule) -> Iterator[str]:
    """Yield each reason why passes cannot be captured as CUDA graphs, with its flag.

    A graph replays the same kernels on the same addresses, without the host. So nothing may depend
    on the microbatch.

    Args:
        table: the schedule of the run.
    """
    model = config.model
    par = config.parallel
    data = config.data
    layers = [layer_config(model, layer) for layer in range(model.layers)]
    # First what no table changes: the model, its numbers, its data.
    if config.optimizer.freeze_all_layers:
        yield "nothing is trained (--freeze-all-layers)"
    if model.has_experts:
        yield "the host waits for the number of rows of each expert (--num-experts)"
    if model.fp8_format:
        yield "quantised weights and largest values outlive a pass (--fp8-format)"
    if any(layer.hidden_dropout or layer.attention_dropout for layer in layers):
        yield (
            "each microbatch has dropout masks of its own "
            "(--hidden-dropout 0 --attention-dropout 0 draw none)"
        )
    if model.transformer_impl == "transformer_engine":
        yield (
            "layers of Transformer Engine keep state in Python (--transformer-impl local does not)"
        )
    if par.hides:
        yield (
            "no GPU has shown yet that collectives within passes can be captured "
            "(tensor or context parallelism)"
        )
    if data.reset_attention_mask or data.reset_position_ids:
        yield (
            "documents differ from microbatch to microbatch "
            "(--reset-attention-mask, --reset-position-ids)"
        )
    if model.num_microbatches_with_partial_activation_checkpoints:
        yield (
            "microbatches recompute differently "
            "(--num-microbatches-with-partial-activation-checkpoints)"
        )
    # Then passes that have other inputs than one tensor of hidden states, or that may repeat.
    if table.cuts:
        yield "slices of a microbatch differ (--pipeline-slices)"
    if table.placement.vocabulary or model.depths:
        yield (
            "passes hand over more than hidden states (--vocab-parallel-pipeline, --mtp-num-layers)"
        )
    if not table.kinds.isdisjoint(MOVES):
        yield f"{table.name} moves activations (O, L, R)"
    if par.enable_optimizer_post_validation:
        yield "forwards may run again (--enable-optimizer-post-validation)"
    if table.kinds & (GATHERS | REDUCES) or (par.shards_grads and config.weight_replicas > 1):
        yield f"weights or gradients move between passes ({par.splits_by})"


@dataclass(frozen=True)
class Graphs(OfPlan):
    """The memory of CUDA graphs, as an optional part of a plan.

    Attributes:
        hidden: bytes of the hidden states of a microbatch.
    """

    hidden: float

    def peak(self, plan: Plan, usual: tuple[float, ...]) -> tuple[float, ...]:
        """Return, for each rank, the bytes of its CUDA graphs.

        In the plan these bytes stand in place of the activations. The memory of a graph is never
        given back, and each microbatch in flight has its own graphs.

        Args:
            usual: the peak of each rank's activations without graphs; not used.
        """
        table = plan.schedule
        place = table.placement
        held = plan.costs.memory(place)
        total = [0.0] * place.num_ranks
        for stage, rank in enumerate(place.rank_of):
            # Input, output and their gradients have a buffer each, which replays read and write.
            one = held.b[stage] + held.w[stage] * splits(table, stage) + 4 * self.hidden
            total[rank] += in_flight(table, stage) * one
        return tuple(total)


def _of(config: Config, _: Schedule | None, made: Schedule | None) -> Graphs | None:
    # The number of graphs follows from the finished table.
    if made is None or config.parallel.cuda_graph_impl == "none" or why_not(config, made):
        return None
    tokens = config.batch.tokens
    return Graphs(float(tokens * config.model.hidden * config.precision.element_bytes))


GRAPHS = PlanFeature("graphs", of=_of)
