"""Activation recomputation: what a forward does not keep, and backward computes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import FREE, FROM_1, Idle, Refused, demands, excludes

RECOMPUTED = Idle(
    lambda c: not (c.model.recompute_granularity or c.model.recompute_activations),
    "nothing is computed again, without --recompute-granularity full",
)
OF_FULL = Refused(
    "{} has no effect without --recompute-granularity full. Add it, or leave it out.",
    lambda c: c.model.recompute_selective and c.model.recompute_granularity != "full",
)
Part = Literal["core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj"]
"""A part of a layer, by Megatron-LM's name."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that are computed again in backward. Default: none."""

    # FREE on --load: the same numbers are computed, some of them twice.
    recompute_granularity: Annotated[Literal["full", "selective"] | None, FREE] = None
    """Recompute activations in backward instead of keeping them. full: whole layers. selective:
    the parts in --recompute-modules. Default: keep all."""
    # Megatron-LM's names. moe_act is accepted without effect: experts compute their activation
    # again in any case.
    recompute_modules: Annotated[
        tuple[Part, ...],
        FREE,
        demands(
            "recompute_granularity recompute_activations",
            "selective",
            True,
            says="{} has no effect without --recompute-granularity selective. "
            "Add it, or leave it out.",
        ),
    ] = ("core_attn",)
    """Parts of a layer that selective recomputes. core_attn: attention without its projections.
    mlp: the MLP of dense layers. layernorm: the norms' outputs. moe: the experts and their router.
    shared_experts: the shared experts alone. mla_up_proj: heads from their latents, and attention.
    moe_act: no effect, as activations within experts are never kept."""
    recompute_activations: Annotated[
        bool,
        FREE,
        excludes(
            "recompute_granularity",
            "{} means --recompute-granularity selective, but {} is given",
            where=lambda c: c.model.recompute_granularity == "full",
        ),
    ] = False
    """The same as --recompute-granularity selective."""
    recompute_method: Annotated[Literal["uniform", "block"] | None, FREE, RECOMPUTED, OF_FULL] = (
        None
    )
    """Which layers full recomputes. uniform: all, keeping one input for every
    --recompute-num-layers layers. block: the first --recompute-num-layers of each stage. Default:
    uniform."""
    recompute_num_layers: Annotated[int | None, FROM_1, FREE, RECOMPUTED, OF_FULL] = None
    """Number of layers that --recompute-method counts. Default: 1."""
    num_microbatches_with_partial_activation_checkpoints: Annotated[
        int | None,
        FROM_1,
        FREE,
        demands(
            "recompute_granularity recompute_activations",
            says="{} has no effect where nothing is computed again. "
            "Add --recompute-granularity full.",
        ),
    ] = None
    """Number of microbatches in flight on a stage whose activations are kept; the others are
    recomputed. Default: none is kept. Not in Megatron-LM."""

    @property
    def recompute_selective(self) -> bool:
        """Return whether parts of layers are recomputed."""
        return self.recompute_activations or self.recompute_granularity == "selective"

    @property
    def recompute_attention(self) -> bool:
        """Return whether attention is recomputed in backward, but not its projections."""
        return self.recompute_selective and "core_attn" in self.recompute_modules

    @property
    def recompute_mla_up_proj(self) -> bool:
        """Return whether multi-latent attention is recomputed from its latents in backward."""
        return self.recompute_selective and "mla_up_proj" in self.recompute_modules

    @property
    def recompute_mlp(self) -> bool:
        """Return whether the MLP of dense layers is recomputed."""
        return self.recompute_selective and "mlp" in self.recompute_modules

    @property
    def recompute_moe(self) -> bool:
        """Return whether experts and their router are recomputed."""
        return self.recompute_selective and "moe" in self.recompute_modules

    @property
    def recompute_shared_experts(self) -> bool:
        """Return whether shared experts are recomputed."""
        return self.recompute_selective and "shared_experts" in self.recompute_modules

    @property
    def recompute_norms(self) -> bool:
        """Return whether the outputs of norms are recomputed."""
        return self.recompute_selective and "layernorm" in self.recompute_modules
