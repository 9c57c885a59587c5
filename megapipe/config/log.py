"""The reports of a run: the log, TensorBoard, Weights & Biases, metrics files and profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.model.moe import EXPERTS
from megapipe.config.notes import ABOVE_0, ANY, FROM_0, FROM_1, needs

DRAWN = needs("tensorboard_dir wandb_project", "nothing is drawn")
SENT = needs("wandb_project", "nothing is sent")
PROFILER = needs("use_pytorch_profiler", "nothing is recorded")
PROFILE = needs("profile", "nothing is recorded")


@dataclass(frozen=True)
class LogConfig:
    """The log, TensorBoard, Weights & Biases, and the profiler."""

    # Lines of the log, and files of metrics.
    # Notes for --load are missing on purpose: how a run reports may always change.
    log_interval: Annotated[int, FROM_1] = 100
    """Print a line after every this many steps, and after the first."""
    log_format: Literal["auto", "megatron", "short"] = "auto"
    """Form of the line. megatron: Megatron-LM's, followed by megapipe's own fields. short: for
    people, as wide as the terminal. auto: short on a terminal, else megatron. Not in
    Megatron-LM."""
    log_throughput: bool = False
    """Report TFLOP/s per device, in its field of Megatron-LM's line and in TensorBoard as
    `throughput`."""
    log_progress: Annotated[bool, needs("save", "there is no folder for progress.txt")] = False
    """Append to progress.txt in the folder of --save when a job starts and at each save:
    throughput, FLOPs and tokens."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Report times with every line. 0: none. 1: a step's passes and its update, over all ranks. 2:
    also computation in the passes, and waits for messages and samples."""
    timing_log_option: Annotated[
        Literal["max", "minmax", "all"],
        needs("timing_log_level", "no timers are reported", 1, 2),
    ] = "minmax"
    """Which rank's times are reported: the longest, the shortest and longest, or all."""
    log_timers_to_tensorboard: Annotated[
        bool,
        needs("timing_log_level", "iteration-time alone is in TensorBoard", 1, 2),
        DRAWN,
    ] = False
    """Write the timers of --timing-log-level to TensorBoard, the longest time of all ranks in
    seconds."""
    log_straggler: bool = False
    """Name the slowest stage and rank with every line, even if they are not slow enough for a
    warning."""
    device_peak_tflops: Annotated[float | None, ABOVE_0] = None
    """Peak TFLOP/s of one device, for the model FLOPs utilization (MFU). Default: its data sheet's
    value for dense 16-bit products, where the device is known. Not in Megatron-LM."""
    metrics_file: str | None = None
    """File to append a JSON object to after every step. The times of all passes are then collected
    every step. Default: none. Not in Megatron-LM."""
    moe_per_layer_logging: Annotated[
        bool, EXPERTS, needs("tensorboard_dir wandb_project metrics_file", "it is shown nowhere")
    ] = False
    """Write the routers' losses of each layer to TensorBoard, and with --metrics-file the load of
    each expert."""
    # Boards.
    log_params_norm: bool = False
    """Report the norm of the parameters in the line."""
    log_num_zeros_in_grad: bool = False
    """Report the number of zeros in the gradient in the line."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard's files. Default: write none."""
    tensorboard_log_interval: Annotated[int, FROM_1, DRAWN] = 1
    """Write to TensorBoard after every this many steps."""
    tensorboard_queue_size: Annotated[
        int, FROM_1, needs("tensorboard_dir", "nothing is held back")
    ] = 1000
    """Number of TensorBoard events that are collected before a write."""
    wandb_project: str | None = None
    """Project of Weights & Biases that gets the scalars of TensorBoard. WANDB_MODE=offline keeps
    them on disk. Default: send none."""
    wandb_exp_name: Annotated[str | None, SENT] = None
    """Name of the run in Weights & Biases. Default: its own choice."""
    wandb_entity: Annotated[str | None, SENT] = None
    """User or team that owns the project in Weights & Biases. Default: yours."""
    wandb_save_dir: Annotated[str | None, SENT] = None
    """Folder for the files of Weights & Biases. Default: wandb in the folder of --save, without it
    in the current one."""
    log_validation_ppl_to_tensorboard: Annotated[bool, DRAWN] = False
    """Write the perplexity of validations to TensorBoard."""
    log_world_size_to_tensorboard: Annotated[bool, DRAWN] = False
    """Write the number of processes to TensorBoard."""
    log_memory_to_tensorboard: Annotated[bool, DRAWN] = False
    """Write the device's memory to TensorBoard. GPU only."""
    # Profiles.
    profile: Annotated[bool, PROFILER] = False
    """Record the steps from --profile-step-start to --profile-step-end, with
    --use-pytorch-profiler."""
    use_pytorch_profiler: Annotated[bool, PROFILE] = False
    """Write a trace of each rank that Perfetto reads: torch_profile/rank-N.json.gz next to
    --tensorboard-dir, or in the current folder without it."""
    pytorch_profiler_collect_shapes: Annotated[bool, PROFILER, PROFILE] = False
    """Record the shapes of tensors in the trace."""
    pytorch_profiler_collect_callstack: Annotated[bool, PROFILER, PROFILE] = False
    """Record the lines of Python in the trace."""
    profile_step_start: Annotated[int, FROM_0, PROFILER, PROFILE] = 10
    """First step that is recorded, counted from 0: with 10 the first trace is of iteration 11."""
    # ANY: only together with the start can it be judged, see checks.inputs.
    profile_step_end: Annotated[int, ANY, PROFILER, PROFILE] = 12
    """Step at which recording ends, counted from 0; it is not recorded."""
    profile_ranks: Annotated[tuple[int, ...], ANY, PROFILER, PROFILE] = ()
    """Ranks to record. Default: all."""

    @property
    def has_board(self) -> bool:
        """Return whether scalars go to TensorBoard or to Weights & Biases."""
        return bool(self.tensorboard_dir or self.wandb_project)
