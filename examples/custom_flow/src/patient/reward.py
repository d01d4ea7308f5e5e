"""Close: 1 for the right number, a part of `partial` for one that is near, nothing for anything else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gcore.reward import RewardError, RewardResult, RewardSpec

NUMBER = re.compile(r"[0-9]{1,6}")


def close(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """Option `partial` (0.2): what an answer is worth that is wrong by 1; one that is wrong by 10 is worth a tenth of it."""
    for option in spec.options:
        if option != "partial":
            raise RewardError(f"there is no option {option!r}", fix="The only one is 'partial'")
    answer = str(fields.get(spec.answer, ""))
    if not NUMBER.fullmatch(answer):
        raise RewardError(f"the answer {answer!r} is no number", fix="Name the field in reward.answer")
    right = float(response == answer)
    near = 0.0
    if not right and NUMBER.fullmatch(response):
        near = float(spec.options.get("partial", 0.2)) / abs(int(response) - int(answer) or 1)
    return RewardResult(right + near, (("right", right), ("near", near)))
