"""A run that is saved and goes on elsewhere. Not in a test file: the processes of rank_pool find it by name."""

from megapipe.checkpoint.save_load import load_checkpoint, save_checkpoint
from tools.proofs.equivalence import Outcome, Training


def go_on(before, after, first, then, root):
    """The outcome of two steps as the case `first` and the last as `then`, each in its mesh, a checkpoint between."""
    start = Training(before, first)
    results = [start.step(0), start.step(1)]
    state = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
    folder = save_checkpoint(root, 2, start.stages, start.optimizer, state, start.config, before)

    training = Training(after, then)
    training.step(0)  # what is loaded must replace all that this has changed
    gradients = training.gradients()
    load_checkpoint(folder, training.stages, training.optimizer, training.config, after)
    results.append(training.step(2))
    losses = [*(result.losses["lm loss"] for result in results), training.validation_loss()]
    norms, tokens = [result.grad_norm for result in results], [result.routed.tokens for result in results]
    return Outcome(losses, norms, gradients, training.weights(), [], tokens)
