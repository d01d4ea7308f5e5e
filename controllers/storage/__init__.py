"""The run folder of a job, on a shared disk or on each node.

`run_folder` locates it and proves that nodes share it. `peer_files` fetches files from other nodes. `replication`
copies checkpoints and receipts (records of what each rank trained). `garbage` deletes files that no job needs; `rules`
decides which (pure).
"""
