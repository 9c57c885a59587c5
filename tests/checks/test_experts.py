"""What a user reads about experts that cannot be, each in one line and all at once."""

import pytest

from megapipe.checks.run import validate
from megapipe.config.moe import layer_frequency
from megapipe.flags.idle import idle

from .sound import config, problem, problems

EXPERTS = "--num-experts 8"


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "--moe-router-topk 9",
            "--moe-router-topk 9 is more than --num-experts 8. Use --moe-router-topk 8, or fewer.",
        ),
        (
            "--moe-router-topk 1",
            "--moe-router-topk 1: the softmax over one expert is 1, and the router would learn nothing. "
            "Add --moe-router-pre-softmax.",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff has no part in --moe-router-load-balancing-type sinkhorn. Leave it out.",
        ),
        ("--moe-layer-freq [0,1]", "--moe-layer-freq [0,1] says 2 layers, and --num-layers 8. Make both agree."),
        (
            "--moe-layer-freq [0]*8",
            "--moe-layer-freq [0]*8 leaves no layer for --num-experts 8. Leave one of them out.",
        ),
        (
            "--moe-layer-freq print(1)",
            "--moe-layer-freq print(1): an integer of at least 1, or a list with a 0 or 1 for each layer, such as "
            '"([0]*3+[1]*58)" (in quotes)',
        ),
        (
            "--moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias works on scores of sigmoid or sqrtsoftplus. "
            "Add --moe-router-score-function sigmoid.",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no part in --moe-router-load-balancing-type sinkhorn. Leave it out.",
        ),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff 0.1: give 2 numbers, one for each of aux_loss seq_aux_loss.",
        ),
        (
            "--moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 0.1 0",
            "--moe-router-load-balancing-type aux_loss none: each loss once, and none alone.",
        ),
        ("--moe-aux-loss-coeff nan", "--moe-aux-loss-coeff nan must be at least 0 and finite"),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 3",
            "--moe-router-group-score-topk 3: a group has 2 experts. Use 2, or fewer.",
        ),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 2",
            "--num-experts 8 does not divide into --moe-router-num-groups 3: 8 = 3 x 2 + 2. Use --num-experts 6 or 9.",
        ),
        (
            "--moe-router-num-groups 8 --moe-router-group-topk 1",
            "--moe-router-group-topk 1: at most --moe-router-num-groups 8 and --moe-router-topk 2, and together the "
            "groups must have 2 experts, each has 1.",
        ),
        ("--moe-router-group-topk 2", "--moe-router-group-topk 2 of how many? Give --moe-router-num-groups."),
        (
            "--moe-pad-expert-input-to-capacity",
            "--moe-pad-expert-input-to-capacity pads to the rows that --moe-expert-capacity-factor allows. "
            "Add it, for example --moe-expert-capacity-factor 1.0.",
        ),
        (
            "--moe-expert-capacity-factor 0",
            "--moe-expert-capacity-factor 0 drops every token. Use 1.0, or leave it out to drop none.",
        ),
        ("--moe-expert-capacity-factor inf", "--moe-expert-capacity-factor inf must be finite"),
        (
            "--moe-expert-capacity-factor 0.001",
            "--moe-expert-capacity-factor 0.001 leaves an expert less than one of 128 choices of a microbatch: "
            "128 / 8 x 0.001 = 0.016. Use 1.0, or leave it out to drop none.",
        ),
    ],
)
def test_each_problem_has_its_line(flags, line):
    assert problem(f"{EXPERTS} {flags}") == line


def test_experts_that_do_not_divide_over_tensor_parallel_ranks_are_named():
    line = "--moe-ffn-hidden-size 31 does not divide by --tensor-model-parallel-size 2: 31 = 2 x 15 + 1. "
    flags = f"{EXPERTS} --moe-ffn-hidden-size 31 --tensor-model-parallel-size 2"
    assert problem(flags, 2) == f"{line}Use --moe-ffn-hidden-size 30 or 32."


@pytest.mark.parametrize(
    "flags, world, line",
    [
        (
            "--expert-model-parallel-size 3",
            3,
            "--num-experts 8 does not divide by --expert-model-parallel-size 3: 8 = 3 x 2 + 2. "
            "Use --expert-model-parallel-size 1, or --num-experts 6 or 9.",
        ),
        (
            "--expert-model-parallel-size 4",
            2,
            "2 processes are not --expert-tensor-parallel-size 1 x --expert-model-parallel-size 4 x "
            "--pipeline-model-parallel-size 1 x ranks with the same experts: 2 = 4 x 0 + 2. Start a multiple of 4, "
            "such as torchrun --nproc-per-node 4, or use --expert-model-parallel-size 1 or 2 and "
            "--expert-tensor-parallel-size 1.",
        ),
        (
            "--expert-model-parallel-size 2 --tensor-model-parallel-size 2",
            4,
            "--expert-model-parallel-size 2 beside --tensor-model-parallel-size 2 needs ranks that have tokens of "
            "their own. Add --sequence-parallel.",
        ),
        (
            # The ranks of an expert would be on both stages of the pipeline.
            "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
            "--sequence-parallel --expert-tensor-parallel-size 1",
            4,
            "--use-tp-pp-dp-mapping numbers the pipeline before data parallel, so that the dense layers and the "
            "experts must have equally many ranks in it: --tensor-model-parallel-size 2 x --context-parallel-size 1 "
            "= 2, --expert-tensor-parallel-size 1 x --expert-model-parallel-size 1 = 1. Leave --use-tp-pp-dp-mapping "
            "out, or make both equal.",
        ),
        (
            "--expert-tensor-parallel-size 3 --moe-ffn-hidden-size 32",
            3,
            "--moe-ffn-hidden-size 32 does not divide by --expert-tensor-parallel-size 3: 32 = 3 x 10 + 2. "
            "Use --moe-ffn-hidden-size 30 or 33.",
        ),
        (
            "--expert-model-parallel-size 2 --num-experts 0",
            2,
            "--expert-model-parallel-size 2 shares experts, and there are none. Give --num-experts, or leave it out.",
        ),
    ],
)
def test_experts_that_do_not_fit_the_ranks_have_their_line(flags, world, line):
    batch = "--global-batch-size 24" if world == 3 else ""
    assert problem(f"{EXPERTS} {flags} {batch}", world) == line


