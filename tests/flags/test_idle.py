"""No flag does nothing in silence: each acts in every run, says where it does not, or is refused there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.flags.idle import IDLE, idle, without_idle
from megapipe.flags.parse import Flag, flags_of, parse, to_flags

from ..checks.sound import SOUND
from .test_flags_act import rate, updated

FLAGS = {flag.field: flag for flag in flags_of(Config).values()}

_ALWAYS = """
num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention max_position_embeddings
position_embedding_type window_size normalization norm_epsilon apply_layernorm_1p swiglu quick_geglu squared_relu
disable_bias_linear qk_layernorm untie_embeddings_and_output_weights init_method_xavier_uniform
embedding_init_method_std attention_dropout hidden_dropout padded_vocab_size cross_entropy_loss_fusion model_provider
transformer_impl recompute_granularity recompute_activations per_layer_overrides multi_latent_attention
fp8_format fine_grained_activation_offloading cpu_offload
tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size pipeline_schedule pipeline_costs
num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers
decoder_last_pipeline_num_layers pipeline_model_parallel_layout memory_limit_gib pipeline_slices
enable_optimizer_post_validation distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init
micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule seq_length train_iters train_samples
exit_interval exit_duration_in_mins exit_signal_handler seed calculate_per_token_loss bf16 fp16 loss_scale compile
deterministic_mode freeze_all_layers optimizer lr decoupled_lr lr_decay_style lr_warmup_fraction lr_warmup_iters
lr_warmup_samples weight_decay_incr_style clip_grad no_check_for_nan_in_loss_and_grad rerun_mode check_for_spiky_loss
max_bad_iterations_in_a_row manual_gc cuda_graph_impl
tokenizer_type data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path split
data_cache_path mock_data num_workers dataloader_type eod_mask_loss reset_position_ids reset_attention_mask skip_train
save load trigger_path log_interval log_format log_throughput log_params_norm log_num_zeros_in_grad
timing_log_level log_straggler device_peak_tflops metrics_file
tensorboard_dir wandb_project check num_experts mtp_num_layers
"""
ALWAYS = set(_ALWAYS.split())
"""Fields that act in every run."""

REFUSED = {
    "expert_model_parallel_size": "Give --num-experts, or leave it out.",
    "rope_scaling_factor": "without --use-rope-scaling. Add it.",
    "recompute_modules": "without --recompute-granularity selective. Add it.",
    "num_microbatches_with_partial_activation_checkpoints": "Add --recompute-granularity full.",
    "moe_use_upcycling": "needs --num-experts, for example --num-experts 8",
    "reschedule_after": "--pipeline-model-parallel-size is 1. Leave it out.",
    "vocab_parallel_pipeline": "does not go with --pipeline-model-parallel-size 1. Leave one of them out.",
    "main_grads_dtype": "say so with --use-precision-aware-optimizer.",
    "main_params_dtype": "say so with --use-precision-aware-optimizer.",
    "exp_avg_dtype": "say so with --use-precision-aware-optimizer.",
    "exp_avg_sq_dtype": "say so with --use-precision-aware-optimizer.",
    "lr_wsd_decay_style": "without --lr-decay-style WSD. Add it, or leave it out.",
    "lr_wsd_decay_iters": "without --lr-decay-style WSD. Add it, or leave it out.",
    "lr_wsd_decay_samples": "without --lr-decay-style WSD. Add it, or leave it out.",
    "start_weight_decay": "is for --weight-decay-incr-style linear or cosine. Add it, or leave it out.",
    "end_weight_decay": "is for --weight-decay-incr-style linear or cosine. Add it, or leave it out.",
}
"""Fields that are refused where they have nothing to act on -> the end of the sentence."""

RUNS = [
    "",
    "--check --save a --save-keep-last 2 --load a --swiglu --disable-bias-linear --tensor-model-parallel-size 2 "
    "--overlap-moe-expert-parallel-comm --mtp-num-layers 1 --cpu-offload "
    "--context-parallel-size 2 --cp-comm-type p2p --fp16 --recompute-granularity full --group-query-attention "
    "--padded-vocab-size 128 --init-method-xavier-uniform --position-embedding-type rope --optimizer sgd",
    "--fp8-format e4m3 "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-ring-exchange-p2p "
    "--optimizer muon --overlap-grad-reduce --lr-decay-style constant --lr-warmup-iters 5 --decoupled-lr 1 "
    "--disable-bias-linear --tokenizer-type GPT2BPETokenizer --enable-optimizer-post-validation "
    "--weight-decay-incr-style linear --eval-interval 5",
    "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 "
    "--log-format short --tokenizer-type TikTokenizer --dataloader-type cyclic --eval-iters 0 --eval-interval 5 "
    "--exit-signal-handler --rerun-mode disabled --profile --exp-avg-dtype bf16",
    "--tensorboard-dir a --wandb-project b --timing-log-level 1 --use-pytorch-profiler "
    "--tokenizer-type HuggingFaceTokenizer --error-injection-rate 3",
    "--tokenizer-type NullTokenizer --save a --manual-gc --cuda-graph-impl local",
    "--timing-log-level 1 --pipeline-slices 2",
    "--num-experts 8 --moe-use-upcycling --use-megatron-fsdp",
    "--fp8-format e4m3 --fp8-recipe mxfp8 --use-distributed-optimizer",
    "--multi-latent-attention",
    "--multi-latent-attention --rope-type rope --disable-bias-linear",
    "--num-experts 8 --moe-expert-capacity-factor 1 --moe-shared-expert-intermediate-size 8 --moe-router-group-topk 2 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --metrics-file a",
]


def run_of(base: str, more: Sequence[str] = ()) -> Config:
    """One process without flags, two replicas of the model with them."""
    config = parse(Config, [*base.split(), *more])
    return replace(config, world_size=2 * config.parallel.ranks_of_a_replica if base else 1)


def other(flag: Flag) -> list[str]:
    """The flag with a value that is not its default."""
    kind = get_args(flag.kind)[0] if flag.count == "many" else flag.kind
    used = (flag.default, *flag.default) if flag.count == "many" else (flag.default,)
    choices = [choice for choice in get_args(kind) if choice not in used]
    value: Any = {int: 7, float: 0.5, str: "x"}.get(kind) or (choices or [None])[0]
    return flag.spell([] if flag.count == "none" else [str(value)])


def test_every_field_has_one_class():
    rows = {flag.field for flag, *_ in IDLE}
    assert not rows & ALWAYS
    assert not rows & REFUSED.keys()
    assert not ALWAYS & REFUSED.keys()
    assert rows | ALWAYS | REFUSED.keys() == FLAGS.keys()


@pytest.mark.parametrize("flag, where, text", IDLE, ids=[f"{flag.name}, {text}" for flag, _, text in IDLE])
def test_each_row_holds_in_some_runs_alone_and_there_is_its_line(flag, where, text):
    holds = [base for base in RUNS if where(run_of(base))]
    assert holds
    assert len(holds) < len(RUNS)
    told = {}
    for base in RUNS:
        given = run_of(base, other(flag))
        told |= {line: base for name, line in idle(given) if name.split()[0] == flag.name}
        taken_out = getattr(getattr(without_idle(given), flag.section), flag.field) == flag.default
        assert taken_out == any(where(given) for one, where, _ in IDLE if one == flag)
    assert text in told


@pytest.mark.parametrize("field, sentence", REFUSED.items(), ids=REFUSED)
def test_the_others_are_refused_where_they_have_nothing_to_act_on(field, sentence):
    lines = flag_problems(parse(Config, [*SOUND.split(), *other(FLAGS[field])]))
    assert any(FLAGS[field].name in line and line.endswith(sentence) for line in lines), lines


def test_what_is_said_to_change_no_number_of_an_update_changes_none():
    """The rates of a run, and a matrix after two updates, where a flag of them is said to be idle."""
    sizes = "--micro-batch-size 2 --global-batch-size 4 --seq-length 8 --lr 1 --train-iters 100"
    tried = set()
    for optimizer in ("adam", "sgd", "muon"):
        for curve in ("--lr-decay-style constant", "--lr-warmup-iters 5", "--min-lr 0.1"):
            base = f"{sizes} --optimizer {optimizer} {curve}"
            for flag, where, _ in IDLE:
                name = flag.field.partition("_")[0]
                if name not in ("lr", "min", "adam", "sgd", "muon") or flag.field == "min_loss_scale":
                    continue
                without, given = (parse(Config, [*base.split(), *more]) for more in ([], other(flag)))
                if where(given):
                    tried.add(flag.field)
                    assert (rate(given), updated(given)) == (rate(without), updated(without)), (base, flag.name)
    assert len(tried) > 13


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--save-interval 5", ("--save-interval 5", "nothing is saved, without --save")),
        ("--no-load-optim", ("--no-load-optim", "nothing is loaded, without --load")),
        ("--eval-iters -1", ("--eval-iters -1", "nothing is evaluated, without --eval-interval")),
        (
            "--eval-iters -1 --eval-interval 5",
            ("--eval-interval 5", "nothing is evaluated, without --eval-iters of at least 1"),
        ),
        ("--world-size 4", ("--world-size 4", "the launch tells, without --check")),
        (
            "--override-opt_param-scheduler",
            ("--override-opt_param-scheduler", "nothing is loaded, without --load"),
        ),
        (
            "--recompute-num-layers 1",
            ("--recompute-num-layers 1", "nothing is computed again, without --recompute-granularity full"),
        ),
        (
            "--no-bias-gelu-fusion --swiglu",
            ("--no-bias-gelu-fusion", "the MLP has another activation, without GELU"),
        ),
        (
            "--num-query-groups 4",
            ("--num-query-groups 4", "each query head has its own key and value, without --group-query-attention"),
        ),
        ("--profile", ("--profile", "nothing is recorded, without --use-pytorch-profiler")),
        (
            "--initial-loss-scale 65536 --bf16",
            (
                "--initial-loss-scale 65536.0",
                "the scale does not move, without a dynamic loss scale (--fp16 without --loss-scale)",
            ),
        ),
    ],
)
def test_what_megatron_ignores_is_said_in_a_line(flags, line):
    assert idle(parse(Config, flags.split())) == [line]


def test_flags_that_have_nothing_to_act_on_are_taken_out_of_what_runs():
    config = parse(Config, ["--num-layers", "4", "--num-query-groups", "4", "--save-interval", "5", "--no-load-optim"])
    assert to_flags(without_idle(config)) == ["--num-layers", "4"]
    assert without_idle(without_idle(config)) == without_idle(config)


def test_flags_that_have_something_to_act_on_are_not_idle():
    flags = "--save a --save-interval 5 --load a --no-load-optim --profile --use-pytorch-profiler --fp16 --hysteresis 3"
    assert idle(parse(Config, f"{flags} --recompute-granularity full --recompute-num-layers 2".split())) == []
