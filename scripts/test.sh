#!/usr/bin/env bash
# Everything that must hold before a commit: style, types, tests. Installs what it needs; no GPU needed.
# Arguments go to pytest: bash scripts/test.sh tests/schedule -x
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe "[dev]"
export OMP_NUM_THREADS=1 # many-rank tests are threads and processes of their own
unset PYTHONDONTWRITEBYTECODE # or each of many processes compiles what it imports
# The pure wheel, unpacked but not installed: with it layers of Transformer Engine are tested without a GPU.
te="$(python -c 'import sys; print(sys.prefix)')/transformer_engine-2.20.2-py3-none-any.whl"
if [ ! -f "$te" ]; then
  python -m pip download --quiet --retries 0 --no-deps --dest "$(dirname "$te")" transformer_engine==2.20.2 ||
    echo "== No wheel of transformer_engine: its tests will be skipped"
fi
if [ -f "$te" ]; then
  [ -d "${te%.whl}" ] || { python -m zipfile --extract "$te" "${te%.whl}.new" && mv "${te%.whl}.new" "${te%.whl}"; }
  export MEGAPIPE_TE_WHEEL="${MEGAPIPE_TE_WHEEL:-$te}"
fi
echo "== ruff"
ruff check .
ruff format --check --quiet .
types="$(mktemp)"
mypy > "$types" 2>&1 &
if [ ! -d tests/__pycache__ ]; then
  echo "== Compiling the tests: a fresh clone's workers would each do it"
  python -m pytest --collect-only > /dev/null || true # what is wrong, the workers say
fi
echo "== pytest, beside mypy"
# Four workers for two cores: some tests wait for a timeout or for processes. WORKERS=0 uses none.
failed=0
python -m pytest -n "${WORKERS:-4}" --dist worksteal "$@" || failed=$?
echo "== mypy"
wait $! || failed=$?
cat "$types"
rm "$types"
exit "$failed"
