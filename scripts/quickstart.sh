#!/usr/bin/env bash
# From nothing to a trained GPT in minutes, no GPU and no download of data: installs, then `megapipe quickstart`, which
# makes a corpus of the Python standard library, trains a tokenizer, tokenises, pretrains on 2 pipeline stages, samples.
# Run again, it reuses what it made. RUN=folder puts everything elsewhere than runs/quickstart; flags given here come last
# and win in the pretraining: bash scripts/quickstart.sh --pipeline-schedule zb-v
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
install_megapipe ""
exec python -m megapipe quickstart --folder "${RUN:-runs/quickstart}" --ids "${VOCAB_SIZE:-4096}" "$@"
