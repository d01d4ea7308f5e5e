"""What emulated engines need of the models' folders: tokenizers, vocabularies, and what a judge may say. Each is read once."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from gcore.config.judges import VerdictSpec
from gcore.emulated.checks import Model
from gcore.emulated.launch import HostLaunch
from gcore.emulated.responses import Vocabulary
from gcore.errors import DataError
from gcore.rollout.engine.text import Text


class Models:
    """Those of one process, by the judge whose they are; the policy's has no name."""

    def __init__(self) -> None:
        self._read: dict[str, Model] = {}

    def of(self, launch: HostLaunch, judge: str) -> Model:
        """The one that an engine of `launch` serves. Blocks the first time. Raises DataError, or for a verdict parser that there is not."""
        if judge not in self._read:
            self._read[judge] = _judge(launch, judge) if judge else _policy(launch)
        return self._read[judge]


def _policy(launch: HostLaunch) -> Model:
    folder = Path(launch.model)
    text = Text.load(folder)
    return Model(str(folder), Vocabulary.load(folder, text), text, launch.longest)


def _judge(launch: HostLaunch, name: str) -> Model:
    from gcore.emulated.verdicts import verdict_of  # parsers may be anybody's; a job without judges needs none of it

    judge = launch.judge(name)
    folder = Path(judge.model)
    text = Text.load(folder)
    words = Vocabulary.load(folder, text)
    try:
        spec = VerdictSpec.model_validate(judge.verdict)
    except ValidationError as error:
        raise DataError(f"the verdict of judge {name!r} cannot be read ({error})") from error
    return Model(str(folder), words, text, judge.longest, verdict_of(name, spec, words, text))
