"""The train rank: one process of a train world, DeepSpeed over torch.distributed, fed over gRPC.

    launch       the launch document                     feed_state   what it holds and may apply: pure
    serving      the process: thread, server, end        messages     the wire's messages, checked and unpacked
    loading      from nothing to a rank that can train   service      the gRPC service
    models       from folders to policy and the others   module       a Hugging Face model as a plain module
    prove        whether sequences may be packed         attention    attention over packed sequences
    packing      micro-batches of a step: pure           batch        samples as tensors, scored
    cut_step     a sealed step as tensors                logprobs     log-probabilities in little memory
    step         one sealed step                         loss, tally  what is minimised, what is counted
    trained      a model under DeepSpeed                 policy       the one whose tokens are trained
    critic       the one that says what is to come       critique     its part of a step
    reference    the model as it was, for the KL         advantages   how much better each token was
    saving       weights and checkpoints                 collective   what ranks tell one another
    copying      copies of its state in nodes' memory    copied       a world's state from such copies
    receipts     what was trained on, on paper           report       what comes out of a step
    memory       when it runs out                        insisting    what the disk does not take is tried again
    snapshot     a checkpoint's tensors in memory        writing      which go to the disk beside the steps
    counted      which tokens each update trains         shown        advantages, for people
    algorithms   the mathematics                         own          estimators and losses of the user's
    run_folder   whether it is still the same one          streamed     a step that comes in parts
    resting      its memory between two steps            rest_rules   when that may be given back: pure
    selftest     whether torch and DeepSpeed work here   phases       what its time was, by phase

`launch`, `feed_state`, `rest_rules`, `messages`, `service`, `serving`, `packing`, `phases`, `receipts`, `insisting`, `run_folder` and
`report` do without torch; the rest imports it, `loading` on the way.
"""
