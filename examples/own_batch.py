"""A batch of your own: a weight for the loss of each token, and a sample's own vector for a layer in the middle."""

from typing import Any

import numpy as np
from torch import Tensor, nn

from megapipe.config import Config
from megapipe.data.build import Datasets, build_datasets
from megapipe.flags.parse import parse
from megapipe.models.gpt import GPTModel
from megapipe.models.layer import TransformerLayer
from megapipe.training.forward_step import loss_func
from megapipe.training.hooks import Hooks
from megapipe.training.pretrain import pretrain

AT = 1  # the layer that is told the vector
HOOKS = Hooks(reads_on=lambda span: AT in span.layers)


class Told(TransformerLayer):
    vector: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.vector)  # [s, b, h] + [b, h]


def provider(config: Any, span: Any, tp: Any) -> nn.Module:
    return GPTModel(config, span, tp, layer=lambda c, t, n: (Told if n == AT else TransformerLayer)(c, t, n))


class More:
    def __init__(self, of: Any, width: int) -> None:
        self.of, self.vectors = of, np.random.default_rng(0).standard_normal((4, width), np.float32)

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        ids = self.of[sample]
        return {"tokens": ids, "weight": np.float32(0.25 + ids[1:] % 2), "vector": self.vectors[sample % 4]}


def datasets(config: Any, tokenizer: Any) -> Datasets:
    parts = vars(build_datasets(config, tokenizer))
    return Datasets(**{name: part and More(part, config.model.hidden) for name, part in parts.items()})


def forward_step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    if data_iterator is None:
        return model(), None
    batch = next(data_iterator)
    for told in (part for part in model.modules() if isinstance(part, Told)):
        told.vector = batch.more["vector"]
    return model(batch.tokens, batch.position_ids, labels=batch.labels), lambda x: loss_func(batch.more["weight"], x)


if __name__ == "__main__":
    pretrain(parse(Config), provider, forward_step, datasets, HOOKS)
