"""Checks of a run on its way, and its ends before the last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import ABOVE_0, FREE, Idle, at_least, excludes, needs


@dataclass(frozen=True)
class GuardConfig:
    """Checks of a run on its way, and when it stops early."""

    exit_interval: Annotated[int | None, at_least(1), FREE] = None
    """Save and stop after an iteration that is a multiple of this, with exit status 0."""
    exit_duration_in_mins: Annotated[float | None, ABOVE_0, FREE] = None
    """Save and stop after this many minutes."""
    exit_signal_handler: Annotated[bool, FREE] = False
    """Save and stop after the iteration in which any rank gets --exit-signal or a first Ctrl-C; repeats are ignored."""
    exit_signal: Annotated[
        Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"],
        FREE,
        needs("exit_signal_handler", "no signal is caught"),
    ] = "SIGTERM"
    """Which signal, with --exit-signal-handler."""
    manual_gc: Annotated[bool, FREE] = False
    """Collect Python's garbage on all ranks at once, around evaluations, and not whenever each wants to."""
    manual_gc_interval: Annotated[int, at_least(0), FREE, needs("manual_gc", "Python collects when it wants to")] = 0
    """Collect it every this many steps too; 0 for never."""
    no_manual_gc_eval: Annotated[bool, FREE, needs("manual_gc", "Python collects when it wants to")] = False
    """Do not collect it around evaluations."""
    check_weight_hash_across_dp_replicas_interval: Annotated[
        int | None,
        at_least(1),
        FREE,
        Idle(lambda c: c.world_size == 1, "there is no replica, without several ranks"),
        excludes(
            "use_megatron_fsdp use_torch_fsdp2",
            "{} compares weights that {} leaves no rank whole",
            where=lambda c: c.parallel.shards_weights and c.weight_replicas > 1,
        ),
        excludes("fp8_param_gather", "{} compares weights that {} leaves no rank whole", where=lambda c: c.gathers_fp8),
    ] = None
    """Compare a hash of all weights over their replicas every this many steps, and stop if they differ."""
    no_check_for_nan_in_loss_and_grad: Annotated[bool, FREE] = False
    """Skip the update at a loss or gradient that is not finite, as a dynamic loss scale does, instead of stopping."""
    rerun_mode: Annotated[Literal["disabled", "validate_results"], FREE] = "validate_results"
    """validate_results: a step that is not finite is run a second time before the run stops for it."""
    error_injection_rate: Annotated[
        int,
        at_least(0),
        FREE,
        needs("rerun_mode", "no step is run again", "validate_results"),
    ] = 0
    """A drill: one in this many steps counts as wrong and is run again before its update; 0 for none."""
    error_injection_type: Annotated[
        Literal["correct_result", "transient_error", "persistent_error"],
        FREE,
        needs("error_injection_rate", "nothing is injected"),
    ] = "transient_error"
    """What the second run shows; after a persistent error the run stops, as if the step had come out wrong twice."""
    check_for_spiky_loss: Annotated[bool, FREE] = False
    """Run a step a second time before its update if its loss is 10 times the largest of the last 100."""
    max_bad_iterations_in_a_row: Annotated[int, at_least(1), FREE] = 10
    """Stop after this many steps in a row that were skipped, or with --check-for-spiky-loss spiked; not while a loss
    scale falls. Not in Megatron-LM."""
