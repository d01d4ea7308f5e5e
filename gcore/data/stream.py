"""Finds the prompt of a ref (epoch, shard, position): opens the sources, applies length filters, renders and tokenizes.

A ref gives the same tokens on every machine: a prompt is a pure function of the data, the seed and the ref. A
curriculum may replace the order of a shard in an epoch (`Reorder`), and must be pure too.

Controllers that run or create a job, and `gcore validate`, all open data here, so that the checks cover what runs.
Opening checks every entry once per content of the files, but counts no tokens. A prompt that is shorter or longer than
its source allows is *filtered*, which is a normal outcome. A prompt that leaves no room for its response is an error;
prompts are never cut, because a cut prompt is another prompt.

A prompt with pictures has the tokens of its pictures: `gcore.data.pictures` finds them from the pictures' sizes. Pictures
are checked when data are opened, and are part of the data's digest.

`check_lengths` renders and tokenizes all prompts of a source in advance, or a sample spread evenly. A prompt that does
not render or fit raises an error there, because it would fail later. Filtered prompts are only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gcore.config.data import ResolvedSource
from gcore.config.spec import JobSpec, eval_sources, training_sources
from gcore.data.dataset import Dataset
from gcore.data.jsonl import unreadable_file
from gcore.data.order import Mixture, SourceShare, StreamShape, entry_index, shard_length, shard_lengths
from gcore.data.pictures import PromptPictures, check_unmarked, open_pictures
from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError, GcoreError
from gcore.media.picture_index import PictureIndex
from gcore.media.placeholders import PictureRule
from gcore.types import PictureRef, Prompt, PromptRef

_MADE_TO_FIT = {
    False: "Shorten it, filter it with max_prompt_tokens, lower rollout.max_new_tokens",
    True: "Shorten it or take it out of the set (nothing is filtered in evaluation), lower eval.max_new_tokens",
}


class PromptFiltered(GcoreError):
    """The length filters of its source exclude a prompt. `what`: the reason, the same for all prompts with this cause."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """An opened source of prompts. Thread-safe.

    `limit`: maximum prompt tokens that leave room for a response; None: no limit. `held_out`: whether it is for
    evaluation, which filters nothing. `pictures`: the source's pictures; None: it has none. `rule`: how the model reads
    pictures, with this source's bounds if it has any; None: the model reads none, or none that gcore supports.
    """

    source: ResolvedSource
    dataset: Dataset
    renderer: PromptRenderer
    limit: int | None
    held_out: bool = False
    pictures: PromptPictures | None = None
    rule: PictureRule | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    def prompt(self, index: int, ref: PromptRef) -> Prompt:
        """Render and tokenize entry number `index` as the prompt `ref`.

        Raises PromptFiltered; DataError with the entry's name if it does not render or fit; DataChanged (a DataError)
        if the file changed; IndexError outside range(len).
        """
        prompt = self.unfiltered(index, ref)
        reason = self.filtered(len(prompt.token_ids))
        if reason is not None:
            raise PromptFiltered(reason, where=self.dataset.name_of(index))
        self.check_fits(index, len(prompt.token_ids))
        return prompt

    def unfiltered(self, index: int, ref: PromptRef) -> Prompt:
        """Like `prompt`, but without checks of its length. Raises DataError, IndexError."""
        fields = self.dataset.entry(index)
        try:
            prompt = self._rendered(fields, ref)
        except DataError as error:
            raise DataError(error.what, where=self.dataset.name_of(index), fix=error.fix) from error
        if not prompt.token_ids or (self.renderer.tokenizer.bytewise and not prompt.text.strip()):
            raise DataError(
                "the prompt has no tokens",
                where=self.dataset.name_of(index),
                fix="Remove the entry, or write a prompt",
            )
        return prompt

    def _rendered(self, fields: dict[str, Any], ref: PromptRef) -> Prompt:
        """Render and tokenize an entry. Raises DataError."""
        prompt, renderer = fields[self.dataset.prompt_field], self.renderer
        if self.pictures is None:
            if self.rule is not None:
                check_unmarked(prompt, self.source.image_marker)
            text = renderer.render(prompt, fields)
            token_ids = renderer.encode(text)
            if self.rule is not None:  # a train rank takes every image token for a picture
                token_ids = self.rule.expand(token_ids, ())
            return Prompt(ref, text, token_ids, fields, self.name)
        placed = self.pictures.place(prompt, fields, chat=renderer.chat)
        text = renderer.render(placed.prompt, fields)
        pictures = self.pictures.refs(placed.names)
        token_ids, request_ids = self.pictures.expand(renderer.encode(text), pictures)
        if not pictures:
            return Prompt(ref, text, token_ids, fields, self.name)
        return Prompt(ref, text, token_ids, fields, self.name, request_ids=request_ids, pictures=pictures)

    def pictures_of(self, entry: Mapping[str, Any]) -> tuple[PictureRef, ...]:
        """Return the pictures of an entry of this source. Raises DataError."""
        if self.pictures is None:
            return ()
        placed = self.pictures.place(entry[self.dataset.prompt_field], entry, chat=self.renderer.chat)
        return self.pictures.refs(placed.names)

    def filtered(self, tokens: int) -> str | None:
        """Return why a prompt of this many tokens is filtered; None if it is not."""
        least, most = self.source.min_prompt_tokens, self.source.max_prompt_tokens
        if least is not None and tokens < least:
            return f"the prompt is shorter than min_prompt_tokens ({least})"
        if most is not None and tokens > most:
            return f"the prompt is longer than max_prompt_tokens ({most})"
        return None

    def check_fits(self, index: int, tokens: int) -> None:
        """Raise DataError if a prompt of this many tokens leaves no room for the response. `index`: entry, for the
        error.
        """
        if self.limit is not None and tokens > self.limit:
            raise DataError(
                f"the prompt has {tokens} tokens, but at most {self.limit} leave room for the response",
                where=self.dataset.name_of(index),
                fix=f"{_MADE_TO_FIT[self.held_out]}, or raise model.max_length if the model allows it",
            )


@dataclass(frozen=True, slots=True)
class EvalPromptSource:
    """Prompts of one held-out source, for evaluation. Nothing is filtered: a prompt that does not fit is an error."""

    opened: PromptSource

    @property
    def source(self) -> ResolvedSource:
        """The resolved source."""
        return self.opened.source

    def __len__(self) -> int:
        return len(self.opened)

    def prompt(self, index: int) -> Prompt:
        """Return entry number `index` as a prompt with the ref 0/0/`index`. Raises as `PromptSource.prompt`."""
        return self.opened.prompt(index, PromptRef(0, 0, index))


class ShardPermutation(Protocol):
    """Interface of a shard's order in an epoch: a permutation of the places in the shard."""

    def index(self, seq: int) -> int:
        """Return the place in the shard that comes at position `seq` of the order."""
        ...


