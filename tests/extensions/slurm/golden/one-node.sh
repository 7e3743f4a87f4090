#!/bin/bash
#SBATCH --job-name=train.py
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
#SBATCH --no-requeue

echo "accel: Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}" >&2

# srun exits with the highest exit code of the nodes: that of a node ended by the failure of another becomes 1.
# Slurm signals every process of a node: the warning must not end those that do not handle it.
node_command='trap : HUP INT TERM; trap "" USR1 USR2; "$@"; code=$?; exit $((code == 143 ? 1 : code))'

srun --nodes=1 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
  bash -c "$node_command" accel \
  /venv/bin/python -m accel_cli launch --quiet --no-profile \
  --set launcher.kind=torchrun \
  --set launcher.nnodes=1 \
  --set launcher.nproc_per_node=1 \
  --set launcher.max_restarts=0 \
  -- train.py --lr -1 'a b' 'it'"'"'s' '$HOME'
