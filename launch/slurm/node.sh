#!/bin/bash
# A node that plays for a run of run.sh, with an engine on each of its GPUs. It may come and go at any time.
#
#   sbatch --gpus-per-node=8 --array=1-4 launch/slurm/node.sh runs/NAME [--config.engine.<field>=value ...]
#
# or as many as the run wants: --config.pool.command="... sbatch ... launch/slurm/node.sh $FLOWJAX_RUN" (docs/rollout.md).
#SBATCH --job-name=flowjax-node
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --output=slurm-%A_%a.log
run=$1
shift
name=node-$SLURM_JOB_ID
url=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["dataflow"])' "$run/endpoints.json") || exit 2
# A key lets it play and nothing else.
key=$(python -m flowjax.launch --status="$run" --invite="$name") || exit 2
export "$key"
exec python -m flowjax.launch --join="$url" --name="$name" --config.runs="${TMPDIR:-/tmp}" \
  --config.engine.replicas="${SLURM_GPUS_ON_NODE:-1}" --config.engine.tensor_parallel=1 "$@"
