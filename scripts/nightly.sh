#!/usr/bin/env bash
# What draws many cases: schedules under every cost, all pairs of choices of a run, trainings compared with one process, two hosts of which one dies,
# faults at random moments, damaged inputs and command lines of every command, mutants of the core; the docs' site; the
# GPU's check on a CPU; the newest torch under each Python. MINUTES (of the comparison, 30), CASES (of post-validation,
# 300), DRAWS (of inputs, 20000), COMMAND_LINES (5000), MUTANTS (100) and SEED change it. A case that differs is printed as
# a command.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe "[dev,docs]"
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict # the docs as a site, in runs/site; a dead link is an error
export OMP_NUM_THREADS=1 MEGAPIPE_NIGHTLY=1
# Every file of tests that has more at night.
# shellcheck disable=SC2046  # the names are words
WORKERS=0 bash scripts/test.sh $(grep -rlE 'MEGAPIPE_NIGHTLY|SPLIT_STEPS|by_night' tests --include='test_*.py' | sort)
python -m tools.proofs.cover --strength 2 --seed "${SEED:-$(date +%j)}" # --strength 3 is a night of its own
python tools/proofs/fuzz_equivalence.py --seconds "$((60 * ${MINUTES:-30}))" --seed "${SEED:-$(date +%j)}"
python tools/proofs/fuzz_post_validation.py --cases "${CASES:-300}" --seed "${SEED:-$(date +%j)}"
python tools/proofs/fuzz_equivalence.py --only-states --seconds 600 --seed "${SEED:-$(date +%j)}"
TINY="--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data
  --tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --global-batch-size 8 --train-iters 1000000 --lr 1e-3
  --eval-iters 0 --save-interval 20 --save-keep-last 3 --save-remove-earlier --distributed-timeout-seconds-after-init 20"
# shellcheck disable=SC2086  # the flags are words
for layout in "--use-distributed-optimizer" "--tensor-model-parallel-size 2" "--pipeline-model-parallel-size 2" \
  "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h2 --enable-optimizer-post-validation"; do
  python tools/chaos.py --minutes 20 -- torchrun --standalone --nproc-per-node 2 pretrain_gpt.py $layout $TINY
done
python tools/gpu_check.py --device cpu
python -m tools.proofs.gpu orders
python -m tools.proofs.gpu.graphs
python -m tools.proofs.gpu.emulated.features
python -m tools.proofs.gpu.emulated.features --early
python -m tools.proofs.gpu.emulated.check --cases "${CASES:-300}" --seed "${SEED:-$(date +%j)}"
python -m tools.proofs.gpu.emulated.resumed
python -m megapipe gpu-check --emulated --minutes 60 --output "$(mktemp -d)"
python -m tools.proofs.inputs.commands --cases "${COMMAND_LINES:-5000}" --seed "${SEED:-$(date +%j)}"
python -m tools.proofs.inputs.fuzz --cases "${DRAWS:-20000}" --seed "${SEED:-$(date +%j)}"
python -m tools.proofs.families.split --seed "$(( ${SEED:-$(date +%j)} * 4 ))"
python -m tools.proofs.families.continued
python -m tools.proofs.inputs.configs --seed "${SEED:-$(date +%j)}"
python -m tools.proofs.mutants --draw "${MUTANTS:-100}" --seed "${SEED:-$(date +%j)}" --results "$(mktemp)"
python tools/proofs/drawn_starts.py --seed "${SEED:-$(date +%j)}"
python tools/proofs/soak.py
bash scripts/versions.sh
