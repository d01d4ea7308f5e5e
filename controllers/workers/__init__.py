"""Worker processes on this node: engines and train ranks.

`launcher` starts supervisors, `launch_documents` says what each child is told (pure), `ranks` connects to train ranks. What a worker is, is in
`gcore.worker`; which workers are wanted is decided in `controllers.rules.workers`.
"""
