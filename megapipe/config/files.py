"""What a run reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer, and its files."""

    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer. Default: GPT2BPETokenizer with --vocab-file, else SentencePieceTokenizer."""
    tokenizer_model: str | None = None
    """File of a SentencePiece model or of TikTokenizer; Hugging Face folder or tokenizer.json."""
    vocab_file: str | None = None
    """vocab.json of the GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt of the GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Ids of the NullTokenizer, or of TikTokenizer with its special ones."""
    null_tokenizer_eod_id: int | None = None
    """Id that ends a document under the NullTokenizer. Default: the last."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """HuggingFaceTokenizer: a text gets no ids around it, such as one that begins a sequence."""
    tiktoken_pattern: Literal["v1", "v2"] = "v2"
    """How TikTokenizer cuts a text before it merges pairs."""
    tiktoken_num_special_tokens: int = 1000
    """Ids of TikTokenizer before its first byte string."""

    @property
    def tokenizer(self) -> str:
        """The kind, by one name each."""
        if self.tokenizer_type is None:
            return "GPT2BPETokenizer" if self.vocab_file or self.merge_file else "SentencePieceTokenizer"
        alias = self.tokenizer_type in ("GPTSentencePieceTokenizer", "Llama2Tokenizer")
        return "SentencePieceTokenizer" if alias else self.tokenizer_type


@dataclass(frozen=True)
class DataConfig(TokenizerConfig):
    """Tokens, where they come from and in which order."""

    data_path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair; or weight prefix weight prefix ...; or prefixes alone, each sample once."""
    data_args_path: str | None = None
    """File that holds what --data-path would."""
    train_data_path: tuple[str, ...] = ()
    """Data to train on, as in --data-path, where each part has files of its own instead of --split."""
    valid_data_path: tuple[str, ...] = ()
    """Data of the validation, likewise."""
    test_data_path: tuple[str, ...] = ()
    """Data of the test, likewise."""
    per_split_data_args_path: str | None = None
    """JSON file that holds what these three would: {"train": [...], "valid": [...], "test": [...]}."""
    split: str | None = None
    """Proportions of train, validation and test, such as 969,30,1 (the default with --data-path)."""
    data_cache_path: str | None = None
    """Folder that keeps the sample indices for the next start. Default: they are computed anew."""
    mock_data: bool = False
    """Synthetic tokens, no files; with --tokenizer-type NullTokenizer --vocab-size N."""
    num_workers: int = 2
    """Background threads that read ahead; 0 reads in the training loop."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: in the order of the sample index. cyclic: shuffled anew each epoch."""
    no_data_sharding: bool = False
    """Of cyclic: shuffle all samples together, instead of a part of them for each data-parallel rank."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    reset_position_ids: bool = False
    """Positions, learned or rotary, start again at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """A token attends only to tokens of its own document."""
    eval_iters: int = 100
    """Batches per evaluation; with 0 or -1 nothing is evaluated."""
    eval_global_batch_size: int | None = None
    """Sequences of a batch of the evaluation. Default: --global-batch-size."""
    eval_micro_batch_size: int | None = None
    """Sequences of its microbatches. Default: --micro-batch-size."""
    eval_interval: int | None = None
    """Evaluate every so many steps."""
    start_eval_at_iter: int | None = None
    """From this step on. Default: from the first."""
    skip_train: bool = False
    """Train nothing: evaluate what --load gives on validation and test data, each from its first sample."""

    @property
    def eval_batches(self) -> int:
        """Per evaluation."""
        return max(0, self.eval_iters)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = None
    """Folder for checkpoints."""
    save_interval: int | None = None
    """Save every so many steps."""
    save_retain_interval: int | None = None
    """Keep of this run's checkpoints those of every so many steps and the newest; each removal is a line of the log."""
    save_keep_last: int | None = None
    """Keep so many of the newest checkpoints; remove others of this run, but those of --save-retain-interval."""
    save_remove_earlier: bool = False
    """Let these two remove checkpoints of earlier runs too, not only what this run saved or resumed from."""
    save_failure: Literal["stop", "continue"] = "stop"
    """What becomes of the run when a checkpoint cannot be saved; continue: an alarm, and the next save tries again."""
    load: str | None = None
    """Folder to resume from; without a checkpoint in it the run starts fresh."""
    exit_on_missing_checkpoint: bool = False
    """Stop if --load holds no checkpoint."""
    ckpt_step: int | None = None
    """Load this iteration instead of the newest."""
    override_on_load: tuple[str, ...] = ()
    """Settings that may differ from those the checkpoint was trained with, such as: seq-length seed data-path."""
    use_checkpoint_args: bool = False
    """Take the architecture from the checkpoint, if there is one, instead of the flags."""
    finetune: bool = False
    """Load the weights only and start at iteration 0."""
    no_save_optim: bool = False
    """Leave the optimizer state out."""
    no_load_optim: bool = False
    """Do not load the optimizer state."""
    trigger_path: str | None = None
    """Folder looked into every --log-interval steps: a file `save` or `exit` there is removed and obeyed."""
    async_save: bool = False
    """Copy a checkpoint into shared memory and let a process beside each rank write it; the run's first waits."""


