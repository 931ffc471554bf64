#!/usr/bin/env bash
# Run the unit tests under the other supported interpreters at hand, with the newest jax, flax, optax and orbax:
#
#   bash launch/test_interpreters.sh [--python PATH] [arguments of pytest ...]
#
# Looks for python3.12 and python3.13, or takes the one named. Each gets an environment of its own, .venv-<version>. Tests
# that compare with PyTorch, use vLLM or play ALFWorld are left out: those come for one interpreter only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

interpreters=()
if [ "${1:-}" = --python ]; then
  interpreters=("$2")
  shift 2
else
  for name in python3.12 python3.13; do
    "$name" --version > /dev/null 2>&1 && interpreters+=("$name")
  done
fi
[ ${#interpreters[@]} -gt 0 ] || { echo "no python3.12 or python3.13 found: name one with --python PATH" >&2; exit 2; }

others='^\s*(import|from) (torch|peft|vllm|flowjax\.rollout\.engine_side|flowjax\.envs\.alfworld)\b|envs import alfworld'
mapfile -t files < <(grep -rLE "$others" tests --include='test_*.py' | sort)
for python in "${interpreters[@]}"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  environment=.venv-$version
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
  "$environment/bin/pip" install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
    --editable '.[test,math,code,search,webshop]'
  "$environment/bin/python" -c '
import importlib.metadata as m, sys
print("Python", sys.version.split()[0], *(f"{n} {m.version(n)}" for n in ("jax", "flax", "optax", "orbax-checkpoint")))'
  "$environment/bin/python" -m pytest -n 2 --dist loadfile -m "not integration and not slow" "$@" "${files[@]}"
done
