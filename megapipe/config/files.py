"""Files that a run reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.moe import EXPERTS
from megapipe.config.notes import ABOVE_0, ANY, CONTENTS, FREE, NAMED, Idle, Refused, at_least, demands, excludes, needs

SAVES, LOADS = needs("save", "nothing is saved"), needs("load", "nothing is loaded")
EVALUATES = Idle(
    lambda c: c.data.eval_interval is None and not c.data.skip_train, "nothing is evaluated, without --eval-interval"
)
HAS_BATCHES = needs("eval_iters", "nothing is evaluated", least=1)
DRAWN = needs("tensorboard_dir wandb_project", "nothing is drawn")
SENT = needs("wandb_project", "nothing is sent")
PROFILER = needs("use_pytorch_profiler", "nothing is recorded")
PROFILE = needs("profile", "nothing is recorded")
NULL, GPT2, TIK, HUGGING = "NullTokenizer", "GPT2BPETokenizer", "TikTokenizer", "HuggingFaceTokenizer"
OTHER_FILES = Idle(lambda c: c.data.tokenizer in (NULL, GPT2), "it is not read, without a tokenizer that reads it")

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
]


def of_tokenizer(instead: str, *kinds: str) -> Idle:
    """Setting of these kinds of tokenizer alone."""
    return Idle(lambda c: c.data.tokenizer not in kinds, f"{instead}, without {' or '.join(kinds)}")


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: Annotated[TokenizerType | None, NAMED] = None
    """Kind of tokenizer. Default: GPT2BPETokenizer with --vocab-file, else SentencePieceTokenizer."""
    tokenizer_model: Annotated[str | None, CONTENTS, OTHER_FILES] = None
    """File of a SentencePiece model or of TikTokenizer; Hugging Face folder or tokenizer.json."""
    vocab_file: Annotated[str | None, CONTENTS, of_tokenizer("it is not read", GPT2)] = None
    """vocab.json of the GPT2BPETokenizer."""
    merge_file: Annotated[str | None, CONTENTS, of_tokenizer("it is not read", GPT2)] = None
    """merges.txt of the GPT2BPETokenizer."""
    vocab_size: Annotated[int | None, at_least(1), NAMED, of_tokenizer("the tokenizer knows its size", NULL, TIK)] = (
        None
    )
    """Ids of the NullTokenizer, or of TikTokenizer with its special ones."""
    null_tokenizer_eod_id: Annotated[int | None, ANY, NAMED, of_tokenizer("it has its own", NULL)] = None
    """Id that ends a document under the NullTokenizer. Default: the last."""
    tokenizer_hf_no_include_special_tokens: Annotated[bool, NAMED, of_tokenizer("a text gets none", HUGGING)] = False
    """HuggingFaceTokenizer: a text gets no ids around it, such as one that begins a sequence."""
    tiktoken_pattern: Annotated[Literal["v1", "v2"], NAMED, of_tokenizer("there is nothing to cut", TIK)] = "v2"
    """How TikTokenizer cuts a text before it merges pairs."""
    tiktoken_num_special_tokens: Annotated[int, ANY, NAMED, of_tokenizer("there is nothing to cut", TIK)] = 1000
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

    data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Prefix of a .bin/.idx pair; or weight prefix weight prefix ...; or prefixes alone, each sample once."""
    data_args_path: Annotated[str | None, CONTENTS] = None
    """File that holds what --data-path would."""
    train_data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Data to train on, as in --data-path, where each part has files of its own instead of --split."""
    valid_data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Data of the validation, likewise."""
    test_data_path: Annotated[tuple[str, ...], CONTENTS] = ()
    """Data of the test, likewise."""
    per_split_data_args_path: Annotated[str | None, CONTENTS] = None
    """JSON file that holds what these three would: {"train": [...], "valid": [...], "test": [...]}."""
    split: Annotated[str | None, NAMED] = None
    """Proportions of train, validation and test, such as 969,30,1 (the default with --data-path)."""
    data_cache_path: Annotated[str | None, FREE] = None
    """Folder that keeps the sample indices for the next start. Default: they are computed anew."""
    mock_data: Annotated[bool, NAMED] = False
    """Synthetic tokens, no files; with --tokenizer-type NullTokenizer --vocab-size N."""
    num_workers: Annotated[int, at_least(0), FREE] = 2
    """Background threads that read ahead; 0 reads in the training loop."""
    dataloader_type: Annotated[Literal["single", "cyclic"], NAMED] = "single"
    """single: in the order of the sample index. cyclic: shuffled anew each epoch."""
    no_data_sharding: Annotated[bool, NAMED, needs("dataloader_type", "samples are read in order", "cyclic")] = False
    """Of cyclic: shuffle all samples together, instead of a part of them for each data-parallel rank."""
    eod_mask_loss: Annotated[bool, NAMED] = False
    """No loss where the input is the end-of-document token."""
    reset_position_ids: Annotated[bool, NAMED] = False
    """Positions, learned or rotary, start again at 0 after each end-of-document token."""
    reset_attention_mask: Annotated[bool, NAMED] = False
    """A token attends only to tokens of its own document."""
    eval_iters: Annotated[int, at_least(-1), FREE, EVALUATES] = 100
    """Batches per evaluation; with 0 or -1 nothing is evaluated."""
    eval_global_batch_size: Annotated[int | None, at_least(1), FREE, EVALUATES, HAS_BATCHES] = None
    """Sequences of a batch of the evaluation. Default: --global-batch-size."""
    eval_micro_batch_size: Annotated[int | None, at_least(1), FREE, EVALUATES, HAS_BATCHES] = None
    """Sequences of its microbatches. Default: --micro-batch-size."""
    eval_interval: Annotated[int | None, at_least(1), FREE, HAS_BATCHES] = None
    """Evaluate every so many steps."""
    start_eval_at_iter: Annotated[int | None, at_least(1), FREE, EVALUATES, HAS_BATCHES] = None
    """From this step on. Default: from the first."""
    skip_train: Annotated[bool, FREE] = False
    """Train nothing: evaluate what --load gives on validation and test data, each from its first sample."""

    @property
    def eval_batches(self) -> int:
        """Per evaluation."""
        return max(0, self.eval_iters)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: Annotated[
        str | None,
        demands("save_interval", says="{} needs --save-interval, for example --save-interval 1000"),
    ] = None
    """Folder for checkpoints."""
    save_interval: Annotated[int | None, at_least(1), SAVES] = None
    """Save every so many steps."""
    save_retain_interval: Annotated[int | None, at_least(1), SAVES] = None
    """Keep of this run's checkpoints those of every so many steps and the newest; each removal is a line of the log."""
    save_keep_last: Annotated[int | None, at_least(1), SAVES] = None
    """Keep so many of the newest checkpoints; remove others of this run, but those of --save-retain-interval. Not in
    Megatron-LM."""
    save_remove_earlier: Annotated[bool, SAVES, needs("save_keep_last save_retain_interval", "nothing is removed")] = (
        False
    )
    """Let these two remove checkpoints of earlier runs too, not only what this run saved or resumed from. Not in
    Megatron-LM."""
    save_failure: Annotated[Literal["stop", "continue"], SAVES] = "stop"
    """What becomes of the run when a checkpoint cannot be saved; continue: an alarm, and the next save tries again. Not
    in Megatron-LM."""
    load: str | None = None
    """Folder to resume from; without a checkpoint in it the run starts fresh."""
    exit_on_missing_checkpoint: Annotated[bool, LOADS] = False
    """Stop if --load holds no checkpoint."""
    ckpt_step: Annotated[int | None, at_least(0), LOADS] = None
    """Load this iteration instead of the newest."""
    override_on_load: Annotated[tuple[str, ...], LOADS] = ()
    """Settings that may differ from those the checkpoint was trained with, such as: seq-length seed data-path. Not in
    Megatron-LM."""
    use_checkpoint_args: Annotated[
        bool,
        LOADS,
        excludes("moe_use_upcycling", "{} is the dense model's architecture, and {} makes another", "Leave it out."),
    ] = False
    """Take the architecture from the checkpoint, if there is one, instead of the flags."""
    moe_use_upcycling: Annotated[
        bool,
        Refused(
            "{} takes the dense model from --load and saves the one with experts in --save. Give both.",
            lambda c: c.checkpoint.load is None or c.checkpoint.save is None,
        ),
        demands("num_experts", says="{} needs --num-experts, for example --num-experts 8"),
        excludes(
            "moe_shared_expert_intermediate_size",
            "{}: a dense model has no weights for a shared expert",
            "Leave out {}.",
            lambda c: c.model.has_experts,
        ),
    ] = False
    """Make experts of the MLPs of the dense checkpoint at --load, save them in --save, and train from there."""
    moe_upcycling_granularity: Annotated[int, at_least(1), needs("moe_use_upcycling", "no experts are made")] = 1
    """The dense checkpoint's MLP is so many times as wide as --ffn-hidden-size: an expert gets a slice of it."""
    finetune: Annotated[bool, LOADS] = False
    """Load the weights only and start at iteration 0."""
    no_save_optim: Annotated[bool, SAVES] = False
    """Leave the optimizer state out."""
    no_load_optim: Annotated[
        bool,
        LOADS,
        excludes(
            "use_checkpoint_opt_param_scheduler",
            "{} begins the learning rate's curve anew, as in Megatron-LM, so there is nothing for {} to take",
        ),
    ] = False
    """Do not load the optimizer state."""
    trigger_path: str | None = None
    """Folder looked into every --log-interval steps: a file `save` or `exit` there is removed and obeyed. Not in
    Megatron-LM."""
    async_save: Annotated[bool, SAVES] = False
    """Copy a checkpoint into shared memory and let a process beside each rank write it; the run's first waits."""


