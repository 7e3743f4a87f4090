#!/bin/bash
#SBATCH --job-name=train.py
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))

echo "accel: Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}" >&2

again() {
  warned=1
  echo "accel: the time limit is near: SIGUSR1 to the scripts, then job $SLURM_JOB_ID is run again" >&2
  scancel --signal=USR1 "$SLURM_JOB_ID"
  (sleep 105; scontrol requeue "$SLURM_JOB_ID") &
}
trap again USR1

# srun answers with the highest exit code of the nodes: one that was only ended because another failed says 1.
# Slurm signals every process of a node; a warning is for the scripts that listen, and ends none of the others.
one='trap : HUP INT TERM; trap "" USR1 USR2; "$@"; code=$?; exit $((code == 143 ? 1 : code))'

srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
  bash -c "$one" accel \
  /venv/bin/python -m accel_cli launch --quiet --no-profile \
  --set launcher.kind=torchrun \
  --set launcher.nnodes=2 \
  --set launcher.nproc_per_node=2 \
  --set launcher.rdzv_endpoint="$head:$port" \
  --set launcher.rdzv_id="slurm-$SLURM_JOB_ID" \
  --set launcher.max_restarts=0 \
  -- train.py --lr -1 'a b' 'it'"'"'s' '$HOME' &

step=$!
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
[ -z "$warned" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
