"""What can be known to be wrong with a job's judges before there is a job: their models, what they are shown, whether that fits.

Nothing is asked: whether a judge judges well is seen in the job's own numbers. Of one that others serve it is seen whether this node
has its key; another node that has none says so when it begins the job. Writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from controllers.judges import named, renderer_of
from gcore.config import JobSpec
from gcore.config.judges import Fallback
from gcore.config.spec import JudgeSpec
from gcore.errors import DataError, SpecError
from gcore.models.classifier import check_classifier
from gcore.models.folder import read_config
from gcore.models.names import hub_model
from gcore.models.resolve import ResolvedModel, resolve_model
from gcore.models.weights import check_whole
from gcore.plugins import check_named
from gcore.prompts.render import PromptRenderer
from gcore.reward.generative.errors import JudgeError
from gcore.reward.generative.external import key_of, new_client
from gcore.reward.generative.template import Question
from gcore.reward.generative.verdicts import find_parser
from gcore.reward.registry import REWARDS
from gcore.rollout.sglang.command import check_engine_args
from gcore.types import Prompt


@dataclass(frozen=True)
class CheckedJudge:
    """A judge with its small files. `model`: None of an external one."""

    number: int
    spec: JudgeSpec
    question: Question
    model: ResolvedModel | None = None
    renderer: PromptRenderer | None = None

    def check_question(self, prompt: Prompt, source: str) -> None:
        """Whether it can be asked about `prompt`, the longest of a source, at all. Raises SpecError."""
        where = f"judges.{self.number} ({self.spec.name!r}), source {source!r}"
        try:
            pairwise = self.spec.mode == "pairwise"
            question = self.question.between(prompt, "", "") if pairwise else self.question.about(prompt, "")
        except JudgeError as error:
            raise SpecError(error.what, where=where, fix=error.fix) from error
        if self.renderer is None or self.spec.model is None:
            return
        given, own = self.spec.model.max_length, self.renderer.max_length
        # What SGLang's context may be depends on more of the model's configuration, which it looks at itself.
        if given is not None and own is not None and given > own and self.spec.serving.engine == "torch":
            raise SpecError(
                f"max_length is {given}, and the judge's own context is {own}",
                where=f"judges.{self.number}.model.max_length",
                fix="Leave it out, or lower it",
            )
        limit = self.spec.model.max_length or self.renderer.max_length
        try:
            tokens = len(self.renderer.encode(self.renderer.render(question)))
        except DataError as error:
            raise SpecError(
                f"it cannot be asked about the longest prompt: {error.what}",
                where=where,
                fix=f"Change judges.{self.number}.template, or take a model whose tokenizer takes it",
            ) from error
        classifies = self.spec.kind == "classifier"
        answer = 0 if classifies else self.spec.max_new_tokens
        if limit is not None and tokens + answer >= limit:
            more = "" if classifies else f" with max_new_tokens ({answer})"
            shorter = "Lower" if classifies else f"Lower judges.{self.number}.max_new_tokens or"
            raise SpecError(
                f"what it is shown of the longest prompt has {tokens} tokens, and{more} no room for a "
                f"response is left in the judge's context of {limit}",
                where=where,
                fix=f"{shorter} data.max_prompt_tokens, show the judge less, or take one with a longer context",
            )


def check_fallbacks(spec: JobSpec) -> None:
    """Whether there are rewards of the names that score where a judge cannot. Loads nothing. Raises PluginFault."""
    for number, judge in enumerate(spec.judges):
        if isinstance(judge.on_error, Fallback):
            kind = replace(REWARDS, where=f"judges.{number}.on_error.fallback")
            check_named(kind, judge.on_error.fallback)


def check_judges(spec: JobSpec) -> Mapping[str, CheckedJudge]:
    """Every judge of the spec, by name. Blocks. Raises SpecError, ModelError, DataError."""
    return {judge.name: _checked(number, judge) for number, judge in enumerate(spec.judges)}


def _checked(number: int, judge: JudgeSpec) -> CheckedJudge:
    where = f"judges.{number}"
    question = Question.compile(judge, where)
    find_parser(judge.verdict.parser, f"{where}.verdict.parser")
    check_engine_args(judge.serving.engine_args)
    if judge.model is None:
        new_client(judge, key_of(judge, os.environ, where))
        return CheckedJudge(number, judge, question)
    with named(number, judge):
        model = resolve_model(judge.model.path, trust_remote_code=judge.model.trust_remote_code, weights=False)
        if hub_model(judge.model.path) is None and model.folder.is_dir():
            check_whole(model.folder)
        if judge.kind == "classifier":
            check_classifier(read_config(model.folder), where=str(model.folder))
    here = judge.model_copy(update={"model": judge.model.model_copy(update={"path": str(model.folder)})})
    return replace(CheckedJudge(number, judge, question), model=model, renderer=renderer_of(number, here))


def revisions(judges: Mapping[str, CheckedJudge]) -> dict[str, str]:
    """The commits of those models that are a hub's, by judge."""
    return {
        name: judge.model.revision for name, judge in judges.items() if judge.model is not None and judge.model.revision
    }


def remote_code(judges: Mapping[str, CheckedJudge]) -> tuple[str, ...]:
    """Python files that come with the judges' models and will run."""
    return tuple(
        f"{judge.spec.name}: {Path(file).name}"
        for judge in judges.values()
        if judge.model
        for file in judge.model.remote_code
    )
