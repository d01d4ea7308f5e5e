"""The train rank: one process of a train world, DeepSpeed over torch.distributed, fed over gRPC.

    launch       the launch document                     feed_state   what it holds and may apply: pure
    packing      micro-batches of a step: pure           messages     the wire's messages, checked and unpacked
    batch        samples as tensors                      service      the gRPC service
    collective   what ranks tell one another             serving      the process: thread, server, end
    policy       the model under DeepSpeed               saving       weights, checkpoints
    step         one sealed step, from rewards to report receipts     what it trained on, on paper
    algorithms/  the mathematics

Only `batch`, `collective`, `policy`, `saving`, `step` and `algorithms` import torch.
"""