Reorder = Callable[[int, int], ShardPermutation | None]
"""Function that maps (data_epoch, shard) to the shard's order in that epoch; None: the default order. It must return
the same on all nodes at all times.
"""


class PromptStream:
    """The prompts of a job by ref. `reorder`: order from a curriculum; may be set until the first prompt is requested."""

    def __init__(
        self, sources: Sequence[PromptSource], *, shards: int, seed: int, reorder: Reorder | None = None
    ) -> None:
        self.sources = tuple(sources)
        self.mixture = Mixture([SourceShare(s.name, len(s), s.source.weight) for s in self.sources], seed)
        self.shape: StreamShape = cut_shards(self.mixture.refs, shards)
        self.reorder = reorder
        self._seed = seed

    def prompt(self, ref: PromptRef) -> Prompt:
        """Return the prompt of `ref`.

        Raises PromptFiltered if its source filters it, DataError if it does not render or fit, DataChanged (a
        DataError) if the data changed, and IndexError outside the stream.
        """
        source, entry = self.found(ref)
        return source.prompt(entry, ref)

    def found(self, ref: PromptRef) -> tuple[PromptSource, int]:
        """Return the source and the entry number that `ref` means, without reading data.

        Raises IndexError outside the stream.
        """
        order = None if self.reorder is None else self.reorder(ref.data_epoch, ref.shard)
        if order is None:
            return self._at(ref.data_epoch, entry_index(self.shape, self._seed, ref))
        return self.at(ref.data_epoch, ref.shard, order.index(ref.seq))

    def at(self, data_epoch: int, shard: int, place: int) -> tuple[PromptSource, int]:
        """Return the source and the entry number at a place of a shard, whatever its order. Raises IndexError."""
        if not 0 <= place < shard_length(self.shape, shard):
            raise IndexError(f"shard {shard} has {self.shape.lengths[shard]} prompts, so there is no place {place}")
        return self._at(data_epoch, place * len(self.shape.lengths) + shard)

    def _at(self, data_epoch: int, place: int) -> tuple[PromptSource, int]:
        found = self.mixture.at(data_epoch, place)
        return self.sources[found.source], found.entry


