#!/bin/bash
#SBATCH --job-name=train.py
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

echo "accel: Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}" >&2

requeue_pid=
requeue_before_limit() {
  echo "accel: the time limit is near: sending SIGUSR1 to the scripts, then requeueing job $SLURM_JOB_ID" >&2
  scancel --signal=USR1 "$SLURM_JOB_ID"
  (sleep 105; scontrol requeue "$SLURM_JOB_ID") &
  requeue_pid=$!
}
trap requeue_before_limit USR1

# srun exits with the highest exit code of the nodes: that of a node ended by the failure of another becomes 1.
# Slurm signals every process of a node: the warning must not end those that do not handle it.
node_command='trap : HUP INT TERM; trap "" USR1 USR2; "$@"; code=$?; exit $((code == 143 ? 1 : code))'

srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
  bash -c "$node_command" accel \
  /venv/bin/python -m accel_cli launch --quiet --no-profile \
  --set launcher.kind=torchrun \
  --set launcher.nnodes=2 \
  --set launcher.nproc_per_node=2 \
  --set launcher.max_restarts=0 \
  -- train.py --lr -1 'a b' 'it'"'"'s' '$HOME' &

step=$!
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
# Slurm may not kill the background process, which would requeue the next attempt.
[ -z "$requeue_pid" ] || { kill "$requeue_pid"; scontrol requeue "$SLURM_JOB_ID"; }
exit "$code"
