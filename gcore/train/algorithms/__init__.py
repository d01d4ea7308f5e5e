"""The mathematics of training: advantages, losses, their aggregation, KL estimators, corrections, the learning rate.

    advantages    against a group, against a greedy answer      returns      what is still to come; GAE
    whitening     mean 0 and variance 1 over a whole step       shaping      penalties of length and of KL in the reward
    losses        PPO, GSPO, CISPO, likelihood, values          kl           k1, k2, k3, k3+
    corrections   TIS, IcePop, MIS, decoupled PPO               aggregate    from token losses to one number
    schedule      the learning rate

Pure functions, one module each; nothing here knows a rank, a seal or the rest of gcore, and nothing is imported here, so
that the learning rate can be had without torch. Tensors are [batch, tokens], one sequence a row, or [n], one sample
each. A mask is 1 where a token of the response is trained and 0 elsewhere; every number at a masked place must still be
finite, because a gradient of zero times infinity is not zero. Log-probabilities and divergences are in nats, lengths in
tokens; rewards and advantages have no unit. docs/algorithms.md has the table of names, formulas and papers.
"""