def cut_shards(refs: int, shards: int) -> StreamShape:
    """Divide an epoch of `refs` prompts into `shards` shards. Raises DataError if there are more shards than prompts."""
    if refs < shards:
        raise DataError(
            f"an epoch has {refs} prompt{'s' * (refs != 1)}, but data.shards is {shards}, and every shard needs at least one",
            where="data.shards",
            fix=f"Set data.shards to {refs} or less",
        )
    return shard_lengths(refs, shards)


def prompt_limit(context: int | None, max_new_tokens: int, *, named: str = "rollout.max_new_tokens") -> int | None:
    """Return the maximum number of prompt tokens that leaves room in `context` for a response of `max_new_tokens`.

    None if the context length is unknown. `named`: the setting of `max_new_tokens`, for the error. Raises DataError if
    no prompt fits.
    """
    if context is None:
        return None
    if max_new_tokens >= context:
        raise DataError(
            f"{named} ({max_new_tokens}) leaves no room for a prompt in the model's context of {context}",
            fix="Lower it, or raise model.max_length if the model allows it",
        )
    return context - max_new_tokens


OpeningProgress = Callable[[str, int, int], None]
"""Function that is called with a source's name, the amount done and the total amount."""


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Identifies the content of a job's data, to detect that it changed.

    `prompts`: number of refs per epoch. `digest`: digest of all sources and of how an epoch is composed. `held_out`:
    digest of the evaluation data; empty if nothing is evaluated. `where`, `where_held_out`: paths, for errors.
    """

    prompts: int
    digest: str
    where: str
    held_out: str = ""
    where_held_out: str = ""


@dataclass(frozen=True, slots=True)
class JobPrompts:
    """The prompts of a job for training and evaluation."""

    stream: PromptStream
    evaluation: tuple[EvalPromptSource, ...]
    """In the order of the spec; empty if nothing is evaluated."""
    identity: DataIdentity
    context: int | None
    """Maximum length of prompt plus response in tokens; None if neither the spec nor the model limits it."""

    @property
    def prompts(self) -> int:
        """Number of refs per epoch."""
        return self.identity.prompts

    @property
    def digest(self) -> str:
        """Digest of the training data, 32 hex digits; the same on every machine."""
        return self.identity.digest

    @property
    def picture_settings(self) -> str:
        """`PictureRule.settings` of the model's processor on this machine; empty if no source has pictures."""
        opened = (*self.stream.sources, *(one.opened for one in self.evaluation))
        return next((one.pictures.rule.settings for one in opened if one.pictures is not None), "")

    @property
    def sources(self) -> Mapping[str, ResolvedSource]:
        """The training sources by name (`Prompt.source`)."""
        return {opened.name: opened.source for opened in self.stream.sources}


def open_prompts(
    spec: JobSpec, cache_dir: Path, model_dir: Path, progress: OpeningProgress | None = None
) -> JobPrompts:
    """Open all training and evaluation data of a spec, with the tokenizer of the model in `model_dir`. Blocks.

    A job that generates pictures has prompts whose tokens are the bytes of the text.

    `progress`: called while files are copied or indexed. Raises DataError.
    """
    draws = spec.rollout.diffusion is not None
    tokenizer = ModelTokenizer.of_bytes() if draws else ModelTokenizer.load(model_dir)
    context = spec.model.max_length or tokenizer.max_length

    def shown(source: ResolvedSource, section: str) -> _SmallFiles:
        rule = _picture_rule(source, section, model_dir)
        renderer = _renderer(source, section, model_dir, tokenizer, "" if rule is None else rule.picture_text)
        return _SmallFiles(source, renderer, longest_prompt(source, section), rule)

    def longest_prompt(source: ResolvedSource, section: str) -> int | None:
        world, named = (spec.environment, "environment") if spec.agent is None else (spec.agent, "agent")
        if world is not None:
            room = world.room(source.sampling.max_new_tokens)
            return prompt_limit(context, room, named=f"{named}.max_tokens")
        longest = source.sampling.max_new_tokens
        own = "" if longest == spec.rollout.max_new_tokens else f" of {section} source {source.name!r}"
        return prompt_limit(context, longest, named=f"max_new_tokens{own}" if own else "rollout.max_new_tokens")

    def opened(one: _SmallFiles, *, held_out: bool = False) -> PromptSource:
        data = _open_data(one.source, cache_dir, progress)
        pictures = None
        if data.pictures is not None and one.rule is not None and one.source.images is not None:
            pictures = PromptPictures(data.pictures, one.rule, one.source.images, one.source.image_marker)
        return PromptSource(one.source, data.dataset, one.renderer, one.limit, held_out, pictures, one.rule or rule)

    # Length filters are for training; evaluation must not leave out prompts.
    held_out = [replace(s, min_prompt_tokens=None, max_prompt_tokens=None) for s in eval_sources(spec)]
    # Check the small files of all sources first, to report their errors before reading gigabytes.
    trained = [shown(source, "data") for source in training_sources(spec)]
    evaluated = [shown(source, "eval") for source in held_out]
    rule = next((one.rule for one in (*trained, *evaluated) if one.rule is not None), None) or _unused_rule(model_dir)
    sources = [opened(one) for one in trained]
    evaluation = tuple(EvalPromptSource(opened(one, held_out=True)) for one in evaluated)
    identity = _identity([_data_of(one) for one in sources], [_data_of(held.opened) for held in evaluation])
    stream = PromptStream(sources, shards=spec.data.shards, seed=spec.seed)
    return JobPrompts(stream, evaluation, identity, context)


