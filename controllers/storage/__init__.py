"""The run folder of a job, on a shared disk or on each node.

`run_folder` locates it and proves that nodes share it; `peer_files` fetches files from other nodes; `replication`
copies checkpoints and receipts; `garbage` deletes what no job needs. `rules` decides what may be deleted (pure).
"""
