"""Stand-ins for Slurm's commands and for the programs of a job; each is a small program that logs its call.

`srun` runs its command once for each node of the allocation, on this machine, and forwards SIGTERM; `gcore-controller` and `etcd` wait
for their end. `gcore` is gcore's own.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

SRUN = """#!/bin/bash
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
for node in $(cat "$STAND_INS/nodes"); do
  SLURMD_NODENAME=$node "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
  one=0
  wait "$pid" || one=$?
  while kill -0 "$pid" 2>/dev/null; do one=0; wait "$pid" || one=$?; done
  (( one > code )) && code=$one
done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
cat "$STAND_INS/nodes"
"""
WAITING = """#!/bin/bash
echo "NAME $*" >> "$CALLS"
trap 'echo "NAME ended" >> "$CALLS"; exit 0' TERM
[ ! -e "$STAND_INS/NAME.code" ] || exit "$(cat "$STAND_INS/NAME.code")"
echo "NAME runs" >> "$CALLS"
while :; do sleep 0.05; done
"""
NO_GPUS = "#!/bin/sh\nexit 9\n"


def make_stand_ins(folder: Path, nodes: list[str]) -> dict[str, str]:
    """Write them into `folder`; the environment of a batch script's first node."""
    folder.mkdir(parents=True)
    programs = {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "gcore-controller": WAITING.replace("NAME", "gcore-controller"),
        "etcd": WAITING.replace("NAME", "etcd"),
        "nvidia-smi": NO_GPUS,
        "gcore": f'#!/bin/sh\nexec {sys.executable} -P -m controllers.cli.main "$@"\n',
        "python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in programs.items():
        program = folder / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "nodes").write_text("\n".join(nodes) + "\n")
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "PYTHONPATH") if name in os.environ}
    return kept | {
        "PATH": f"{folder}:/usr/bin:/bin",
        "STAND_INS": str(folder),
        "CALLS": str(folder / "calls"),
        "SLURM_JOB_NODELIST": f"node[0-{len(nodes) - 1}]",
        "SLURM_JOB_ID": "7",
        "USER": "ada",
    }