@dataclass(frozen=True)
class LogConfig:
    """Console, TensorBoard, profiler."""

    log_interval: int = 100
    """Print a line every so many steps."""
    log_format: Literal["megatron", "short"] = "megatron"
    """megatron: its line, our fields behind. short: one of 80 characters, and metrics of your own."""
    log_throughput: bool = False
    """TFLOP/s per device in its field of Megatron's line, and in TensorBoard as `throughput`."""
    log_progress: bool = False
    """Append to progress.txt in the folder of --save when a job starts and when it saves: throughput, FLOPs, tokens."""
    timing_log_level: Literal[0, 1, 2] = 0
    """1: with every line the time of a step's passes and of its update, over all ranks. 2: also what the passes did."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Of the ranks: the most, the least and the most, or each."""
    log_timers_to_tensorboard: bool = False
    """The timers of --timing-log-level in TensorBoard too: the most of all ranks, in seconds."""
    log_straggler: bool = False
    """With every line the slowest stage and rank, also while it is not slow enough to be named."""
    device_peak_tflops: float | None = None
    """Of one device, for the MFU. Default: of dense 16-bit products by its data sheet, where the device is known."""
    metrics_file: str | None = None
    """Append a JSON object of every step to this file; every step's passes are then collected."""
    moe_per_layer_logging: bool = False
    """Routers' losses of each layer in TensorBoard, and with --metrics-file the load of each expert."""
    log_params_norm: bool = False
    """Norm of the parameters in the line."""
    log_num_zeros_in_grad: bool = False
    """Count of zeros in the gradient in the line."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = 1
    """Write to TensorBoard every so many steps."""
    tensorboard_queue_size: int = 1000
    """Events held back before a write."""
    wandb_project: str | None = None
    """Project of Weights & Biases that gets the same scalars; WANDB_MODE=offline keeps them on disk."""
    wandb_exp_name: str | None = None
    """Name of the run there."""
    wandb_entity: str | None = None
    """Whose project it is."""
    wandb_save_dir: str | None = None
    """Folder for its files. Default: wandb in that of --save."""
    log_validation_ppl_to_tensorboard: bool = False
    """Validation perplexity in TensorBoard too."""
    log_world_size_to_tensorboard: bool = False
    """World size in TensorBoard too."""
    log_memory_to_tensorboard: bool = False
    """Device memory in TensorBoard too (GPU only)."""
    profile: bool = False
    """Record the steps of the window below, with --use-pytorch-profiler."""
    use_pytorch_profiler: bool = False
    """One Perfetto-readable trace per rank, torch_profile/rank-N.json.gz beside --tensorboard-dir."""
    pytorch_profiler_collect_shapes: bool = False
    """Shapes of tensors in the trace."""
    pytorch_profiler_collect_callstack: bool = False
    """Lines of Python in the trace."""
    profile_step_start: int = 10
    """First step of the window."""
    profile_step_end: int = 12
    """Step at which the window closes."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks to profile. Default: all."""
