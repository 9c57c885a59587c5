#!/usr/bin/env bash
# A small GPT-2 on this machine, CPU or GPU: 2 pipeline stages on the tokens that scripts/quickstart.sh made, or on mock
# data without them. Flags given here come last and win:
#   bash scripts/pretrain_gpt_local.sh --pipeline-schedule gpipe --train-iters 50
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe ""
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
RUN="${RUN:-runs/quickstart}"
if [ -f "$RUN/stdlib_text_document.idx" ]; then
  DATA=(--data-path "$RUN/stdlib_text_document" --split "969,30,1" --tokenizer-model "$RUN/tokenizer.model")
else
  DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 4095)
fi

# shellcheck disable=SC2046  # words on purpose
exec torchrun --nproc-per-node "${NPROC:-2}" pretrain_gpt.py \
  $(cpu_if_fewer_gpus_than "${NPROC:-2}") --pipeline-model-parallel-size 2 \
  --num-layers 8 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256 \
  --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size 4 --global-batch-size 32 --train-iters 20 \
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --adam-beta2 0.95 \
  --log-interval 5 "${DATA[@]}" "$@"
