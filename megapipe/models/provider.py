"""What builds a stage. A model of your own is one function of this type, given to `pretrain`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megapipe.config import ModelConfig
from megapipe.mesh import Axis
from megapipe.models.gpt import GPTModel
from megapipe.pipeline_parallel.partition import LayerSpan

StageProvider = Callable[[ModelConfig, LayerSpan, Axis], nn.Module]
"""(architecture, the stage's share of it, tensor-parallel axis) -> the stage, its parameters not yet initialised."""


def gpt_provider(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    """Our GPT."""
    return GPTModel(config, span, tp)
