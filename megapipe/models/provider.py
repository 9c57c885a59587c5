"""Model providers: functions that build one pipeline stage.

A model of your own is one function, given to `pretrain` or named by --model-provider. Two
signatures are accepted: (config, span, tp), and Megatron-LM's model_provider(pre_process,
post_process, vp_stage).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from torch import nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.models.gpt import GPTModel
from megapipe.named import find_named
from megapipe.partition.spans import LayerSpan

StageProvider = Callable[[ModelConfig, LayerSpan, Axis], nn.Module]
"""(model configuration, the stage's layers, tensor-parallel axis) -> the stage, uninitialised."""
Provider = Callable[..., nn.Module]
"""A StageProvider, or a function with Megatron-LM's signature."""
FLAG = "--model-provider"


def gpt_provider(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    """Build a stage of megapipe's own GPT, with the layers, embedding and loss of `span`."""
    return GPTModel(config, span, tp)


def stage_provider(provider: Provider, own: Sequence[LayerSpan] = ()) -> StageProvider:
    """Return the provider as a function (config, span, tp) -> stage.

    Args:
        provider: such a function, or one with a parameter `pre_process`, as in Megatron-LM. The
            latter is called with the keywords that its signature names, among pre_process,
            post_process, vp_stage, config, span and tp.
        own: the spans of this rank's stages in order. A stage's position among them is its
            vp_stage; vp_stage is None on a rank with a single stage.
    Returns: the function. One with `pre_process` raises ConfigError for a stage of multi-token
        prediction.
    """
    names = inspect.signature(provider).parameters
    # Both kinds are plain functions; only the parameter's name tells one from the other.
    if "pre_process" not in names:
        return provider

    def adapted(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        if span.depth:
            raise ConfigError(
                f"--mtp-num-layers {config.depths}: depths are stages of their own, and a provider "
                "in Megatron-LM's signature has no argument for them. Write it as "
                "(config, span, tp), or leave the flag out."
            )
        keywords = {
            "pre_process": span.embedding,
            "post_process": span.loss,
            "vp_stage": own.index(span) if len(own) > 1 and span in own else None,
            "config": config,
            "span": span,
            "tp": tp,
        }
        # Megatron-LM's providers do not all take vp_stage.
        return provider(**{name: value for name, value in keywords.items() if name in names})

    return adapted


def find_provider(name: str) -> Provider:
    """Import the function that MODULE:NAME or FILE.py:NAME names.

    Raises: ConfigError if there is no such module or function, or if the function takes neither
    (config, span, tp) nor (pre_process, post_process, vp_stage=None). Of the latter only
    `pre_process` is looked for.
    """
    try:
        found = find_named(name, FLAG, "my_model:provider")
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {error}") from None
    signature = inspect.signature(found)
    try:
        if "pre_process" not in signature.parameters:
            signature.bind(None, None, None)
    except TypeError:
        raise ConfigError(
            f"{FLAG} {name} takes {signature}, but a provider takes (config, span, tp) or "
            "(pre_process, post_process, vp_stage=None)"
        ) from None
    return found  # type: ignore[no-any-return]
