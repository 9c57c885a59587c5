"""The parts of an export to Megatron-LM that are the same in both of its formats.

These are the checks of the checkpoint, and all data other than tensors.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.checkpoint.save_load import STATE
from megapipe.config import Config, ModelConfig
from megapipe.config.model.attention import AttentionConfig
from megapipe.config.model.pattern import PatternConfig
from megapipe.config.model.rotary import RotaryConfig
from megapipe.config.notes import flag, typed
from megapipe.convert.checkpoints import exportable
from megapipe.convert.huggingface.checks import check_ours
from megapipe.convert.tensors import SavedTensors
from megapipe.errors import CheckpointError
from megapipe.optim.lr import LRSchedule, WeightDecay

_FUSED_ADAM = "Transformer Engine's or Apex's"


@dataclass(frozen=True)
class Export:
    """A checkpoint of megapipe, opened for an export to Megatron-LM.

    `common`, `groups` and `scheduler` return the data that Megatron-LM saves besides tensors.
    `notes` returns a line for the user.

    `iteration` is the iteration of the checkpoint.

    Attributes:
        config: the configuration of the run that saved the checkpoint.
        saved: the checkpoint's tensors.
        content: the content of the checkpoint's state.json.
        steps: steps of the optimizer; None if the optimizer's state is not exported.
        fused: whether the state is for Transformer Engine's or Apex's Adam. These need the number
            of steps in param_groups, and fail if it is in the state of parameters. torch's Adam
            needs it in the state of each parameter.
    """

    config: Config
    saved: SavedTensors
    content: dict[str, Any]
    steps: int | None
    fused: bool

    @property
    def iteration(self) -> int:
        """The iteration after which the checkpoint was saved."""
        return int(self.content["iteration"])

    def common(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the run's arguments and progress, as Megatron-LM saves them.

        Args:
            args: the run's arguments by Megatron-LM's names, to which the progress is added.
        Returns: a dict with the keys args, checkpoint_version, iteration and
            num_floating_point_operations_so_far.
        """
        progress = self.content["state"]
        more = {
            "iteration": self.content["iteration"],
            "consumed_train_samples": progress["consumed_train_samples"],
            "consumed_valid_samples": progress["consumed_valid_samples"],
            "skipped_train_samples": 0,
            "no_save_optim": True if self.steps is None else None,
        }
        # Below version 2.0, Megatron-LM's loader would reorder the rows of query, key and value.
        return {
            "args": argparse.Namespace(**args | more),
            "checkpoint_version": 3.0,
            "iteration": self.content["iteration"],
            "num_floating_point_operations_so_far": 0,
        }

    def groups(self) -> list[dict[str, Any]]:
        """Return the settings of the optimizer's two param_groups.

        The first has the matrices, with weight decay. The second has all else, without weight
        decay.
        """
        flags = self.config.optimizer
        curve = self._curve()
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
        # Matrices decay; norms and biases do not.
        decay = curve.weight_decay.end
        return [group | {"wd_mult": wd, "weight_decay": wd * decay} for wd in (1.0, 0.0)]

    def scheduler(self) -> dict[str, Any]:
        """Return the state of Megatron-LM's OptimizerParamScheduler, with lengths in samples."""
        curve = self._curve()
        progress = self.content["state"]
        batch = self.config.batch
        # Megatron-LM's curve stands still in steps that the loss scale skips.
        skipped = progress.get("skipped_samples", 0)
        run_length = batch.train_samples or self.config.train_iters * self.config.global_batch_size
        return {
            "max_lr": curve.lr,
            "lr_warmup_steps": curve.warmup,
            "num_steps": progress["consumed_train_samples"] - skipped,
            "lr_decay_style": curve.style,
            "lr_decay_steps": curve.decay,
            "min_lr": curve.min_lr,
            "start_wd": curve.weight_decay.start,
            "end_wd": curve.weight_decay.end,
            "wd_incr_style": curve.weight_decay.style,
            "wd_incr_steps": run_length,
        }

    def notes(self) -> tuple[str, ...]:
        """Return a line that says which Adam can load the state; none without the state."""
        if self.steps is None:
            return ()
        if self.fused:
            note = f"the state of {_FUSED_ADAM} Adam; torch's needs --megatron-adam torch"
        else:
            note = f"the state of torch's Adam; {_FUSED_ADAM} needs --megatron-adam fused"
        return (note,)

    def _curve(self) -> LRSchedule:
        """Return the learning-rate curve of the run that saved."""
        saved = self.content["opt_param_scheduler"]
        decay = WeightDecay.loaded(saved["weight_decay"])
        return LRSchedule(**saved | {"weight_decay": decay})


