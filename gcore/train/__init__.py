"""The train rank: one process of a train world, DeepSpeed over torch.distributed, fed over gRPC.

    launch       the launch document                     feed_state   what it holds and may apply: pure
    serving      the process: thread, server, end        messages     the wire's messages, checked and unpacked
    loading      from nothing to a rank that can train   service      the gRPC service
    packing      micro-batches of a step: pure           batch        samples as tensors, scored
    step         one sealed step                         loss, tally  what is minimised, what is counted
    policy       the model under DeepSpeed               collective   what ranks tell one another
    saving       weights and checkpoints                 receipts     what was trained on, on paper
    report       what comes out of a step                algorithms/  the mathematics

`batch`, `collective`, `loss`, `policy`, `saving`, `step`, `tally` and `algorithms` import torch; the rest does not, except that
`loading` does so on the way.
"""
