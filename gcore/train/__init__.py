"""Training: one process of a train world (a rank), which receives samples over gRPC.

`step` trains one sealed step. `rank` is the process. `backends` distribute a model. `checkpoint` writes files.
`algorithms` is the mathematics. Read `step` first. `packing` and `rank.feed` are pure; `rank.launch`, `rank.messages`
and `rank.service` work without torch.
"""
