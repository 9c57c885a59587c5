#!/usr/bin/env bash
#SBATCH --job-name=megapipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# A Llama-style 1.3B on several nodes: tensor parallel 2 within a node, pipeline parallel 4, data parallel over the rest.
#   DATA=prefix_text_document TOKENIZER=tokenizer.model RUN=/shared/run sbatch scripts/pretrain_gpt_slurm.sh [more flags]
# The folder RUN must be on a disk that all nodes share. Never run on several nodes by us; CI runs it on one machine for
# one step with its sizes overridden. Without Slurm it starts on this machine alone, with NPROC processes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
if [ -n "${DATA:-}" ]; then
  TOKENS=(--data-path "$DATA" --split 949,50,1 --tokenizer-model "${TOKENIZER:?names the SentencePiece model of DATA}")
else
  TOKENS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
fi
SAVE=()
if [ -n "${RUN:-}" ]; then
  SAVE=(--save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 1000 --tensorboard-dir "$RUN/tensorboard")
fi
LAUNCH=(torchrun --nproc-per-node "${NPROC:-8}")
if [ -n "${SLURM_JOB_ID:-}" ]; then
  HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  LAUNCH=(srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${NPROC:-8}"
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HEAD:${PORT:-29500}")
fi

exec "${LAUNCH[@]}" pretrain_gpt.py \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --pipeline-schedule 1f1b \
  --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 \
  --group-query-attention --num-query-groups 4 --seq-length 4096 --max-position-embeddings 4096 \
  --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size 1 --global-batch-size 64 --train-iters 100000 \
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 \
  --log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10 "${TOKENS[@]}" "${SAVE[@]}" "$@"
