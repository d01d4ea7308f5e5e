"""Whether a flow's group can be trained as the spec says: what no rank would take is found where the group is made. Pure.

A flow of one's own may build and score its groups itself. What it lacks then is the prompt's failure, with the reason in its
outcome, and not the train world's.
"""

from __future__ import annotations

import math
from typing import get_args

from gcore.config.reward import LARGEST
from gcore.config.train import TrainSpec
from gcore.errors import SpecError
from gcore.types import Group, Outcome, OutcomeKind, PromptRef, misplaced

WITHOUT_GROUP = tuple(kind for kind in get_args(OutcomeKind) if kind != "trained")


def given(result: object, ref: PromptRef) -> Group | Outcome:
    """What the production of prompt `ref` came to. Raises SpecError if it is neither its group nor a way to end without one.

    Nobody could commit an outcome "trained"; a group of another prompt leaves this one to be issued again, for ever.
    """
    if isinstance(result, Group):
        if result.ref == ref:
            return result
        what = f"a group of prompt {result.ref}"
    elif isinstance(result, Outcome):
        if result.kind in WITHOUT_GROUP and isinstance(result.reason, str):
            return result
        what = f"{result!r:.200}"
    else:
        what = "None" if result is None else f"a {type(result).__name__}"
    kinds = " or ".join(f"Outcome({kind!r}, reason)" for kind in WITHOUT_GROUP)
    fix = f"Let what batch.start() is given return the prompt's Group, {kinds}"
    raise SpecError(f"the flow gave {what} for prompt {ref}", where="flow.name", fix=fix)


def misfit(group: Group, train: TrainSpec) -> str | None:
    """Why no rank could train the group as it is, or None."""
    if not group.samples:
        return "the flow gave a group without samples"
    for index, sample in enumerate(group.samples):
        if not sample.token_ids or not sample.spans or len(sample.logprobs) != len(sample.token_ids):
            return (
                f"the flow gave a response (sample {index}) of {len(sample.token_ids)} tokens, {len(sample.logprobs)} "
                f"log-probabilities and {len(sample.spans)} version spans; it needs tokens, one of the second for each, and spans"
            )
        if why := misplaced(sample.observed, len(sample.token_ids)):
            return f"the flow gave a response (sample {index}) whose observed tokens are misplaced: {why}"
        if sample.prompt_ids is not None:
            return (
                f"the flow gave a response (sample {index}) that an agent made, and nobody has looked what its prompt is; "
                "let peer.score make the group"
            )
        if not sample.own_tokens:
            return f"the flow gave a response (sample {index}) of which the policy made no token"
    if train.loss != "sft":
        if len(group.samples) < 2 and train.compares_group:
            return (
                f"the flow gave a group of one sample, and train.advantage {train.advantage!r} compares the samples of a "
                "group; at least 2 are needed"
            )
        if train.advantage == "remax" and group.baseline is None:
            return "the flow gave a group without a baseline, which train.advantage 'remax' holds its rewards against"
    for what, value in (("baseline", group.baseline), *(("reward", sample.reward) for sample in group.samples)):
        if value is not None and (not math.isfinite(value) or abs(value) > LARGEST):
            return f"the flow gave a {what} of {value}, which is not finite in float32"
    return None
