"""A checkpoint of ours on its way to Megatron-LM, in either format: what there is of it beside tensors."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.checkpoint.save_load import STATE
from megapipe.config import Config
from megapipe.convert.checkpoints import exportable
from megapipe.convert.huggingface.checks import check_ours
from megapipe.convert.tensors import SavedTensors
from megapipe.errors import CheckpointError
from megapipe.optim.lr import LRSchedule, WeightDecay

_ADAM = {True: "Transformer Engine's or Apex's", False: "torch's"}


@dataclass(frozen=True)
class Export:
    """Attributes:
    content: of its state.json.
    steps: of the optimizer; None if its state does not go out.
    fused: is that for Transformer Engine's or Apex's Adam? They have the number of steps in their groups and refuse it
        by parameter, where torch's must have it.
    """

    config: Config
    saved: SavedTensors
    content: dict[str, Any]
    steps: int | None
    fused: bool

    @property
    def iteration(self) -> int:
        return int(self.content["iteration"])

    def common(self, args: dict[str, Any]) -> dict[str, Any]:
        """All that is no tensor of the model and no state. args: the run's arguments."""
        where = self.content["state"]
        more = {
            "iteration": self.content["iteration"],
            "consumed_train_samples": where["consumed_train_samples"],
            "consumed_valid_samples": where["consumed_valid_samples"],
            "skipped_train_samples": 0,
            "no_save_optim": None if self.steps is not None else True,
        }
        return {
            "args": argparse.Namespace(**args | more),
            "checkpoint_version": 3.0,
            "iteration": self.content["iteration"],
            "num_floating_point_operations_so_far": 0,
        }

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters, with weight decay and without."""
        flags, curve = self.config.optimizer, self._curve()
        group = {
            "is_expert_parallel": False,
            "default_config": True,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": curve.lr,
            "min_lr": curve.min_lr,
            "lr": curve.lr,
            "bias_correction": True,
            "betas": (flags.adam_beta1, flags.adam_beta2),
            "eps": flags.adam_eps,
            "step": self.steps,
        }
        return [group | {"wd_mult": wd, "weight_decay": wd * curve.weight_decay.end} for wd in (1.0, 0.0)]

    def scheduler(self) -> dict[str, Any]:
        """The place on the curve of the learning rate."""
        curve, where = self._curve(), self.content["state"]
        return {
            "max_lr": curve.lr,
            "lr_warmup_steps": curve.warmup,
            "num_steps": where["consumed_train_samples"] - where.get("skipped_samples", 0),
            "lr_decay_style": curve.style,
            "lr_decay_steps": curve.decay,
            "min_lr": curve.min_lr,
            "start_wd": curve.weight_decay.start,
            "end_wd": curve.weight_decay.end,
            "wd_incr_style": curve.weight_decay.style,
            "wd_incr_steps": self.config.batch.train_samples or self.config.train_iters * self.config.global_batch_size,
        }

    def notes(self) -> tuple[str, ...]:
        """A line for who loads the optimizer."""
        other = "torch" if self.fused else "fused"
        note = f"the state of {_ADAM[self.fused]} Adam; {_ADAM[not self.fused]} needs --megatron-adam {other}"
        return () if self.steps is None else (note,)

    def _curve(self) -> LRSchedule:
        saved = self.content["opt_param_scheduler"]
        return LRSchedule(**saved | {"weight_decay": WeightDecay.loaded(saved["weight_decay"])})


def opened(folder: Path, target: Path, optimizer: bool, fused: bool | None) -> Export:
    """The checkpoint of a model and an optimizer that Megatron-LM has too.

    Args:
        optimizer: with its state, if the checkpoint has it.
        fused: see Export. Default: with 16-bit weights.
    Raises: CheckpointError for damage, and for others.
    """
    config = exportable(folder, target)
    model, saved = config.model, SavedTensors(folder)
    if model.per_layer_overrides is not None:
        raise CheckpointError(f"{folder.name}: --per-layer-overrides has no like in Megatron-LM")
    if model.depths and model.position_embedding_type == "learned_absolute":
        raise CheckpointError(
            f"{folder.name}: --mtp-num-layers {model.depths} with --position-embedding-type learned_absolute has no "
            "like in Megatron-LM, which refuses it"
        )
    k, groups = model.moe_router_topk, model.moe_router_group_topk
    if groups and model.group_scores != k // groups:
        raise CheckpointError(
            f"{folder.name}: --moe-router-group-score-topk {model.group_scores} has no like in Megatron-LM, whose "
            f"groups count by {k} // {groups} = {k // groups} experts"
        )
    check_ours(saved, model, folder.name)
    content = json.loads((folder / STATE).read_text())
    steps: int | None = content["optimizer_steps"] if optimizer else None
    if steps is not None and (config.optimizer.optimizer != "adam" or config.optimizer.decoupled_lr is not None):
        what = f"--optimizer {config.optimizer.optimizer}" if config.optimizer.optimizer != "adam" else "--decoupled-lr"
        raise CheckpointError(f"{folder.name}: the state under {what} cannot be exported; add --no-load-optim")
    return Export(config, saved, content, steps, config.precision.half if fused is None else fused)