def open_export(folder: Path, target: Path, optimizer: bool, fused: bool | None) -> Export:
    """Open a checkpoint whose model and optimizer Megatron-LM has too.

    Args:
        folder: iter_NNNNNNN.
        target: the folder of the export, which must be new or empty.
        optimizer: export the optimizer's state, if the checkpoint has it.
        fused: whether the state is for Transformer Engine's or Apex's Adam, not for torch's. None:
            True for 16-bit weights.
    Raises: CheckpointError if the checkpoint is damaged or Megatron-LM cannot express it.
    """
    config = exportable(folder, target)
    saved = SavedTensors(folder)
    _check_model(config, folder.name)
    # Every name and shape, before the first tensor is read.
    check_ours(saved, config.model, folder.name)
    content = json.loads((folder / STATE).read_text())
    steps: int | None = None
    if optimizer:
        steps = content["optimizer_steps"]
    if steps is not None:
        _check_optimizer(config, folder.name)
    if fused is None:
        fused = config.precision.half
    return Export(config, saved, content, steps, fused)


# The two factors act there only with --use-mup, which changes learning rates too.
_OWN = """
geglu xielu parallel_attention_mlp no_norm_bias add_bias_to latent_norm_epsilon
mup_embedding_mult residual_multiplier mup_output_mult
"""
_CARRIED = ("qk_l2_norm", "attention_output_gate", "rotary_seq_len_interpolation_factor")
"""Variants of attention that Megatron-LM has under the same names."""


def _check_model(config: Config, name: str) -> None:
    """Raise CheckpointError for a model that Megatron-LM does not have.

    Args:
        name: name of the checkpoint, for errors.
    """
    model = config.model
    if model.per_layer_overrides is not None:
        raise CheckpointError(f"{name}: --per-layer-overrides has no equivalent in Megatron-LM")
    for field in _OWN.split():
        if getattr(model, field) != getattr(ModelConfig, field):
            raise CheckpointError(f"{name}: {flag(field)} has no equivalent in Megatron-LM")
    settings = (AttentionConfig, RotaryConfig, PatternConfig)
    names = [name for group in settings for name in group.__dataclass_fields__]
    for field in ("experimental_attention_variant", *names):
        value = getattr(model, field)
        if field in _CARRIED or value == "off-by-one":
            continue
        if value != getattr(ModelConfig, field):
            raise CheckpointError(
                f"{name}: {typed(flag(field), value)} cannot be converted to Megatron-LM's format"
            )
    kind = model.position_embedding_type
    if kind in ("yarn", "longrope"):
        raise CheckpointError(
            f"{name}: --position-embedding-type {kind} cannot be converted to Megatron-LM's format"
        )
    if model.depths and model.position_embedding_type == "learned_absolute":
        raise CheckpointError(
            f"{name}: --mtp-num-layers {model.depths} with --position-embedding-type "
            "learned_absolute has no equivalent in Megatron-LM, which refuses it"
        )
    # Megatron-LM has no flag for the number of experts whose scores make a group's score.
    k = model.moe_router_topk
    groups = model.moe_router_group_topk
    if groups and model.group_scores != k // groups:
        raise CheckpointError(
            f"{name}: --moe-router-group-score-topk {model.group_scores} has no equivalent in "
            f"Megatron-LM, whose groups count by {k} // {groups} = {k // groups} experts"
        )


def _check_optimizer(config: Config, name: str) -> None:
    """Raise CheckpointError for an optimizer whose state Megatron-LM keeps in another form.

    Args:
        name: name of the checkpoint, for errors.
    """
    # Adam's moments are the same in both programs. A decoupled rate makes groups of their own, and
    # the numbers of all parameters follow the groups.
    flags = config.optimizer
    if flags.optimizer != "adam":
        flag = f"--optimizer {flags.optimizer}"
    elif flags.decoupled_lr is not None:
        flag = "--decoupled-lr"
    else:
        return
    raise CheckpointError(f"{name}: the state under {flag} cannot be exported; add --no-load-optim")
