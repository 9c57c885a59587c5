"""The model of a run. A group of settings is a file here, and `ModelConfig` inherits from each.

A new setting goes to the file of its subject. A new subject is a file and one of the bases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megapipe.config.model.architecture import ArchitectureConfig
from megapipe.config.model.attention import AttentionConfig
from megapipe.config.model.delta import DeltaConfig
from megapipe.config.model.fp8 import SHARED_SCALES, FP8Config
from megapipe.config.model.mla import MLAConfig
from megapipe.config.model.moe import MoEConfig
from megapipe.config.model.mtp import MTPConfig
from megapipe.config.model.pattern import PatternConfig
from megapipe.config.model.recompute import RecomputeConfig
from megapipe.config.model.rotary import LongRopeConfig, RotaryConfig
from megapipe.config.model.stream import StreamConfig
from megapipe.config.notes import FREE, MUST, NO_FLAG, needs


# A dataclass lists the fields of its last base first: --help and the log follow this order.
@dataclass(frozen=True)
class ModelConfig(
    RecomputeConfig,
    DeltaConfig,
    AttentionConfig,
    StreamConfig,
    PatternConfig,
    LongRopeConfig,
    RotaryConfig,
    ArchitectureConfig,
    MTPConfig,
    FP8Config,
    MoEConfig,
    MLAConfig,
):
    """The architecture, and how its layers compute. Nothing about layout, data or training.

    `has_bias` says whether a matrix has a bias. `temperature` returns how queries grow with their
    positions, and `expert_ffn` the width of an expert.
    """

    sequence_parallel: Annotated[
        bool, FREE, needs("tensor_model_parallel_size", "there is nothing to share", least=2)
    ] = False
    """Split the sequence over tensor-parallel ranks outside of attention and MLP, which divides
    the activations there by the tensor-parallel size."""
    tp_comm_overlap: Annotated[
        bool, FREE, SHARED_SCALES, needs("tensor_model_parallel_size", "nothing is sent", least=2)
    ] = False
    """Overlap tensor-parallel messages with products: multiply the rows at hand while rows of
    other ranks arrive."""
    compile: Annotated[bool, FREE] = False
    """Compile the element-wise parts of layers with torch.compile. Results are equal up to
    rounding. Not in Megatron-LM."""
    per_layer_overrides: Annotated[str | None, MUST] = None
    """Layers with settings of their own: a JSON file or its text, from layers to fields, such as
    {"0-3,7": {"ffn_hidden_size": 512}}. Not in Megatron-LM."""
    no_attention: Annotated[bool, NO_FLAG, MUST] = False
    """This layer has no attention. Only in --per-layer-overrides."""
    no_mlp: Annotated[bool, NO_FLAG, MUST] = False
    """This layer has no MLP. Only in --per-layer-overrides."""

    def has_bias(self, matrix: str) -> bool:
        """Return whether a weight matrix has a bias: qkv, or one of --add-bias-to."""
        if matrix == "qkv":
            return self.bias or self.add_qkv_bias
        return matrix in self.add_bias_to or (self.bias and matrix != "head")

    @property
    def temperature(self) -> tuple[float, int, int] | None:
        """The growth of queries by their positions; None without it.

        (beta, length, position of the first token) in 1 + beta ln(1 + floor(position / length)).
        """
        if self.position_embedding_type == "yarn" and self.yarn_temperature_beta:
            return self.yarn_temperature_beta, self.yarn_original_max_position_embeddings, 0
        if not self.rotates and self.attention_temperature_beta:
            return self.attention_temperature_beta, self.attention_temperature_length, 1
        return None

    @property
    def expert_ffn(self) -> int:
        """Width of an expert: number of channels between its two linear layers.

        With a gate, gate and up have this width each.
        """
        return self.moe_ffn_hidden_size or self.ffn
