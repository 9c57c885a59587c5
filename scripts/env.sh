# shellcheck shell=bash disable=SC1091
# Sourced by the other scripts: a Python environment with megapipe and what it needs. Not run by itself.
#
# Uses the active virtual or conda environment (not conda's base), else makes .venv beside this checkout. PYTHON names
# another interpreter.
# Installs torch's CPU build (pinned) where there is no GPU and leaves an installed torch >= 2.11 alone.

conda="${CONDA_PREFIX:-}"
[ "${CONDA_DEFAULT_ENV:-}" != base ] || conda=""
if [ -z "${VIRTUAL_ENV:-}$conda" ]; then
  if [ ! -x .venv/bin/python ]; then
    echo "== Making a virtual environment in .venv"
    "${PYTHON:-python3}" -m venv .venv
  fi
  . .venv/bin/activate
fi

install_megapipe() { # install_megapipe EXTRAS: once per environment, checkout and pyproject.toml
  local prefix mine found
  prefix="$(python -c 'import sys; print(sys.prefix)')" mine="$(cksum < pyproject.toml) $(pwd)"
  for found in "$prefix"/.megapipe-*; do # what is installed is the checkout that asked last
    [ "$(cat "$found" 2> /dev/null)" != "$mine" ] || { [ -n "$1" ] && [ "$found" != "$prefix/.megapipe-$1" ]; } || return 0
  done
  local recent='from importlib.metadata import version; assert tuple(map(int, version("torch").split(".")[:2])) >= (2, 11)'
  if ! python -c "$recent" 2> /dev/null; then
    if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
      echo "== Installing torch with CUDA (several GB)"
      python -m pip install "torch>=2.11,<2.16"
    else
      # The general build brings gigabytes of CUDA. Linux' CPU builds are called +cpu, and not every index has them.
      echo "== Installing torch ${MEGAPIPE_TORCH:-2.13.0}, its CPU build if pip's index has one"
      python -m pip install --progress-bar off "torch==${MEGAPIPE_TORCH:-2.13.0}+cpu" ||
        python -m pip install --progress-bar off "torch==${MEGAPIPE_TORCH:-2.13.0}"
    fi
  fi
  echo "== Installing megapipe$1"
  python -m pip install --quiet --progress-bar off -e ".$1"
  rm -f "$prefix"/.megapipe-*
  echo "$mine" > "$prefix/.megapipe-$1"
}

cpu_if_fewer_gpus_than() { # cpu_if_fewer_gpus_than RANKS: the flag for a machine with some GPUs, but too few
  local gpus
  gpus="$({ nvidia-smi -L || true; } 2> /dev/null | wc -l)"
  [ "$gpus" -eq 0 ] || [ "$gpus" -ge "$1" ] || echo "--distributed-backend gloo"
}
