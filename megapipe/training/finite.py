"""A run whose numbers are not finite is ended in one sentence, unless it is to skip such steps."""

from __future__ import annotations

from megapipe.config import TrainConfig
from megapipe.errors import TrainingError
from megapipe.training.step import StepResult


def stop_if_not_finite(result: StepResult, train: TrainConfig, iteration: int, last_saved: int) -> None:
    """Raises: TrainingError for a step that was skipped for another reason than a dynamic loss scale."""
    if result.skipped and not (train.no_check_for_nan_in_loss_and_grad or train.dynamic_loss_scale):
        loss = "" if result.finite else " (the loss that is differentiated is not finite)"
        raise TrainingError(
            f"iteration {iteration}: loss {result.losses}{loss}, gradient norm {result.grad_norm}. "
            f"Nothing was updated. {_before(last_saved)}Lower --lr, or skip such iterations with "
            "--no-check-for-nan-in-loss-and-grad."
        )


def _before(last_saved: int) -> str:
    """What is known of the checkpoint that a run goes back to when a number is not finite."""
    if not last_saved:
        return ""
    return (
        f"The checkpoint of iteration {last_saved} may already be bad: weights can break an iteration before a loss "
        "shows it. If this comes again from there, go back further with --ckpt-step. "
    )
