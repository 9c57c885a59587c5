"""The tensors of a Hugging Face model that make up each of ours.

Ours have Megatron's names and orders, and a padded vocabulary. The family's table has their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.config.layers import layer_config
from megapipe.convert.huggingface.layouts import ExpertHalves, Experts, Layout
from megapipe.convert.huggingface.tables import FAMILIES
from megapipe.convert.tensors import our_shapes

# Buffers that old files have: causal masks, rotary frequencies.
BUFFERS = re.compile(r"(.*\.)?((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)")
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_DEPTH = re.compile(r"mtp\.layers\.(\d+)\.(mtp_model_layer\.)?")
_VOCABULARY = ("embedding.word_embeddings", "output_layer")
_GPT2 = "transformer."
# Published files of Qwen3.5 have them, where transformers writes a tensor for each expert.
_STACKED: dict[str, Layout] = {
    "mlp.experts.linear_fc1.weight": ExpertHalves("mlp.experts.gate_up_proj"),
    "mlp.experts.linear_fc2.weight": Layout("mlp.experts.down_proj"),
}


@dataclass(frozen=True)
class Tensors:
    """The rule for one tensor of megapipe's: Hugging Face's tensors for it, and the conversion.

    Attributes:
        ours: megapipe's global name of the tensor.
        theirs: Hugging Face's names of the tensors, in the order in which `join` takes these.
        join: Hugging Face's tensors -> megapipe's, in its saved shape.
        split: megapipe's tensor -> Hugging Face's, in the same order.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


def rules(
    model: ModelConfig,
    family: str,
    vocab_size: int,
    *,
    prefix: str = _GPT2,
    stored: Collection[str] = (),
) -> tuple[Tensors, ...]:
    """Return, for every tensor of megapipe's model, how it is made from the family's tensors.

    The same rules also make the family's tensors from megapipe's.

    Args:
        model: megapipe's configuration, with padded_vocab_size.
        family: the model_type.
        vocab_size: number of ids without padding.
        prefix: the start of GPT-2's names; empty in its oldest files.
        stored: names of the tensors in the family's file, which may have all experts of a layer in
            one tensor; empty if there is no file yet.
    """
    table = FAMILIES[family]
    names = dict(table.names)
    one_by_one = isinstance(names.get("mlp.experts.linear_fc1"), Experts)
    if one_by_one and any(name.endswith(".mlp.experts.gate_up_proj") for name in stored):
        names |= _STACKED

    def rule(ours: str) -> Tensors:
        if depth := _OF_DEPTH.match(ours):
            # Depths are numbered on after the model's layers.
            number = model.layers + int(depth[1])
            inner = ours[depth.end() :]
            return replace(rule(f"decoder.layers.{number}.{inner}"), ours=ours)
        before = ""
        inner = ours
        own = model
        if found := _IN_LAYER.fullmatch(ours):
            number, inner = int(found[1]), found[2]
            before = table.layer.format(n=number)
            # A layer may have other heads than the rest.
            own = layer_config(model, number)
        # A name with its kind, such as a router's bias, is looked up before the module.
        module, _, kind = inner.rpartition(".")
        kind = "" if inner in names else f".{kind}"
        layout = names[module if kind else inner]
        theirs = [f"{before}{name}{kind}" for name in layout.parts(own)]
        if not prefix:
            theirs = [name.removeprefix(_GPT2) for name in theirs]
        if module in _VOCABULARY:
            # Their files have no padding.
            rows = model.padded_vocab_size or vocab_size
            return Tensors(
                ours,
                tuple(theirs),
                lambda x: pad_rows(x[0], rows, vocab_size),
                lambda x: (x[:vocab_size],),
            )
        return Tensors(
            ours,
            tuple(theirs),
            lambda x: layout.join(x, own),
            lambda x: layout.split(x, own),
        )

    return tuple(map(rule, our_shapes(model)))


def pad_rows(x: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Return a vocabulary's matrix padded to `rows` rows. Each new row is the mean of the old rows.

    A row of zeros has logit 0, which wins wherever a model's real logits are far below 0, as
    GPT-2's are. The mean row's logit is the mean logit. By Jensen the softmax's denominator thus
    grows by at most the share of padding.

    Args:
        x: [vocab_size, h], or a bias [vocab_size].
    """
    if rows == vocab_size:
        return x
    mean = x.mean(0, keepdim=True, dtype=torch.float32).to(x.dtype)
    return torch.cat((x, mean.expand(rows - vocab_size, *x.shape[1:])))
