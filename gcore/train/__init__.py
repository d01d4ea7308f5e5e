"""Training: one process of a train world (a rank), which receives samples over gRPC.

A train world is the group of training processes of a job; it is replaced as a whole. `step` trains one step from its
seal, the record that fixes its samples. `rank` is the process, `backends` distribute a model, `checkpoint` writes
files, and `algorithms` is the mathematics. Read `step` first. `packing` and `rank.feed` are pure. `rank.launch`,
`rank.messages` and `rank.service` work without torch.
"""
