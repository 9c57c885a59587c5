#!/usr/bin/env bash
# What draws many cases: schedules under every cost, and trainings compared with one process. Half an hour; MINUTES and
# SEED change it. A case that differs is printed as a command.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe "[dev]"
export OMP_NUM_THREADS=1 MEGAPIPE_NIGHTLY=1
python -m pytest tests/schedule/test_schedule_properties.py tests/training/test_two_hosts.py
python tools/fuzz_equivalence.py --seconds "$((60 * ${MINUTES:-30}))" --seed "${SEED:-$(date +%j)}"
