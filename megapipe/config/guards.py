"""Checks while a run trains, and conditions under which it stops early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import ABOVE_0, FREE, FROM_0, FROM_1, Idle, Range, excludes, needs

ITERATIONS = Range("at least 1, the first iteration", lambda v: all(x >= 1 for x in v))
COLLECTS = needs("manual_gc", "Python collects when it wants to")
# A hash needs a full tensor that another rank has, too.
_NOT_WHOLE = "{} compares weights that {} leaves no rank whole"


@dataclass(frozen=True)
class GuardConfig:
    """Checks while a run trains, and when it stops early."""

    # Early ends.
    # All of this file is FREE on --load: no flag here changes a number of a sound step.
    exit_interval: Annotated[int | None, FROM_1, FREE] = None
    """Save and stop after the next iteration that is a multiple of this, with exit status 0.
    Default: train to the end."""
    exit_duration_in_mins: Annotated[float | None, ABOVE_0, FREE] = None
    """Save and stop after this many minutes. Default: no limit."""
    exit_signal_handler: Annotated[bool, FREE] = False
    """Save and stop after the iteration in which any rank gets --exit-signal or Ctrl-C. The signal
    again is ignored; a second Ctrl-C ends the run at once."""
    exit_signal: Annotated[
        Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"],
        FREE,
        needs("exit_signal_handler", "no signal is caught"),
    ] = "SIGTERM"
    """Signal that --exit-signal-handler waits for."""
    # Pauses for Python's garbage.
    manual_gc: Annotated[bool, FREE] = False
    """Collect Python's garbage on all ranks at once, around evaluations. Default: each rank when
    Python decides, for which the others wait."""
    manual_gc_interval: Annotated[int, FROM_0, FREE, COLLECTS] = 0
    """Collect garbage after every this many steps too. 0: only around evaluations."""
    no_manual_gc_eval: Annotated[bool, FREE, COLLECTS] = False
    """Do not collect garbage around evaluations."""
    # Wrong numbers.
    iterations_to_skip: Annotated[tuple[int, ...], ITERATIONS, FREE] = ()
    """Iterations, counted from 1, whose samples are passed over without a step. The learning rate
    does not advance."""
    check_weight_hash_across_dp_replicas_interval: Annotated[
        int | None,
        FROM_1,
        FREE,
        Idle(lambda c: c.world_size == 1, "there is no replica, without several ranks"),
        excludes(
            "use_megatron_fsdp use_torch_fsdp2",
            _NOT_WHOLE,
            where=lambda c: c.parallel.shards_weights and c.weight_replicas > 1,
        ),
        excludes("fp8_param_gather", _NOT_WHOLE, where=lambda c: c.gathers_fp8),
    ] = None
    """Compare a hash of all weights with their replicas after every this many steps, and stop if
    they differ. Default: never."""
    no_check_for_nan_in_loss_and_grad: Annotated[bool, FREE] = False
    """Skip the update if loss or gradient is not finite, as a dynamic loss scale does. Default:
    stop the run."""
    # Megatron-LM's rerun_state_machine.
    rerun_mode: Annotated[Literal["disabled", "validate_results"], FREE] = "validate_results"
    """What happens before a run stops for a step that is not finite. validate_results: the step
    runs a second time. disabled: nothing."""
    error_injection_rate: Annotated[
        int,
        FROM_0,
        FREE,
        needs("rerun_mode", "no step is run again", "validate_results"),
    ] = 0
    """For drills: treat one in this many steps as wrong, and run it again before its update. 0:
    none."""
    error_injection_type: Annotated[
        Literal["correct_result", "transient_error", "persistent_error"],
        FREE,
        needs("error_injection_rate", "nothing is injected"),
    ] = "transient_error"
    """Outcome that the second run of --error-injection-rate reports. After a persistent error the
    run stops, as if the step had been wrong twice."""
    check_for_spiky_loss: Annotated[bool, FREE] = False
    """Run a step a second time before its update if its loss is above 10 times the largest of the
    last 100 steps."""
    max_bad_iterations_in_a_row: Annotated[int, FROM_1, FREE] = 10
    """Stop after this many steps in a row that were skipped, or spiked with --check-for-spiky-loss.
    Steps in which a loss scale falls do not count. Not in Megatron-LM."""
