"""Worker processes on this node: engines and train ranks.

`launcher` starts supervisors, `launch_documents` builds the launch document of each child (pure), `ranks` connects to train ranks. The worker
itself is in `gcore.worker`; `controllers.rules.workers` decides which workers run.
"""
