"""How good a model is, from repeated tries at each prompt: accuracy and pass@k. Pure, of numbers only, importable alone.

Of n responses to one prompt c are correct. The chance that at least one of k responses is correct is estimated without
bias by 1 - C(n-c, k) / C(n, k): the share of all choices of k responses that hold a correct one (Chen et al. 2021,
"Evaluating Large Language Models Trained on Code", section 2.1). The plausible 1 - (1 - c/n)^k is biased, downwards: it draws
with replacement.

Does not know what makes a response correct, nor where the counts come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_MANY = 64


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of pass@k for one prompt: `c` of `n` responses are correct. Between 0 and 1.

    Exactly 0 for c = 0, exactly 1 for n - c < k, c/n for k = 1; else with a relative error of some 1e-12, also for n of many
    thousands, where the binomial coefficients have thousands of digits. Takes min(c, k) steps. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} correct responses among {n} is not defined")
    if n - c < k:
        return 1.0
    # C(n-c, k) / C(n, k) is the product over j < c of 1 - k / (n-j), and the same with c and k exchanged.
    terms, other = min(c, k), max(c, k)
    if terms < 2:
        return other / n if terms else 0.0
    # A sum of logarithms, and expm1: a chance near 0 keeps its digits, where 1 - p would lose them.
    return -math.expm1(math.fsum(math.log1p(-other / (n - j)) for j in range(terms)))


def mean_pass_at_k(n: int, prompts_by_correct: Mapping[int, int], k: int) -> float:
    """pass@k over prompts with `n` responses each. `prompts_by_correct`: how many prompts have c correct responses, by c.

    Raises ValueError if there is no prompt, or as `pass_at_k`.
    """
    count = sum(prompts_by_correct.values())
    if count < 1:
        raise ValueError("a mean over no prompts is not defined")
    chances = []
    none, lost, summed = 0.0, 0.0, 0  # the logarithm of the chance that none of k is correct, for c = summed
    for c, times in sorted(prompts_by_correct.items()):
        if min(c, k) < _MANY or n - c < k:
            chances.append(times * pass_at_k(n, c, k))
            continue
        # What `pass_at_k` sums anew for each c, once for all of them: n steps for thousands of prompts. `lost`: the digits
        # that the sum had no room for (Neumaier).
        for j in range(summed, c):
            term = math.log1p(-k / (n - j))
            total = none + term
            lost += (none - total) + term if abs(none) >= abs(term) else (term - total) + none
            none = total
        summed = c
        chances.append(times * -math.expm1(none + lost))
    return math.fsum(chances) / count


def mean_correct(n: int, prompts_by_correct: Mapping[int, int]) -> float:
    """The share of correct responses, with `n` for each prompt: pass@1, rounded once. Raises ValueError if there is none."""
    count = sum(prompts_by_correct.values())
    if count < 1 or n < 1:
        raise ValueError("a mean over no responses is not defined")
    return sum(c * times for c, times in prompts_by_correct.items()) / (n * count)
