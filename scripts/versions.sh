#!/usr/bin/env bash
# The newest torch, allowed by pyproject.toml or not, under each Python of PYTHONS that is here: a wheel in a clean environment, its
# commands, and the tests that come closest to torch's private names. Downloads torch for each; scripts/nightly.sh runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
unset PYTHONPATH
repository="$PWD" folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
for python in ${PYTHONS:-python3.11 python3.12 python3.13}; do
  if ! "$python" -c pass 2> /dev/null; then
    echo "== no $python here"
    continue
  fi
  echo "== $("$python" --version)"
  "$python" -m venv --clear "$folder/venv"
  export PATH="$folder/venv/bin:$PATH"
  pip install --quiet --progress-bar off ".[dev]"
  pip install --quiet --progress-bar off --upgrade torch
  python -c 'import torch; print("torch", torch.__version__)'
  cd "$folder"
  megapipe --version
  megapipe schedules show zb-v --pp 4 --microbatches 8
  megapipe init my
  bash my/pretrain.sh --train-iters 2 --lr-warmup-iters 1
  rm -r my
  cd "$repository"
  python -m pytest -n "${WORKERS:-3}" tests/distributed tests/pipeline_parallel/messages tests/pipeline_parallel/contracts \
    tests/checkpoint tests/tensor_parallel tests/commands/test_door.py
done
