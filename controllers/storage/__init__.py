"""The folder of a run, on a shared disk or on each node.

`run_folder` finds it and proves that it is shared; `peer_files` fetches files from other nodes; `replication` copies checkpoints and receipts;
`garbage` deletes what no job needs. `rules` says what may go (pure).
"""
