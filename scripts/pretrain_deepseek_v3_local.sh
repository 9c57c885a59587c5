#!/usr/bin/env bash
# DeepSeek-V3 in all its parts at a size for two cores: latent attention, experts chosen in groups by a sigmoid and a bias,
# shared expert, first layer dense, one token predicted further; 4 processes, pipeline parallel 2 x expert parallel 2, DualPipe-V with pairs, ZeRO-1. It
# makes its text as scripts/quickstart.sh does, trains for about three minutes, samples, and tells what each part costs.
# Before, three steps without pairs say how much of a pass is communication, from which the plan predicts what pairs leave.
# RUN=folder puts everything elsewhere than runs/deepseek-v3; flags given here come last and win. docs/log/deepseek.md has its log.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe ""
RUN="${RUN:-runs/deepseek-v3}"
RUN_FLAGS=(
  --pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v --pipeline-model-parallel-layout "Ett|tt|tm|tL"
  --expert-model-parallel-size 2 --use-distributed-optimizer
  --num-layers 6 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
  --seq-length 256 --max-position-embeddings 256
  --multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
  --qk-layernorm --position-embedding-type rope --rope-type rope
  --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
  --num-experts 16 --moe-layer-freq "([0]*1+[1]*5)" --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64
  --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2
  --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
  --micro-batch-size 2 --global-batch-size 32 --train-iters "${ITERS:-45}" --lr 3e-3 --lr-warmup-iters 10)
mkdir -p "$RUN"
echo "== How much of a pass is communication: three steps without pairs, on mock data"
NO_DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --data-cache-path "$RUN/cache")
ALONE=(--train-iters 3 --lr-warmup-iters 1 --eval-iters 0 --log-interval 3)
rm -f "$RUN/alone.jsonl"
python -m megapipe pretrain --nproc 4 "${RUN_FLAGS[@]}" "$@" "${NO_DATA[@]}" "${ALONE[@]}" --metrics-file "$RUN/alone.jsonl" \
  > "$RUN/alone.txt"
python tools/plan.py "${RUN_FLAGS[@]}" "$@" "${NO_DATA[@]}" --save-costs "$RUN/costs.json" > /dev/null
python -m tools.deepseek_v3.shares "$RUN/alone.jsonl" "$RUN/costs.json"
RUN_FLAGS+=(--overlap-moe-expert-parallel-comm)
python -m megapipe quickstart --folder "$RUN" --ids "${VOCAB_SIZE:-4096}" "${RUN_FLAGS[@]}" --pipeline-costs "$RUN/costs.json" \
  --metrics-file "$RUN/metrics.jsonl" --moe-per-layer-logging --eval-interval "${ITERS:-45}" --eval-iters 4 \
  --save-interval "${ITERS:-45}" "$@"
echo "== What it did"
python -m tools.deepseek_v3.ended "$RUN/metrics.jsonl"
echo "== What each part costs of a microbatch, counted"
python tools/plan.py "${RUN_FLAGS[@]}" --data-path "$RUN/stdlib_text_document" --tokenizer-model "$RUN/tokenizer.model" \
  --parts "$@" | sed -n '/^part /,$p'
