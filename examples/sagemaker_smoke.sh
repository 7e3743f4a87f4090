#!/usr/bin/env bash
# Checks in a real AWS account that accel runs SageMaker jobs: the self-check on one instance and on two, a spot job that
# leaves a model, its log, the download, and the clean-up. Ten minutes, and less than a dollar.
#
#   ROLE=accel-training REGION=us-east-1 bash examples/sagemaker_smoke.sh
#
# ROLE is a role that SageMaker may assume (docs/sagemaker.md shows how to create one). INSTANCE is optional.
set -euo pipefail

: "${ROLE:?set ROLE to the name or ARN of a role that SageMaker may assume}"
: "${REGION:?set REGION to an AWS region, for example us-east-1}"
instance=${INSTANCE:-ml.m5.large}
folder=$(mktemp -d)
run="smoke-$(date -u +%Y%m%d-%H%M%S)"
clean_up() {
  status=$?
  account=$(aws sts get-caller-identity --query Account --output text)
  aws s3 rm --quiet --recursive "s3://sagemaker-$REGION-$account/accel/" --exclude '*' --include "$run-*" || true
  rm -rf "$folder"
  if [ "$status" = 0 ]; then echo "everything works"; else echo "failed with exit code $status" >&2; fi
}
trap clean_up EXIT

cat > "$folder/accel.yaml" <<PROFILE
schema_version: 1
launcher:
  kind: sagemaker
  region: $REGION
  role: $ROLE
  instance_type: $instance
  base_job_name: $run
  max_run: 20m
  model_dir: out
  download: false
PROFILE

cat > "$folder/train.py" <<'SCRIPT'
from pathlib import Path

import torch
from accel_runtime import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(20):
    loss = model(torch.ones(8, 4)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.6f}")
Path("out").mkdir(exist_ok=True)
accelerator.save(accelerator.get_state_dict(model), "out/model.pt")
SCRIPT
cd "$folder"

echo "== 1 of 5: the request, without AWS"
accel launch --offline train.py > /dev/null

echo "== 2 of 5: the self-check on one instance"
accel test

echo "== 3 of 5: the self-check on two instances"
accel test --nnodes 2

echo "== 4 of 5: a spot job that leaves a model"
accel launch --set launcher.spot=true --set launcher.max_wait=30m --job-name "$run-spot" train.py

echo "== 5 of 5: its log, and its model"
accel jobs logs "$run-spot" | grep "loss "
accel jobs download "$run-spot" -o results
ls -l "results/$run-spot/model.pt"
