#!/usr/bin/env bash
# An 857M GPT-3 on one node of 4 GPUs: 4 pipeline stages, global batch 16, micro batch 2 (8 microbatches).
#   DATA=prefix_text_document TOKENIZER=tokenizer.model bash scripts/pretrain_gpt3_857m.sh [more flags]
# Without DATA it trains on mock data. Never run on 4 GPUs by us; CI runs it for one step with its sizes overridden.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${DATA:-}" ]; then
  TOKENS=(--data-path "$DATA" --split "949,50,1" --tokenizer-model "${TOKENIZER:?names the SentencePiece model of DATA}")
else
  TOKENS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50256)
fi
SAVE=()
if [ -n "${RUN:-}" ]; then
  SAVE=(--save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 1000 --tensorboard-dir "$RUN/tensorboard")
fi

exec torchrun --nproc-per-node "${NPROC:-4}" pretrain_gpt.py \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --pipeline-schedule 1f1b \
  --num-layers 24 --hidden-size 1664 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
  --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size 2 --global-batch-size 16 --train-iters 100000 \
  --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 \
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 \
  --log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10 "${TOKENS[@]}" "${SAVE[@]}" "$@"
