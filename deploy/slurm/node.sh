#!/bin/bash
# Runs a node's controller until it is stopped. gcore.sbatch starts it once per node with srun.
set -euo pipefail
node=${SLURMD_NODENAME:?not set: gcore.sbatch starts this script with srun}
home=${GCORE_HOME:-${TMPDIR:-/tmp}/gcore-${SLURM_JOB_ID:-0}-$node}
umask 077
mkdir -p "$home"
export GCORE_NODE="$node" GCORE_HOME="$home" GCORE_CONFIG="$home/node.yaml"
exec "$GCORE_DEPLOY/node/run.sh" "$GCORE_DEPLOY/slurm/node.yaml"