def identify_data(spec: JobSpec, cache_dir: Path) -> DataIdentity:
    """Return the present identity of a spec's data. Does not need the model. Blocks. Raises DataError."""

    def opened(sources: Sequence[ResolvedSource]) -> list[_SourceData]:
        return [_open_data(source, cache_dir, None) for source in sources]

    return _identity(opened(training_sources(spec)), opened(eval_sources(spec)))


class _SmallFiles(NamedTuple):
    """What is known of a source from the model's files and the template, before its data are read."""

    source: ResolvedSource
    renderer: PromptRenderer
    limit: int | None
    rule: PictureRule | None


class _SourceData(NamedTuple):
    """The opened data of a source. `pictures`: None if it has none."""

    source: ResolvedSource
    dataset: Dataset
    pictures: PictureIndex | None

    @property
    def digest(self) -> str:
        """Digest of the entries and the pictures, 32 hex digits."""
        if self.pictures is None:
            return self.dataset.digest
        return blake2b(f"{self.dataset.digest}{self.pictures.digest}".encode(), digest_size=16).hexdigest()


def _data_of(opened: PromptSource) -> _SourceData:
    return _SourceData(opened.source, opened.dataset, None if opened.pictures is None else opened.pictures.index)


def _open_data(source: ResolvedSource, cache_dir: Path, progress: OpeningProgress | None) -> _SourceData:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(source.name, done, total)

    dataset = Dataset.open(
        source.path,
        prompt_field=source.prompt,
        answer_fields=source.reward.answers,
        format=source.format,
        split=source.split,
        columns=source.columns,
        images=source.images,
        cache_dir=cache_dir,
        progress=tell,
    )
    return _SourceData(source, dataset, open_pictures(source, dataset, cache_dir, tell))


def _unused_rule(model_dir: Path) -> PictureRule | None:
    """Return how a model reads pictures, to refuse prompts that seem to have some; None for a text model, and for one whose
    pictures gcore does not support."""
    try:
        return PictureRule.load(model_dir)
    except DataError:
        return None


def _picture_rule(source: ResolvedSource, section: str, model_dir: Path) -> PictureRule | None:
    """Return how the model reads the pictures of a source; None if the source has none. Raises DataError."""
    if source.images is None:
        return None
    try:
        rule = PictureRule.load(model_dir, min_pixels=source.min_pixels, max_pixels=source.max_pixels)
        rule.check_processor()
        _ = rule.picture_text  # fails if the tokenizer is not the model's
    except DataError as error:
        where = f"{section}, source {source.name!r}: {error.where or model_dir}"
        raise DataError(error.what, where=where, fix=error.fix) from error
    return rule


def _renderer(
    source: ResolvedSource, section: str, model_dir: Path, tokenizer: ModelTokenizer, picture_text: str
) -> PromptRenderer:
    try:
        return PromptRenderer.load(
            model_dir,
            chat=source.chat,
            template=source.template,
            system=source.system,
            tools=source.tools,
            variables=source.template_variables,
            tokenizer=tokenizer,
            picture_text=picture_text,
        )
    except DataError as error:
        where = error.where or f"{section}, source {source.name!r}"
        raise DataError(error.what, where=where, fix=error.fix) from error


