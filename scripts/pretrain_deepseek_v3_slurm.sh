#!/usr/bin/env bash
#SBATCH --job-name=deepseek-v3
#SBATCH --nodes=256
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
# DeepSeek-V3 at its full size on the 2,048 GPUs of its paper: pipeline parallel 16, expert parallel 64, data parallel 128.
# Variables and all else are those of scripts/pretrain_gpt_slurm.sh; docs/deepseek.md says what was planned, and that no GPU
# has run it:
#   DATA=prefix_text_document TOKENIZER=tokenizer.model RUN=/shared/run sbatch scripts/pretrain_deepseek_v3_slurm.sh
# Its plan, on any machine:
#   ONLY=python PROGRAM=tools/plan.py MOCK=1 SAVE=no bash scripts/pretrain_deepseek_v3_slurm.sh --world-size 2048 --parts
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
export VOCAB_SIZE="${VOCAB_SIZE:-129279}"
export MODEL="
  --pipeline-model-parallel-size 16 --pipeline-schedule dualpipe-v --pipeline-model-parallel-layout ${LAYOUT:-Et|(tt|)*30mL}
  --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --overlap-moe-expert-parallel-comm
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
  --seq-length 4096 --max-position-embeddings 4096
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
  --v-head-dim 128 --qk-layernorm --position-embedding-type rope --rotary-base 10000
  --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1
  --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --init-method-std 0.006 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
  --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
  --moe-router-score-function sigmoid --moe-router-dtype fp32 --moe-router-topk-scaling-factor 2.5
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
  --recompute-granularity selective --recompute-modules layernorm mla_up_proj shared_experts
  --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
  --micro-batch-size 1 --global-batch-size 15360 --train-iters 235000
  --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000"
exec bash scripts/pretrain_gpt_slurm.sh "$@"
