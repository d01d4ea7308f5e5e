"""Worker processes on this node: engines and train ranks.

`launcher` starts workers, each with a supervisor process. `launch_documents` builds the settings of each worker (pure).
`ranks` connects to train ranks. The worker itself is in `gcore.worker`; `controllers.rules.workers` decides which
workers run.
"""
