#!/usr/bin/env bash
# From nothing to a trained GPT in minutes, no GPU and no download of data: installs, makes a corpus of the Python
# standard library, trains a tokenizer, tokenises, pretrains on 2 pipeline stages under 1F1B, samples.
# Run again, it reuses what it made. RUN=folder puts everything elsewhere than runs/quickstart; flags given here come last
# and win in the pretraining: bash scripts/quickstart.sh --pipeline-schedule zb-v
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe ""
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
RUN="${RUN:-runs/quickstart}"
SPLIT="${SPLIT:-969,30,1}"
VOCAB_SIZE="${VOCAB_SIZE:-4096}"
mkdir -p "$RUN"

echo "== 1/5 Corpus: the source text of the Python standard library"
python -m megapipe.commands.corpus --output "$RUN/stdlib.jsonl" --reuse

echo "== 2/5 Tokenizer: a SentencePiece model of $VOCAB_SIZE ids"
python tools/train_tokenizer.py --input "$RUN/stdlib.jsonl" --output "$RUN/tokenizer.model" --vocab-size "$VOCAB_SIZE" --reuse

echo "== 3/5 Tokens: Megatron's .bin/.idx"
python tools/preprocess_data.py --input "$RUN/stdlib.jsonl" --output-prefix "$RUN/stdlib" --workers 2 --append-eod \
  --tokenizer-model "$RUN/tokenizer.model" --reuse

echo "== 4/5 Pretraining: 2 pipeline stages, 1F1B, 8 microbatches"
# shellcheck disable=SC2046  # words on purpose
torchrun --nproc-per-node 2 pretrain_gpt.py \
  $(cpu_if_fewer_gpus_than 2) --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b \
  --num-layers 8 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256 \
  --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size 4 --global-batch-size 32 --train-iters 120 \
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 \
  --data-path "$RUN/stdlib_text_document" --split "$SPLIT" --tokenizer-model "$RUN/tokenizer.model" \
  --eval-interval 60 --eval-iters 10 --log-interval 10 \
  --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 60 \
  --tensorboard-dir "$RUN/tensorboard" --profile --use-pytorch-profiler --profile-step-start 10 --profile-step-end 12 "$@" \
  2>&1 | tee -a "$RUN/log.txt"

echo "== 5/5 What it learned"
python -m megapipe.commands.entropy --data-path "$RUN/stdlib_text_document" --split "$SPLIT"
grep "on validation set" "$RUN/log.txt" | tail -n 1
python tools/generate_text.py --load "$RUN/checkpoints" --prompt "def main(" --num-tokens 80

cat << END

Log lines       $RUN/log.txt
TensorBoard     $RUN/tensorboard        tensorboard --logdir $RUN/tensorboard
Traces          $RUN/torch_profile/rank-0.json.gz, rank-1.json.gz   open them in https://ui.perfetto.dev
Checkpoints     $RUN/checkpoints
Try next        bash scripts/pretrain_gpt_local.sh --pipeline-schedule gpipe
                python tools/schedules.py show 1f1b --pp 4 --microbatches 8
END
