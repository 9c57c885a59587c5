"""Run the passes E, S, T and EW of a stage's share of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.distributed.tokens import ahead
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.attributes import attribute_of
from megapipe.pipeline_parallel.loss import ForwardStep, output_of
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.scaling import scaled
from megapipe.tensor_parallel.vocabulary import (
    Kept,
    VocabularyRows,
    add_head_gradient,
    add_rows_gradient,
    look_up,
    share_of_loss,
)

Data = Iterator[Any] | None
FLAG = "--vocab-parallel-pipeline"


class VocabularyShare(nn.Module):
    """One rank's share of the rows of embedding and head, with the methods that its passes call.

    The user's forward_step is called with this module in place of the model. The user's function
    reads a microbatch and calls the module with the tokens, so that `forward` looks them up.
    `look_up`, `give`, `head_gradient` and `rows_gradient` run the passes E, S, T and EW.

    Args:
        module: the stage that has the rows, in `embedding.word_embeddings` and `output_layer`.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func).
        data: the data iterator.
        depths: number of modules of multi-token prediction. Module d reads the microbatch's tokens
            from number d on. The heads of all modules are computed in one pass.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_step: ForwardStep,
        data: Data,
        depths: int = 0,
    ) -> None:
        super().__init__()
        words = _rows(module, "embedding.word_embeddings")
        head = _rows(module, "output_layer")
        self.config = getattr(module, "config", None)
        self._opens = opening(head.tp, getattr(self.config, "sequence_parallel", False))
        # In a tuple, because as attributes they would be registered as modules of the share too.
        self._use = (words, head)
        self._forward_step = forward_step
        self._data = data
        self._depths = depths
        self._read: tuple[Tensor, Tensor] | None = None
        # By microbatch: until EW, until S and until T.
        self._tokens: dict[int, Tensor] = {}
        self._labels: dict[int, Tensor] = {}
        self._kept: dict[int, Kept] = {}

    def forward(
        self,
        tokens: Tensor,
        *_: Any,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        """Return the embeddings of the tokens whose rows are in this share, and store the labels.

        Args:
            tokens: [b, s], global ids.
            labels: [b, s], global ids. None is an error.
            position_ids: not used: the first stage adds embeddings of positions.
        Returns: [s + depths, b, h], zeros for tokens of other shares. Module d of multi-token
            prediction uses the s tokens from number d on.
        Raises: ConfigError without labels.
        """
        # Each rank reads the labels from its own batch, so that nobody has to send them.
        if labels is None:
            raise ConfigError(
                f"{FLAG} needs a forward_step that calls model(tokens, ..., labels=labels)."
            )
        words, head = self._use
        # Counted from this share's first row. Ids below 0 or after the last row are in others.
        own_tokens = F.pad(tokens, (0, self._depths)).t() - words.first
        shifted = [ahead(labels, depth).t().reshape(-1) for depth in range(1 + self._depths)]
        own_labels = torch.cat(shifted) - head.first
        self._read = (own_tokens, own_labels)
        return look_up(own_tokens, words.weight)

    def look_up(self, microbatch: int) -> Tensor:
        """Run pass E: read a microbatch and return its embeddings from this share.

        The result has the shape [s + depths, b, h], as from `forward`.
        """
        with torch.no_grad():
            output, _ = output_of(self._forward_step(self._data, self))
        assert self._read is not None, "forward_step calls its model"
        tokens, self._labels[microbatch] = self._read
        if torch.is_grad_enabled():
            self._tokens[microbatch] = tokens
        self._read = None
        return output

    def give(self, microbatch: int, *hidden: Tensor) -> Tensor:
        """Run pass S: return this share's part of the losses and of the gradients of `hidden`.

        All parts are in one message.

        hidden: last hidden states of the model, then of each multi-token prediction module; [s, b,
            h], or [s/t, b, h] under sequence parallelism over t ranks.
        """
        differentiated = torch.is_grad_enabled()
        labels = self._labels.pop(microbatch)
        with torch.no_grad():
            whole = [self._opens.forward(x).wait() for x in hidden]
            rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in whole])
            rows = scaled(rows, logit_factor(self))
            # An evaluation has no hidden states of depths, whose labels come last.
            labels = labels[: len(rows)]
            weight = self._use[1].weight
            cap = getattr(self.config, "final_logit_softcapping", None)
            share, kept = share_of_loss(
                rows, weight, labels, differentiated=differentiated, cap=cap
            )
        if differentiated:
            self._kept[microbatch] = kept
        return share

    @torch.no_grad()
    def head_gradient(self, microbatch: int, *losses: Tensor) -> None:
        """Run pass T: add the gradient of the head's rows in this share to the weight's main_grad.

        Without main_grad it is added to `.grad`. A frozen weight gets none.

        losses: the messages from pass C, for the model's loss and then for each multi-token
            prediction.
        """
        weight = self._use[1].weight
        kept = self._kept.pop(microbatch)
        if weight.requires_grad:
            add_head_gradient(kept, weight, _main_grad(weight), *losses)

    @torch.no_grad()
    def rows_gradient(self, microbatch: int, *grads: Tensor) -> None:
        """Run pass EW: add the gradient of the embedding's rows in this share to main_grad.

        Without main_grad it is added to `.grad`. A frozen weight gets none.

        grads: gradients of the embedded tokens [s, b, h], for the model and for each multi-token
            prediction module. A module's tensor begins with the gradient of the hidden states, [s +
            s, b, h].
        """
        weight = self._use[0].weight
        tokens = self._tokens.pop(microbatch)
        if not weight.requires_grad:
            return
        length = len(tokens) - self._depths
        for depth, grad in enumerate(grads):
            own = tokens[depth : depth + length]
            add_rows_gradient(own, grad[-length:], _main_grad(weight))


def logit_factor(module: nn.Module) -> float:
    """Return the factor on the input of a stage's head, as --mup-output-mult sets it; else 1."""
    return getattr(attribute_of(module, "config"), "mup_output_mult", 1.0)


def _rows(module: nn.Module, name: str) -> VocabularyRows:
    """Return the submodule called `name`, which has this rank's rows of the vocabulary.

    module: the stage, or a wrapper with the stage as `.module`.
    Raises: ConfigError if there is no such submodule, or if it is no `VocabularyRows`.
    """
    while not hasattr(module, "embedding"):
        inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    try:
        found = module.get_submodule(name)
    except AttributeError:
        found = None
    if not isinstance(found, VocabularyRows):
        raise ConfigError(
            f"{FLAG} shares the vocabulary of megapipe's GPT, and {type(module).__name__} has no "
            f"rows of it in {name}. Leave out {FLAG} or --model-provider."
        )
    return found


def _main_grad(weight: nn.Parameter) -> Tensor:
    """Return the tensor to which a weight's gradients are added.

    This is main_grad, or .grad where no optimizer has made main_grad; .grad is made here if it is
    None.
    """
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is not None:
        return main
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
