#!/usr/bin/env bash
# Make the environment of the peers that `python -m tests.benchmarks.trainer` and `loop` measure flowjax against:
#
#   bash launch/benchmark_peers.sh [--folder FOLDER] [--torch-index URL]
#
# --folder FOLDER     where to make it; default .venv-peers
# --torch-index URL   a further package index, for machines whose configured one lacks the CPU build of torch
#                     (https://download.pytorch.org/whl/cpu has it)
# It holds google-tunix with qwix, and trl with peft, transformers and torch. flowjax itself never imports any of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=.venv-peers
index=()
while [ $# -gt 0 ]; do
  case $1 in
    --folder) folder=$2; shift 2 ;;
    --torch-index) index=(--extra-index-url "$2"); shift 2 ;;
    *) echo "launch/benchmark_peers.sh: unknown option $1 (known: --folder FOLDER, --torch-index URL)" >&2; exit 2 ;;
  esac
done

if [ ! -x "$folder/bin/python" ]; then
  python=$(command -v "${PYTHON:-python3.11}" || command -v python3)
  "$python" -m venv "$folder"
fi
echo "Installing the peers into $folder (some minutes) ..."
"$folder/bin/pip" install --quiet --disable-pip-version-check "${index[@]}" \
  torch==2.13.0 google-tunix==0.1.7 qwix==0.1.8 trl==1.16.0 peft==0.21.2
