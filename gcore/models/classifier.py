"""Whether a model's folder holds a classic reward model: a sequence-classification head that says one number. Without torch.

What its configuration says is believed; whether the head's weights are there is seen by who loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore.models.names import ModelError

HEAD = "ForSequenceClassification"
UNTOLD_LABELS = 2
"""Labels of a configuration that names none: transformers takes it so."""


def check_classifier(config: Mapping[str, Any], *, where: str) -> None:
    """`config`: the folder's config.json. Raises ModelError for a model without such a head, or with more than one label."""
    names = config.get("architectures")
    named = [str(name) for name in names] if isinstance(names, list) else []
    if not any(name.endswith(HEAD) for name in named):
        raise ModelError(
            f"the model has no sequence-classification head (config.json says {', '.join(named) or 'no architecture'})",
            where=where,
            fix="Name a model that was saved as ...ForSequenceClassification, or let the judge be kind: generative",
        )
    labels = labels_of(config)
    if labels != 1:
        raise ModelError(
            f"the model's head says {labels} numbers, and a reward is one",
            where=where,
            fix="Name a model with one label (num_labels: 1)",
        )


def labels_of(config: Mapping[str, Any]) -> int:
    """How many numbers the head says."""
    table, count = config.get("id2label"), config.get("num_labels")
    if isinstance(table, dict) and table:
        return len(table)
    return count if isinstance(count, int) else UNTOLD_LABELS
