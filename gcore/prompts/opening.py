"""The data of a job, opened: the one place where a spec's sources become prompts.

A controller that works on a job, one that is asked to create it, and `gcore validate` all open the data here, so that what
was checked is what is run. Opening checks every entry, once for each content of the files; it counts no tokens
(`gcore.prompts.lengths`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from gcore.config.evaluation import eval_sources
from gcore.config.sources import Source, training_sources
from gcore.config.spec import JobSpec
from gcore.errors import DataError
from gcore.prompts.dataset import Dataset
from gcore.prompts.index import unreadable
from gcore.prompts.mixture import Mixture, Share
from gcore.prompts.render import PromptRenderer
from gcore.prompts.source import EvalSource, OpenSource
from gcore.prompts.stream import PromptStream, prompt_limit
from gcore.prompts.tokenizer import ModelTokenizer

OpeningProgress = Callable[[str, int, int], None]
"""Called with what is being read (a source's name), how much is done and how much there is in all."""


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """What a job's prompt refs mean. `prompts`: refs of an epoch, which the shards cut. `digest`: the content of all
    sources, and how an epoch is made of them. `where`: how messages name the data. `held_out`: the content of what is
    evaluated; empty if nothing is."""

    prompts: int
    digest: str
    where: str
    held_out: str = ""
    where_held_out: str = ""


@dataclass(frozen=True, slots=True)
class JobPrompts:
    """The prompts of a job, for training and for evaluation."""

    stream: PromptStream
    evaluation: tuple[EvalSource, ...]
    """In the order of the spec; empty if nothing is evaluated."""
    identity: DataIdentity
    context: int | None
    """Longest prompt plus response, in tokens; None if neither the spec nor the model says."""
    eos_token_id: int | None

    @property
    def prompts(self) -> int:
        """Refs of an epoch."""
        return self.identity.prompts

    @property
    def digest(self) -> str:
        """Names what the refs mean, 32 hex digits: the same wherever the same data lie."""
        return self.identity.digest

    @property
    def sources(self) -> Mapping[str, Source]:
        """The sources of training, by name: where `Prompt.source` is looked up."""
        return {opened.name: opened.source for opened in self.stream.sources}


def open_prompts(
    spec: JobSpec, cache_dir: Path, model_dir: Path, progress: OpeningProgress | None = None
) -> JobPrompts:
    """Open all data that a spec names, with the tokenizer of the model in `model_dir`. Blocks. Raises DataError."""
    tokenizer = ModelTokenizer.load(model_dir)
    context = spec.model.max_length or tokenizer.max_length

    def shown(source: Source, section: str) -> tuple[Source, PromptRenderer, int | None]:
        world, named = (spec.environment, "environment") if spec.agent is None else (spec.agent, "agent")
        if world is not None:
            room = world.room(source.sampling.max_new_tokens)
            limit = prompt_limit(context, room, named=f"a response with what it is shown, {named}.max_tokens")
            return source, _renderer(source, section, model_dir, tokenizer), limit
        longest = source.sampling.max_new_tokens
        own = "" if longest == spec.rollout.max_new_tokens else f" of {section} source {source.name!r}"
        limit = prompt_limit(context, longest, named=f"max_new_tokens{own}" if own else "rollout.max_new_tokens")
        return source, _renderer(source, section, model_dir, tokenizer), limit

    def opened(source: Source, renderer: PromptRenderer, limit: int | None, *, held_out: bool = False) -> OpenSource:
        return OpenSource(source, _open_dataset(source, cache_dir, progress), renderer, limit, held_out)

    # Filters by length are for training; who asks how good a model is wants no prompt left out.
    held_out = [replace(s, min_prompt_tokens=None, max_prompt_tokens=None) for s in eval_sources(spec)]
    # The small files of all sources first: a mistake in them is told before gigabytes are read.
    trained = [shown(source, "data") for source in training_sources(spec)]
    evaluated = [shown(source, "eval") for source in held_out]
    sources = [opened(*one) for one in trained]
    evaluation = tuple(EvalSource(opened(*one, held_out=True)) for one in evaluated)
    identity = _identity(
        [(s.source, s.dataset) for s in sources], [(held.source, held.opened.dataset) for held in evaluation]
    )
    stream = PromptStream(sources, shards=spec.data.shards, seed=spec.seed)
    return JobPrompts(stream, evaluation, identity, context, tokenizer.eos_token_id)


def identify_data(spec: JobSpec, cache_dir: Path) -> DataIdentity:
    """What the data of a spec are now, without its model. Blocks. Raises DataError."""

    def opened(sources: Sequence[Source]) -> list[tuple[Source, Dataset]]:
        return [(source, _open_dataset(source, cache_dir, None)) for source in sources]

    return _identity(opened(training_sources(spec)), opened(eval_sources(spec)))


def _open_dataset(source: Source, cache_dir: Path, progress: OpeningProgress | None) -> Dataset:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(source.name, done, total)

    return Dataset.open(
        source.path,
        prompt_field=source.prompt,
        answer_fields=source.reward.answers,
        format=source.format,
        split=source.split,
        cache_dir=cache_dir,
        progress=tell,
    )


def _renderer(source: Source, section: str, model_dir: Path, tokenizer: ModelTokenizer) -> PromptRenderer:
    try:
        return PromptRenderer.load(
            model_dir,
            chat=source.chat,
            template=source.template,
            system=source.system,
            tools=source.tools,
            tokenizer=tokenizer,
        )
    except DataError as error:
        where = error.where or f"{section}, source {source.name!r}"
        raise DataError(error.what, where=where, fix=error.fix) from error


def _identity(sources: Sequence[tuple[Source, Dataset]], held_out: Sequence[tuple[Source, Dataset]]) -> DataIdentity:
    mixture = Mixture([Share(source.name, len(data), source.weight) for source, data in sources], seed=0)
    first, data = sources[0]
    if len(sources) == 1 and first.weight == 1 and not _small_files(sources):
        digest = data.digest
    else:
        digest = _digest(sources, [(source.name, source.weight, len(data), data.digest) for source, data in sources])
    shown = [(source.name, len(data), data.digest) for source, data in held_out]
    return DataIdentity(
        prompts=mixture.refs,
        digest=digest,
        where=_where(sources),
        held_out=_digest(held_out, shown) if held_out else "",
        where_held_out=_where(held_out),
    )


def _digest(sources: Sequence[tuple[Source, Dataset]], shares: Sequence[object]) -> str:
    contents = [_content(Path(file)) for file in _small_files(sources)]
    return blake2b(repr((list(shares), contents)).encode(), digest_size=16).hexdigest()


def _small_files(sources: Sequence[tuple[Source, Dataset]]) -> list[str]:
    return [file for source, _ in sources for file in (source.template, source.tools) if file is not None]


def _where(sources: Sequence[tuple[Source, Dataset]]) -> str:
    return ", ".join(dict.fromkeys(str(data.path) for _, data in sources))


def _content(file: Path) -> str:
    try:
        return blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error
