# Sourced by the other scripts: a Python environment with megapipe and what it needs. Not run by itself.
#
# Uses the active virtual environment, else makes .venv beside this checkout. PYTHON names another interpreter.
# Installs torch's CPU build (pinned) where there is no GPU and leaves an installed torch >= 2.11 alone.

if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
    echo "== Making a virtual environment in .venv"
    "${PYTHON:-python3}" -m venv .venv
  fi
  . .venv/bin/activate
fi

install_megapipe() { # install_megapipe EXTRAS: once per environment and pyproject.toml
  local stamp
  stamp="$(python -c 'import sys; print(sys.prefix)')/.megapipe-$(cksum < pyproject.toml | tr -d ' ')-$(pwd | cksum | tr -d ' ')$1"
  [ -f "$stamp" ] && return
  if ! python -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' 2> /dev/null; then
    if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
      echo "== Installing torch with CUDA (several GB)"
      python -m pip install "torch>=2.11"
    else
      # Without this pin pip takes the newest build, with gigabytes of CUDA that a machine without a GPU cannot use.
      echo "== Installing torch ${MEGAPIPE_TORCH:-2.13.0}, CPU build"
      python -m pip install --progress-bar off "torch==${MEGAPIPE_TORCH:-2.13.0}"
    fi
  fi
  echo "== Installing megapipe$1"
  python -m pip install --quiet --progress-bar off -e ".$1"
  touch "$stamp"
}
