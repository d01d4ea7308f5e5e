"""Training: one process of a train world (a rank), which receives samples over gRPC.

`step` is one sealed step; `rank` the process; `backends` how a model is spread; `checkpoint` what is written; `algorithms` the mathematics. Read
`step` first. `packing` and `rank.feed` are pure; `rank.launch`, `rank.messages` and `rank.service` work without torch.
"""
