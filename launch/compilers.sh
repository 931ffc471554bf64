#!/usr/bin/env bash
# Make the environment in which `python -m tests.benchmarks.aot` compiles for GPUs and TPUs that are not there:
#
#   bash launch/compilers.sh [--folder FOLDER]
#
# --folder FOLDER   where to make it; default .venv-compilers
# It holds what setup.py asks for, and JAX's plugins for CUDA 12 and for TPUs: 6 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=.venv-compilers
while [ $# -gt 0 ]; do
  case $1 in
    --folder) folder=$2; shift 2 ;;
    *) echo "launch/compilers.sh: unknown option $1 (known: --folder FOLDER)" >&2; exit 2 ;;
  esac
done

if [ ! -x "$folder/bin/python" ]; then
  python=$(command -v "${PYTHON:-python3.11}" || command -v python3)
  "$python" -m venv "$folder"
fi
echo "Installing the compilers into $folder (some minutes) ..."
"$folder/bin/pip" install --quiet --disable-pip-version-check "jax[cuda12]==0.10.2" "jax[tpu]==0.10.2"
"$folder/bin/pip" install --quiet --disable-pip-version-check --editable .
