"""From a launch to a classifier that serves. Opens no port and starts no thread."""

from __future__ import annotations

from pathlib import Path

from gcore.rollout.classifier.core import ClassifierCore
from gcore.rollout.classifier.model import load_classifier
from gcore.rollout.engine.launch import EngineLaunch
from gcore.rollout.engine.memory import memory_error_explained
from gcore.rollout.engine.start import TOO_BIG, device_of
from gcore.rollout.engine.text import Text


def start_classifier(launch: EngineLaunch, text: Text | None) -> ClassifierCore:
    """Raises UsageError, DataError and EngineError, each in one sentence, for what cannot be served here."""
    with memory_error_explained("while it loaded the model", TOO_BIG):
        model = load_classifier(
            Path(launch.model),
            dtype=launch.dtype,
            device=device_of(launch),
            context=launch.context_length,
            text=text,
            trust_remote_code=launch.trust_remote_code,
        )
    return ClassifierCore(
        model, slots=launch.batch_slots, chunk=launch.prefill_chunk_tokens, version=launch.weight_version
    )
