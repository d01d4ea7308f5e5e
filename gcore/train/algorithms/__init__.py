"""The mathematics of training: advantages, losses, their aggregation, KL estimators, corrections, the learning rate.

Pure functions, one module each; nothing here knows a rank, a seal or the rest of gcore, and nothing is imported here, so
that the learning rate can be had without torch. Tensors are [batch, tokens], one sequence a row, or [n], one sample
each. A mask is 1 where a token of the response is trained and 0 elsewhere; every number at a masked place must still be
finite, because a gradient of zero times infinity is not zero.
"""
