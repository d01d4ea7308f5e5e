"""The mathematics of training: advantages, losses and what belongs to them.

    advantages    against a group, against a greedy answer; returns and GAE; whitening; penalties of length and of KL
    losses        PPO, GSPO, CISPO, likelihood, values; KL estimators; corrections; from token losses to one number

Pure functions; nothing here knows a rank, a seal or the rest of gcore, and nothing is imported here. Tensors are [batch, tokens], one
sequence a row, or [n], one sample each. A mask is 1 where a token of the response is trained and 0 elsewhere; every number at a masked place must still be
finite, because a gradient of zero times infinity is not zero. Log-probabilities and divergences are in nats, lengths in
tokens; rewards and advantages have no unit. docs/use/algorithms.md has the table of names, formulas and papers.
"""