@dataclass(frozen=True)
class LogConfig:
    """Console, TensorBoard, profiler."""

    log_interval: Annotated[int, at_least(1)] = 100
    """Print a line every so many steps."""
    log_format: Literal["auto", "megatron", "short"] = "auto"
    """megatron: its line, our fields behind. short: for people, as wide as the terminal. auto: short on a terminal. Not
    in Megatron-LM."""
    log_throughput: bool = False
    """TFLOP/s per device in its field of Megatron's line, and in TensorBoard as `throughput`."""
    log_progress: Annotated[bool, needs("save", "there is no folder for progress.txt")] = False
    """Append to progress.txt in the folder of --save when a job starts and when it saves: throughput, FLOPs, tokens."""
    timing_log_level: Literal[0, 1, 2] = 0
    """1: with every line the time of a step's passes and of its update, over all ranks. 2: also what the passes did."""
    timing_log_option: Annotated[
        Literal["max", "minmax", "all"],
        needs("timing_log_level", "no timers are told", 1, 2),
    ] = "minmax"
    """Of the ranks: the most, the least and the most, or each."""
    log_timers_to_tensorboard: Annotated[
        bool,
        needs("timing_log_level", "iteration-time alone is in TensorBoard", 1, 2),
        DRAWN,
    ] = False
    """The timers of --timing-log-level in TensorBoard too: the most of all ranks, in seconds."""
    log_straggler: bool = False
    """With every line the slowest stage and rank, also while it is not slow enough to be named."""
    device_peak_tflops: Annotated[float | None, ABOVE_0] = None
    """Of one device, for the MFU. Default: of dense 16-bit products by its data sheet, where the device is known. Not
    in Megatron-LM."""
    metrics_file: str | None = None
    """Append a JSON object of every step to this file; every step's passes are then collected. Not in Megatron-LM."""
    moe_per_layer_logging: Annotated[
        bool, EXPERTS, needs("tensorboard_dir wandb_project metrics_file", "it is shown nowhere")
    ] = False
    """Routers' losses of each layer in TensorBoard, and with --metrics-file the load of each expert."""
    log_params_norm: bool = False
    """Norm of the parameters in the line."""
    log_num_zeros_in_grad: bool = False
    """Count of zeros in the gradient in the line."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    tensorboard_log_interval: Annotated[int, at_least(1), DRAWN] = 1
    """Write to TensorBoard every so many steps."""
    tensorboard_queue_size: Annotated[int, at_least(1), needs("tensorboard_dir", "nothing is held back")] = 1000
    """Events held back before a write."""
    wandb_project: str | None = None
    """Project of Weights & Biases that gets the same scalars; WANDB_MODE=offline keeps them on disk."""
    wandb_exp_name: Annotated[str | None, SENT] = None
    """Name of the run there."""
    wandb_entity: Annotated[str | None, SENT] = None
    """Whose project it is."""
    wandb_save_dir: Annotated[str | None, SENT] = None
    """Folder for its files. Default: wandb in that of --save."""
    log_validation_ppl_to_tensorboard: Annotated[bool, DRAWN] = False
    """Validation perplexity in TensorBoard too."""
    log_world_size_to_tensorboard: Annotated[bool, DRAWN] = False
    """World size in TensorBoard too."""
    log_memory_to_tensorboard: Annotated[bool, DRAWN] = False
    """Device memory in TensorBoard too (GPU only)."""
    profile: Annotated[bool, PROFILER] = False
    """Record the steps of the window below, with --use-pytorch-profiler."""
    use_pytorch_profiler: Annotated[bool, PROFILE] = False
    """One Perfetto-readable trace per rank, torch_profile/rank-N.json.gz beside --tensorboard-dir."""
    pytorch_profiler_collect_shapes: Annotated[bool, PROFILER, PROFILE] = False
    """Shapes of tensors in the trace."""
    pytorch_profiler_collect_callstack: Annotated[bool, PROFILER, PROFILE] = False
    """Lines of Python in the trace."""
    profile_step_start: Annotated[int, at_least(0), PROFILER, PROFILE] = 10
    """First step of the window."""
    profile_step_end: Annotated[int, ANY, PROFILER, PROFILE] = 12
    """Step at which the window closes."""
    profile_ranks: Annotated[tuple[int, ...], ANY, PROFILER, PROFILE] = ()
    """Ranks to profile. Default: all."""

    @property
    def has_board(self) -> bool:
        """Are scalars drawn somewhere?"""
        return bool(self.tensorboard_dir or self.wandb_project)
