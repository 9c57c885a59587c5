"""The work of the output head, with the norm before it and the loss."""

from __future__ import annotations

from megapipe.config import ModelConfig
from megapipe.plan.layers.load import RankLoad, norm_size
from megapipe.plan.layers.work import Work
from megapipe.plan.sizes import BLOCK_ELEMENTS_GPU, KEPT_ELEMENTS


def head_work(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work of the output head with the norm before it and the loss.

    Args:
        load: the tokens of a microbatch on one rank, and the ranks that split a layer.
    """
    h = model.hidden
    vocab = model.padded_vocab_size or 0
    product = 2.0 * load.tokens * h * vocab
    parameters = h * vocab + norm_size(model, h) + vocab * model.has_bias("head")
    fused = model.cross_entropy_loss_fusion
    # A fused loss keeps the logits of a small microbatch, and makes others again in backward.
    again = 0.0
    logits = load.tokens * vocab / load.tp
    if fused and logits > KEPT_ELEMENTS:
        vocab = 0
        again = product
    held = load.bytes(2 * h, vocab)
    if fused:
        # The input's gradient is summed in float32, block by block of the logits.
        passing = 4.0 * load.tokens * h
        if again:
            passing += load.element * min(logits, BLOCK_ELEMENTS_GPU)
    else:
        # The softmax in float32 takes the place of the logits. Forward has both for a moment, and
        # backward the softmax and the gradient of the logits.
        capped = model.final_logit_softcapping is not None
        held = load.bytes(2 * h, vocab * capped) + 4 * logits
        passing = load.element * logits
    kept = load.bytes(h, vocab)
    return Work(product, product + again, product, held, kept, parameters, passing=passing)
