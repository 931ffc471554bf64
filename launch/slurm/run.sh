#!/bin/bash
# A run on the nodes of one SLURM job. The first node has launcher, dataflow, engines and rollouts; each other node has one
# process of the trainer, with all its GPUs.
#
#   sbatch --nodes=3 --gpus-per-node=8 launch/slurm/run.sh runs/NAME --config=configs/math.py:qwen3_8b --config.mesh.data=-1 --config.trainer.micro_batch_rows=16 [--config.field=value ...]
#
# The mesh of a recipe is for one machine: data=-1 takes all GPUs of the trainer, whose number (16 of two nodes) divides the rows.
# Submit from a folder that all nodes share, with flowjax's environment active (. .venv/bin/activate); so is the run's folder.
# The same command goes on with a run that is there already, and so does the job when SLURM requeues it. On one node the
# launcher does it all. More nodes to play, at any time: node.sh. Output: slurm-<job>.log, and runs/NAME/logs.
#SBATCH --job-name=flowjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -u
run=$1
shift
# Two minutes before the time limit: go on in a job of the same number.
trap 'scontrol requeue "$SLURM_JOB_ID"; exit 1' USR1

if [ -e "$run/config.json" ]; then
  launch=(python -m flowjax.launch --resume="$run")
else
  launch=(python -m flowjax.launch --name="$(basename "$run")" --config.runs="$(dirname "$run")")
fi
# The name by which other nodes find this one, unless an address is given.
launch+=(--config.dataflow.host="$SLURMD_NODENAME" "$@")
hosts=$((SLURM_JOB_NUM_NODES - 1))
[ "$hosts" -eq 0 ] || launch+=(--config.elsewhere="('trainer',)")

# Processes of a trainer wait for each other. When one dies SLURM ends the others, and all start again from the newest
# checkpoint; but not after a mistake in the config (status 2), nor a sixth time within an hour.
train() {
  local deaths=0 status
  SECONDS=0
  until srun --nodes="$hosts" --ntasks="$hosts" --relative=1 --cpu-bind=none --kill-on-bad-exit=1 --label \
    python -m flowjax.launch --role=trainer --run="$run"; do
    status=$?
    [ "$SECONDS" -lt 3600 ] || SECONDS=0 deaths=0
    deaths=$((deaths + 1))
    echo "run.sh: the trainer has ended with status $status, $deaths within an hour"
    [ "$status" -ne 2 ] && [ "$deaths" -le 5 ] || return "$status"
    sleep 5
  done
}

"${launch[@]}" &
head=$!
[ "$hosts" -eq 0 ] || { train || kill "$head"; } &
trainers=$!
wait "$head" # it ends last where all is well: once the last version is evaluated
status=$?
kill "$trainers" 2>/dev/null
exit "$status"
