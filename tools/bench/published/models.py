"""Flags of the models and layouts of published runs."""

COMMON = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --train-iters 9 --lr 1e-4 "
    "--use-distributed-optimizer"
)
_LIKE_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
_LLAMA_2 = (
    f"{_LIKE_LLAMA} --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 31999 --num-layers"
)
_LLAMA_3 = (
    f"{_LIKE_LLAMA} --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128255 "
    "--group-query-attention --num-query-groups 8 --num-layers"
)
LLAMA_2_13B = f"{_LLAMA_2} 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40"
LLAMA_2_70B = (
    f"{_LLAMA_2} 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8"
)
LLAMA_3_8B = f"{_LLAMA_3} 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
LLAMA_3_70B = f"{_LLAMA_3} 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"
LLAMA_3_405B = (
    f"{_LLAMA_3} 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128"
)
_WITH_EXPERTS = (
    f"{_LIKE_LLAMA} --seq-length 4096 --max-position-embeddings 4096 --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --group-query-attention"
)
_MIXTRAL = (
    f"{_WITH_EXPERTS} --num-query-groups 8 --num-experts 8 --moe-router-topk 2 --vocab-size 31999"
)
MIXTRAL_8X7B = (
    f"{_MIXTRAL} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32"
)
MIXTRAL_8X22B = (
    f"{_MIXTRAL} --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 "
    "--num-attention-heads 48"
)
QWEN2_57B = (
    f"{_WITH_EXPERTS} --num-query-groups 4 --num-experts 64 --moe-router-topk 8 "
    "--vocab-size 151935 --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 "
    "--moe-ffn-hidden-size 2560 --moe-shared-expert-intermediate-size 20480 "
    "--num-attention-heads 28 --add-qkv-bias"
)
QWEN3_30B = (
    f"{_WITH_EXPERTS} --num-query-groups 4 --num-experts 128 --moe-router-topk 8 "
    "--vocab-size 151935 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
    "--moe-ffn-hidden-size 768 --num-attention-heads 32 --kv-channels 128 --qk-layernorm"
)
DEEPSEEK_V3 = (
    f"{_LIKE_LLAMA} --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129279 "
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 256 "
    "--moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 "
    "--moe-router-group-topk 4 --moe-router-score-function sigmoid "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-token-dispatcher-type alltoall"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --sequence-parallel"
ENDS_AS_LAYERS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
"""Stages are split as if the embedding were a layer, and the head too."""
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200, sequence: int = 2048) -> str:
    """Return the flags of a GPT of Megatron-LM's papers.

    Args:
        heads: the number of attention heads.
        vocabulary: the number of token ids.
        sequence: tokens of a sequence, and positions of the model.
    """
    text = f"--seq-length {sequence} --max-position-embeddings {sequence}"
    size = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}"
    return f"{text} --vocab-size {vocabulary - 1} {size}"


def layout(
    batch: int, *, micro: int = 1, tp: int = 1, pp: int = 1, chunks: int = 1, ep: int = 0
) -> str:
    """Return the flags of a layout.

    Args:
        batch: sequences of a step.
        micro: sequences of a microbatch.
        chunks: stages on each rank, under interleaved 1F1B; 1 for plain 1F1B.
        ep: ranks over which experts are shared, each expert on one rank; 0 without experts.
    """
    flags = f"--global-batch-size {batch} --micro-batch-size {micro}"
    flags += f" --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    if chunks > 1:
        flags += " --pipeline-schedule interleaved"
        flags += f" --num-virtual-stages-per-pipeline-rank {chunks}"
    if ep:
        flags += f" --expert-model-parallel-size {ep} --expert-tensor-parallel-size 1"
    return flags
