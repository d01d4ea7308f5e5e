"""Worker processes on this node: engines, train ranks, and the blob store.

`launcher` starts workers, each with a supervisor process. `launch_documents` builds the settings of each worker (pure).
`ranks` connects to train ranks. `blobs` runs the node's blob store. The worker itself is in `gcore.worker`;
`controllers.rules.workers` decides which workers run.
"""
