#!/bin/bash
#SBATCH '--job-name=my run'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=a100:4
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --partition=gpu
#SBATCH --account=team
#SBATCH --qos=high
#SBATCH --time=2-12:00:00
#SBATCH '--output=logs/a b/slurm-%j.out'
#SBATCH --no-requeue
#SBATCH --constraint=a100
#SBATCH --comment="two words"

module load cuda
source ~/venv/bin/activate

echo "accel: Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}" >&2

# srun exits with the highest exit code of the nodes: that of a node ended by the failure of another becomes 1.
# Slurm signals every process of a node: the warning must not end those that do not handle it.
node_command='trap : HUP INT TERM; trap "" USR1 USR2; "$@"; code=$?; exit $((code == 143 ? 1 : code))'

srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task=16 \
  bash -c "$node_command" accel \
  /venv/bin/python -m accel_cli launch --quiet --no-profile \
  --set launcher.kind=torchrun \
  --set launcher.nnodes=2 \
  --set launcher.nproc_per_node=4 \
  --set launcher.max_restarts=3 \
  -- train.py --lr -1 'a b' 'it'"'"'s' '$HOME'