def _identity(sources: Sequence[_SourceData], held_out: Sequence[_SourceData]) -> DataIdentity:
    shares = [SourceShare(one.source.name, len(one.dataset), one.source.weight) for one in sources]
    mixture = Mixture(shares, seed=0)
    if len(sources) == 1 and sources[0].source.weight == 1 and not _small_files(sources):
        digest = sources[0].digest
    else:
        parts = [(one.source.name, one.source.weight, len(one.dataset), one.digest) for one in sources]
        digest = _digest(sources, parts)
    shown = [(one.source.name, len(one.dataset), one.digest) for one in held_out]
    return DataIdentity(
        prompts=mixture.refs,
        digest=digest,
        where=_where(sources),
        held_out=_digest(held_out, shown) if held_out else "",
        where_held_out=_where(held_out),
    )


def _digest(sources: Sequence[_SourceData], shares: Sequence[object]) -> str:
    contents = [_content(Path(file)) for file in _small_files(sources)]
    return blake2b(repr((list(shares), contents)).encode(), digest_size=16).hexdigest()


def _small_files(sources: Sequence[_SourceData]) -> list[str]:
    return [file for one in sources for file in (one.source.template, one.source.tools) if file is not None]


def _where(sources: Sequence[_SourceData]) -> str:
    return ", ".join(dict.fromkeys(str(one.dataset.path) for one in sources))


def _content(file: Path) -> str:
    try:
        return blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise unreadable_file(file, error) from error


TELL_EVERY = 256
"""Number of prompts between two progress reports."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthReport:
    """Result of `check_lengths`: lengths of `checked` out of `entries` prompts of a source.

    `tokens` [prompts that are not filtered] uint32: their lengths in tokens. `filtered`: number of filtered prompts by
    reason. `longest_entry`: entry number of the longest prompt. `unknown`: number of prompts with text that the
    tokenizer does not know. `first`: the first prompt that is not filtered.
    """

    checked: int
    entries: int
    tokens: npt.NDArray[np.uint32]
    filtered: Mapping[str, int]
    longest_entry: int
    unknown: int
    first: Prompt

    @property
    def longest(self) -> int:
        """Length of the longest prompt, in tokens."""
        return int(self.tokens.max())

    @property
    def mean(self) -> float:
        """Mean length, in tokens."""
        return float(self.tokens.mean())

    def percentile(self, percent: float) -> int:
        """Return the length, in tokens, that this percentage of the prompts does not exceed."""
        return int(np.percentile(self.tokens, percent, method="inverted_cdf"))


def check_lengths(
    opened: PromptSource,
    *,
    among: int | None = None,
    sample: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LengthReport:
    """Render and tokenize all entries of a source, and report their lengths.

    `among`: consider only this many first entries. `sample`: check only this many entries, spread evenly, including the
    first and the last. `progress`: called with entries done and total entries. Raises DataError for the first entry
    that does not render or fit, or if the filters exclude all.
    """
    count = len(opened) if among is None else min(among, len(opened))
    chosen = spread_entries(count, sample)
    tokens = np.zeros(len(chosen), dtype=np.uint32)
    filtered: Counter[str] = Counter()
    unknown_id = opened.renderer.tokenizer.unknown_token_id
    shown, unknown, longest, longest_entry, first = 0, 0, 0, 0, None
    for done, index in enumerate(chosen, 1):
        prompt = opened.unfiltered(index, PromptRef(0, 0, index))
        length = len(prompt.token_ids)
        reason = opened.filtered(length)
        if reason is not None:
            filtered[reason] += 1
        else:
            opened.check_fits(index, length)
            first = first or prompt
            unknown += unknown_id is not None and unknown_id in prompt.token_ids
            tokens[shown] = length
            shown += 1
            if length > longest:
                longest, longest_entry = length, index
        if progress is not None and (done % TELL_EVERY == 0 or done == len(chosen)):
            progress(done, len(chosen))
    if first is None:
        looked_at = "all" if len(chosen) == count else f"all {len(chosen)} checked"
        raise DataError(
            f"the filters exclude every prompt: of {looked_at}, {'; '.join(f'{n}: {why}' for why, n in filtered.items())}",
            where=str(opened.dataset.path),
            fix="Correct min_prompt_tokens and max_prompt_tokens",
        )
    return LengthReport(len(chosen), count, tokens[:shown], dict(filtered), longest_entry, unknown, first)


def spread_entries(count: int, sample: int | None) -> range | list[int]:
    """Return the numbers of all `count` entries, or of `sample` entries spread evenly, including the first and the
    last.
    """
    if sample is None or sample >= count:
        return range(count)
    if sample < 2:
        return range(1)
    return sorted({number * (count - 1) // (sample - 1) for number in range(sample)})
