#!/bin/bash
# What gcore.sbatch has srun run, once on each node: that node's controller, until it is told to end.
set -euo pipefail
node=${SLURMD_NODENAME:?this is started by gcore.sbatch, through srun}
home=${GCORE_HOME:-${TMPDIR:-/tmp}/gcore-${SLURM_JOB_ID:-0}-$node}
umask 077
mkdir -p "$home"
export GCORE_NODE="$node" GCORE_HOME="$home" GCORE_CONFIG="$home/node.yaml"
exec "$GCORE_DEPLOY/node/run.sh" "$GCORE_DEPLOY/slurm/node.yaml"
