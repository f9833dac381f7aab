#!/usr/bin/env bash
# Rewrites constraints.txt, the lock: exact versions of all dependencies of the base install and the extras gcs, s3, hf,
# prepare and test, for every supported Python in one file. Needs uv on the PATH (pip install uv). Run it after a change
# of a range in pyproject.toml, then run the suite on each Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A newer torch has nothing that the tests need, and would replace a build that many machines already have.
torch_pin='torch==2.13.0'

resolved=$(uv pip compile --quiet --upgrade --universal --no-header --no-annotate --python-version 3.11 \
  --extra gcs --extra s3 --extra hf --extra prepare --extra test --constraints <(echo "$torch_pin") pyproject.toml)
{
  echo "# The lock: exact versions for Python 3.11 and newer, written by scripts/lock.sh. Use it as"
  echo "#   pip install -c constraints.txt -e .        (scripts/train.sh and scripts/test.sh do)"
  echo "# CUDA and TPU libraries are left to the exact pins of jax[cuda12], jax[cuda13], jax[tpu] and torch, which differ."
  grep -Ev '^(nvidia-|cuda-|triton==)' <<<"$resolved"
} >constraints.txt
