#!/usr/bin/env bash
# A small model of yours on this machine, CPU or GPU: 2 pipeline stages. Flags given here come last and win:
#   bash pretrain.sh --pipeline-schedule zb-v --train-iters 100
# DATA=prefix_text_document TOKENIZER=tokenizer.model trains on your text (README.md); without DATA, on mock data.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ -n "${DATA:-}" ]; then
  TOKENS=(--data-path "$DATA" --split "969,30,1" --tokenizer-model "${TOKENIZER:?names the SentencePiece model of DATA}")
else
  TOKENS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 4095)
fi
GPUS="$({ nvidia-smi -L || true; } 2> /dev/null | wc -l)"
CPU=()
[ "$GPUS" -eq 0 ] || [ "$GPUS" -ge "${NPROC:-2}" ] || CPU=(--distributed-backend gloo) # too few for a rank each

PYTHON="${PYTHON:-python}"
NPROC="${NPROC:-2}"
FLAGS=(
  --model-provider model.py:provider "${CPU[@]}"
  --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b
  --num-layers 8 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256
  --attention-dropout 0 --hidden-dropout 0
  --micro-batch-size 4 --global-batch-size 16 --train-iters 20
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --adam-beta2 0.95
  --log-interval 1 "${TOKENS[@]}" "$@"
)
# One process says what is wrong, in a line; torchrun would say it at the end of a report.
"$PYTHON" pretrain_gpt.py "${FLAGS[@]}" --check --world-size "$NPROC" > /dev/null
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" pretrain_gpt.py "${FLAGS[@]}"
