"""Checks of microbatches that are cut in slices along the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config import Config
from megapipe.plan.shapes.slices import FLAG, number_of
from megapipe.schedule import Schedule


def slice_problems(config: Config, name: str, table: Schedule) -> Iterator[str]:
    """Yield problems of flags that do not go with microbatches cut in slices, each with a remedy.

    Args:
        name: the schedule's name.
        table: the schedule, which has slices.
    """
    if table.documents:
        yield (
            f"--pipeline-schedule {name} runs documents in an order of their own, and the "
            "documents of a run begin elsewhere in each microbatch. Write it without --documents; "
            "--pipeline-slice-cuts documents follows a run's."
        )
    par = config.parallel
    model = config.model
    given = f"--pipeline-schedule {name}, which has slices,"
    if par.pipeline_slices:
        given = f"{FLAG} {par.pipeline_slices}"
    # One slice is the whole sequence, which goes with everything.
    if par.pipeline_slices and number_of(config) == 1:
        return
    if par.cuts_at_documents and not config.data.reset_attention_mask:
        yield (
            "--pipeline-slice-cuts documents cuts where attention ends, and without "
            "--reset-attention-mask it goes on. "
            "Add --reset-attention-mask, or use --pipeline-slice-cuts work."
        )
    others = {
        "--vocab-parallel-pipeline": par.vocab_parallel_pipeline,
        "--overlap-moe-expert-parallel-comm": par.overlap_moe_expert_parallel_comm,
        f"--experimental-attention-variant {model.experimental_attention_variant}": model.has_delta,
        f"--model-provider {model.model_provider}": model.model_provider is not None,
    }
    for other, present in others.items():
        if present:
            yield f"{given} does not go with {other}. Leave one of them out."
    if not model.has_experts:
        return
    over = par.expert_model_parallel_size * par.etp
    tokens = par.tensor_model_parallel_size * par.context_parallel_size
    # The experts are on more ranks than one microbatch is: tokens of other data-parallel ranks are
    # gathered too.
    gathers = over > tokens and model.moe_token_dispatcher_type == "allgather"
    if par.cuts_at_documents and gathers:
        yield (
            "--pipeline-slice-cuts documents gives data-parallel ranks slices of other lengths, "
            f"and experts over {over} ranks gather as many tokens of each. "
            "Use --moe-token-dispatcher-type alltoall."
        )
    if model.by_sinkhorn:
        yield (
            f"{given}: sinkhorn chooses by all tokens of a microbatch. "
            "Use --moe-router-load-balancing-type none."
        )
    if model.capacity_factor is not None:
        yield (
            f"{given} would drop tokens by slice and not by microbatch. "
            "Leave out --moe-expert-capacity-factor."
        )
