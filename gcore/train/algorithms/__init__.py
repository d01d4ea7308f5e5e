"""The mathematics of training: advantages, losses and what belongs to them.

    advantages    group-relative, ReMax, returns and GAE; whitening; penalties for length and KL
    losses        PPO, GSPO, CISPO, likelihood, value; KL estimators; importance corrections; aggregation

Pure functions: these modules import nothing else from gcore. Tensors are [batch, tokens] with one sequence per row, or
[n] with one sample per element. A mask is nonzero where a response token is trained and 0 elsewhere. Values at masked
positions must be finite too, because a zero gradient times infinity is NaN. Log-probabilities and KL are in nats,
lengths in tokens; rewards and advantages have no unit. docs/use/algorithms.md lists names, formulas and papers.
"""
