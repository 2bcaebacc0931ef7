#!/bin/sh
# Everything that is to be asked of a GPU, in nine minutes: see dcut_jax/bench/day.py.
#
#   scripts/gpu_day.sh                  into gpu-day/, on the GPU of this machine
#   scripts/gpu_day.sh --out results    elsewhere
#   scripts/gpu_day.sh --tiny           next to nothing, on a CPU, to try the script
#   PYTHON=/path/to/python scripts/gpu_day.sh     an environment that is there already
#
# Without PYTHON, .venv-gpu is made with JAX for CUDA 12 (CUDA=13: for CUDA 13). That
# takes minutes of its own, once, which are not among the nine.
set -eu
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    if [ ! -e .venv-gpu/.ready ]; then
        command -v python3 >/dev/null || {
            echo "error: expected Python 3.11 or newer as python3, found none;" \
                "install it, or name one with PYTHON=..." >&2
            exit 1
        }
        echo "Installing dcut-jax with JAX for CUDA ${CUDA:=12} into .venv-gpu, once."
        python3 -m venv --clear .venv-gpu
        .venv-gpu/bin/python -m pip install --disable-pip-version-check \
            -e ".[cuda$CUDA,plot]" pytest absl-py ml_dtypes
        touch .venv-gpu/.ready
    fi
    PYTHON=.venv-gpu/bin/python
fi

PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m dcut_jax.bench.day "$@"
