#!/usr/bin/env bash
# Everything that must hold before a commit: style, types, tests. Installs what it needs; no GPU needed.
# Arguments go to pytest: bash scripts/test.sh tests/schedule -x
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe "[dev]"
export OMP_NUM_THREADS=1 # many-rank tests are threads and processes of their own
echo "== ruff"
ruff check .
ruff format --check --quiet .
echo "== mypy"
mypy
echo "== pytest"
python -m pytest "$@"