def test_all_problems_are_told_at_once():
    flags = "--moe-router-topk 9 --moe-layer-freq 0 --moe-expert-capacity-factor 0 --moe-router-group-topk 2"
    assert len(problems(f"{EXPERTS} {flags}")) == 4


MIXTRAL = """--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--use-distributed-optimizer --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --moe-permute-fusion"""
DEEPSEEK = """--num-experts 8 --moe-router-topk 4 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-4 --moe-layer-freq ([0]*3+[1]*5) --moe-router-pre-softmax --moe-router-score-function sigmoid
--moe-router-dtype fp32 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-num-groups 4
--moe-router-group-topk 2
--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap
--moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep --moe-ffn-hidden-size 32 --moe-router-fusion"""


@pytest.mark.parametrize("flags", [MIXTRAL, DEEPSEEK])
def test_launch_lists_of_experts_start(flags):
    validate(config(flags), has_cuda=False)


def test_what_has_nothing_to_act_on_is_said():
    line = ("--moe-router-pre-softmax", "there is no softmax, without --moe-router-score-function softmax")
    assert idle(config(DEEPSEEK)) == [line]


def test_a_frequency_may_have_the_quotes_that_a_shells_array_keeps():
    assert layer_frequency("'([0]*1+[1]*2)'") == [0, 1, 1]


UPCYCLED = "--moe-use-upcycling --load dense --save made --save-interval 5"


@pytest.mark.parametrize(
    "flags, lines",
    [
        (
            "--moe-use-upcycling",
            [
                "--moe-use-upcycling takes the dense model from --load and saves the one with experts in --save. "
                "Give both.",
                "--moe-use-upcycling needs --num-experts, for example --num-experts 8",
            ],
        ),
        (
            f"{UPCYCLED} {EXPERTS} --moe-router-pre-softmax --moe-shared-expert-intermediate-size 8",
            [
                "--moe-use-upcycling: with --moe-router-pre-softmax the weights of a token's experts add up to less "
                "than 1, and the model would not begin as the dense one. Leave --moe-router-pre-softmax out.",
                "--moe-use-upcycling: a dense model has no weights for a shared expert. Leave out "
                "--moe-shared-expert-intermediate-size 8.",
            ],
        ),
        (
            f"{UPCYCLED} --num-experts 6 --moe-router-topk 3 --moe-upcycling-granularity 4",
            [
                "--moe-use-upcycling: an MLP becomes 4 experts of 256, and --num-experts 6 is no multiple of that. "
                "Use --num-experts 4 or 8.",
                "--moe-use-upcycling: an MLP becomes 4 experts of 256, and --moe-router-topk 3 is no multiple of "
                "that. Use --moe-router-topk 4.",
            ],
        ),
        (
            # Both slices of a copy are chosen together only where a group has both: three experts have one and a half.
            f"{UPCYCLED} --num-experts 12 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
            "--moe-upcycling-granularity 2",
            [
                "--moe-use-upcycling: an MLP becomes 2 experts that a token chooses together, and "
                "--moe-router-num-groups 4 makes groups of 3, which cut them apart. Use --moe-router-num-groups 2 or 3 "
                "or 6, or leave --moe-router-num-groups and --moe-router-group-topk out.",
            ],
        ),
        (
            f"{UPCYCLED} {EXPERTS} --moe-layer-freq 2 --moe-upcycling-granularity 2",
            [
                "--moe-use-upcycling: layers without experts keep the dense model's MLPs. Give their width, "
                "--ffn-hidden-size 512 --moe-ffn-hidden-size 256, and leave --moe-upcycling-granularity out.",
            ],
        ),
    ],
)
def test_experts_that_would_not_begin_as_the_dense_model_are_named(flags, lines, tmp_path):
    assert problems(flags.replace("--load dense", f"--load {tmp_path}")) == lines


def test_slices_that_end_with_documents_are_of_other_lengths_on_ranks_that_gather_tokens():
    """Gathered were as many of each rank, and tokens went to experts that nobody had chosen: found by the fuzzer."""
    flags = (
        f"{EXPERTS} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 16 "
        "--pipeline-slices 2 --pipeline-slice-cuts documents --reset-attention-mask --eod-mask-loss"
    )
    assert problem(flags, 4) == (
        "--pipeline-slice-cuts documents gives data-parallel ranks slices of other lengths, and experts over 2 ranks "
        "gather as many tokens of each. Use --moe-token-dispatcher-type alltoall."
    )
    validate(config(f"{flags} --moe-token-dispatcher-type alltoall", 4), has_cuda=False)
