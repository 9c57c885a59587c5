#!/usr/bin/env bash
#SBATCH --job-name=megapipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
# A Llama-style 1.3B on several nodes: tensor parallel 2 within a node, pipeline parallel 4, data parallel over the rest.
#   DATA=prefix_text_document TOKENIZER=tokenizer.model RUN=/shared/run sbatch scripts/pretrain_gpt_slurm.sh [more flags]
# It runs in the folder of the submission: pretrain_gpt.py there, or PROGRAM=its path, and the Python that is active there,
# or VENV=a virtual environment that each rank finds.
# MODEL="--num-layers ..." is another model with its parallelism, batch and learning rate, as
# scripts/pretrain_deepseek_v3_slurm.sh gives one. ONLY=python PROGRAM=tools/plan.py plans it, and starts no rank.
# MOCK=1 trains on synthetic tokens instead of DATA, SAVE=no without RUN. RUN must be on a disk that all nodes share.
#
# Slurm starts the ranks, no torchrun between: 300 s before the end of the job's time each gets SIGTERM, saves and exits
# with 75, and by the code (docs/troubleshooting.md) the job is put into the queue again, after failures at most
# MAX_RESTARTS times. Without Slurm torchrun starts NPROC processes on this machine. Never run on several nodes by us.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
PROGRAM="${PROGRAM:-pretrain_gpt.py}"
if [ ! -f "$PROGRAM" ]; then
  echo "no $PROGRAM in $PWD: submit from the repository, or set PROGRAM to the path of pretrain_gpt.py" >&2
  exit 2
fi
# shellcheck disable=SC1091  # the user's
[ -z "${VENV:-}" ] || . "$VENV/bin/activate"
if [ -n "${DATA:-}" ]; then
  TOKENS=(--data-path "$DATA" --split "949,50,1" --tokenizer-model "${TOKENIZER:?names the SentencePiece model of DATA}")
else
  : "${MOCK:?set DATA to the prefix of a .bin/.idx pair, or MOCK=1 for synthetic tokens}"
  TOKENS=(--mock-data --tokenizer-type NullTokenizer --vocab-size "${VOCAB_SIZE:-32000}")
fi
if [ "${SAVE:-}" = no ]; then
  FILES=()
else
  : "${RUN:?set RUN to a folder for checkpoints on a shared disk, or SAVE=no to keep nothing}"
  FILES=(--save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 1000 --tensorboard-dir "$RUN/tensorboard")
fi
if [ -n "${SLURM_JOB_ID:-}" ]; then
  MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  MASTER_PORT="${PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
  export MASTER_ADDR MASTER_PORT WORLD_SIZE="$SLURM_NTASKS"
  # shellcheck disable=SC2016  # the ranks expand it
  LAUNCH=(srun --kill-on-bad-exit=0 bash -c
    'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
     exec python "$@"' python)
else
  LAUNCH=(torchrun --nproc-per-node "${NPROC:-8}")
  [ -z "${ONLY:-}" ] || LAUNCH=("$ONLY")
fi
read -r -d '' -a MODEL <<< "${MODEL:-
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --pipeline-schedule 1f1b
  --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16
  --group-query-attention --num-query-groups 4 --seq-length 4096 --max-position-embeddings 4096
  --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 64 --train-iters 100000
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000}" || true

COMMAND=("${LAUNCH[@]}" "$PROGRAM" "${MODEL[@]}" --attention-dropout 0 --hidden-dropout 0
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 --exit-signal-handler
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 40000000
  --log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10 "${TOKENS[@]}" "${FILES[@]}" "$@")
printf '%q ' "${COMMAND[@]}"
echo
CODE=0
"${COMMAND[@]}" || CODE=$?
echo "ended with exit code $CODE"
if [ -n "${SLURM_JOB_ID:-}" ] && [ "${#FILES[@]}" -gt 0 ]; then
  case $CODE in
    0 | 2 | 17 | 130) ;;                         # done, or what a restart would meet again
    75) scontrol requeue "$SLURM_JOB_ID" ;;      # stopped on request
    *) # counted here: Slurm's own count has the requeues at the time limit too
      FAILURES=$(($(cat "$RUN/failures-$SLURM_JOB_ID" 2>/dev/null || echo 0) + 1))
      echo "$FAILURES" >"$RUN/failures-$SLURM_JOB_ID"
      [ "$FAILURES" -gt "${MAX_RESTARTS:-5}" ] || scontrol requeue "$SLURM_JOB_ID"
      ;;
  esac
fi
exit "$CODE"
