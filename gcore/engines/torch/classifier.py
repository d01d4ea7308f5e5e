"""Classifier engine: a model with a sequence-classification head returns one number per question.

Serves any model that transformers loads as `AutoModelForSequenceClassification` with one label. Questions of one pass
are padded on the right to the longest. A decoder finds its last token as the last one that is not the padding token.
The padding token is that of the configuration, or, if it has none, a token that no question of the pass ends with. A
trial at start checks whether a padded pass gives the same scores as single questions; if it does not, the model scores
one question at a time.

Models of the types in `PICTURE_CLASSIFIERS` also take pictures, in the form of `/generate` (`gcore.engines.pictures`). A
question has one image token for each picture. The features of a picture are computed once in a pass, however many
questions show it. The trial compares questions with pictures also with the model's own pass over them.

Models of the types in `PICTURE_SCORERS` score a text and a picture, or a picture alone (`gcore.models.clip`). The engine
resizes and cuts the picture with the image processor of the model's folder.

Order of this module: choice of a batch, the body of `/classify`, the model, the scorer of pictures, the engine core, the
request handler, the routes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from transformers import AutoModelForSequenceClassification, CLIPModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as HEADS

from gcore.config.capabilities import PICTURE_CLASSIFIERS, PICTURE_SCORERS
from gcore.engines.detokenizer import Detokenizer
from gcore.engines.launch import EngineLaunch
from gcore.engines.pictures import (
    PassPart,
    PictureFeatures,
    PictureInput,
    PictureReader,
    PreparedPictures,
    pass_positions,
)
from gcore.engines.request import ABORTED, Finish, check_token_ids
from gcore.engines.serving.http import ApiKeys, answer_errors, checked_body, read_body
from gcore.engines.serving.io_struct import (
    IdLists,
    Ids,
    ImageData,
    Picture,
    Texts,
    json_number,
    refuse_fields,
    request_names,
    request_pictures,
)
from gcore.engines.serving.routes import (
    CLIENT_CLOSED_REQUEST,
    bind_engine,
    health,
    run_unless_disconnected,
)
from gcore.engines.torch.async_engine import AsyncEngine
from gcore.engines.torch.engine import ENGINE_NAME, EngineBase
from gcore.engines.torch.kv_cache import CacheShape
from gcore.engines.torch.model import (
    CONTEXT,
    DTYPES,
    TOO_BIG,
    align_weights,
    check_vocabulary,
    device_of,
    explain_memory_error,
    load_module,
)
from gcore.engines.torch.scheduler import IDLE_TOKENS
from gcore.engines.torch.weight_routes import engine_app
from gcore.errors import DataError, EngineError, one_line
from gcore.models.adapter_checks import BaseFiles
from gcore.models.checks import check_classifier, check_code, require_config, without_picture_head
from gcore.models.clip import ClipScores, load_head
from gcore.models.vision import has_processor, has_vision, media_token_ids, picture_arguments
from gcore.system.clock import Clock

WINDOW = 1024
"""Number of waiting questions considered for a batch: sorting a queue of 100,000 would take longer than a pass."""


def choose_batch(lengths: Sequence[int], *, slots: int, tokens: int) -> list[int]:
    """Choose the waiting questions of the next forward pass. Returns their indexes; the oldest is the first.

    `lengths`: token counts of the waiting questions, oldest first; at least one. The oldest is always chosen, so that
    none waits forever. Of the first `WINDOW` questions those with the most similar lengths are added, because shorter
    questions of a batch are padded to the longest. A batch has at most `slots` questions and, with padding, at most
    `tokens` tokens; at most half of it is padding. A question longer than `tokens` is scored alone.
    """
    first = lengths[0]
    chosen, longest, real = [0], first, first
    for place in sorted(range(1, min(len(lengths), WINDOW)), key=lambda place: abs(lengths[place] - first)):
        if len(chosen) == slots:
            break
        length = lengths[place]
        padded = (len(chosen) + 1) * max(longest, length)
        if padded <= tokens and padded <= 2 * (real + length):
            chosen.append(place)
            longest, real = max(longest, length), real + length
    return chosen


UNSERVED_FIELDS = frozenset(
    [
        "input_embeds",
        "video_data",
        "audio_data",
        "embed_overrides",
        "is_cross_encoder_request",
        "lora_path",
        "dimensions",
        "return_pooled_hidden_states",
        "multi_item_delimiter_indices",
        "token_indices_to_pool",
    ]
)
"""SGLang's fields of /classify that this engine does not support."""


class _ClassifyFields(BaseModel):
    """Fields of the body of `/classify` with their types."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    text: str | Texts | None = None
    input_ids: Ids | IdLists | None = None
    rid: str | Texts | None = None
    image_data: ImageData = None
    return_prompt_token_ids: bool | None = None


@dataclass(frozen=True, slots=True)
class ClassifyRequest:
    """A checked request to `/classify`. `rids`: the client's request IDs. `is_list`: whether the response is a list.

    `pictures`: those of each question, from `image_data`, or as the model read them; empty if none has any. Where they belong in a question is
    decided by the model (`Classifier.place_pictures`).
    """

    questions: tuple[str | list[int], ...]
    rids: tuple[str, ...] | None
    is_list: bool
    pictures: tuple[Sequence[Any], ...] = ()
    returns_prompt: bool = False
    """Whether each body has the question's tokens, with all placeholders of pictures."""


def classify_body(value: Any) -> ClassifyRequest:
    """Check the parsed JSON body of `/classify`: the fields of SGLang that apply to a classifier.

    Raises BodyRefused, EngineError.
    """
    body = checked_body(_ClassifyFields, value)
    if (body.text is None) == (body.input_ids is None):
        raise EngineError("give exactly one of text and input_ids")
    refuse_fields(body, UNSERVED_FIELDS)
    given: Any = body.input_ids if body.text is None else body.text
    if given == [] and body.text is None:
        raise EngineError("input_ids cannot be empty")
    is_list = isinstance(given, list) and (body.text is not None or isinstance(given[0], list))
    questions: list[Any] = list(given) if is_list else [given]
    names = request_names(body.rid, questions, "questions", is_batch=is_list, is_list=is_list)
    pictures: tuple[tuple[Picture, ...], ...] = request_pictures(
        body.image_data, questions, is_batch=is_list, noun="question"
    )
    return ClassifyRequest(
        tuple(questions),
        names,
        is_list,
        pictures if any(pictures) else (),
        returns_prompt=bool(body.return_prompt_token_ids),
    )


TRIED = (3, 1, 7, 5)
"""Lengths in tokens of the questions of the trial at start."""

TRIED_PICTURES = (((32, 32),), ((64, 48), (32, 32)))
"""Heights and widths in pixels of the pictures in further questions of the trial, if the model takes pictures."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Allowed difference between a question's scores in a padded batch and alone, relative to the larger of 1 and the
score.
"""


@dataclass(slots=True)
class Classifier:
    """A loaded classifier."""

    module: Any
    folder: Path
    shape: CacheShape
    """Dtype and device of the weights; there is no cache."""
    vocabulary: int
    context: int
    """Context length in tokens. A question must be shorter, as in a generating engine."""
    base: BaseFiles | None = None
    """The folder's weight files when the model was loaded; None: updates add no adapter to them."""
    pads: bool = True
    """Whether questions of different lengths can share a pass."""
    asleep: bool = False
    """Whether the weights are released."""
    vision: PictureFeatures | None = None
    """Runs the vision tower; None: the model takes no pictures."""

    @property
    def takes_pictures(self) -> bool:
        """Whether questions may have pictures."""
        return self.vision is not None

    def read_pictures(self, given: Sequence[Any]) -> Sequence[Any]:
        """Read the pictures of a question from a request. Any thread. Raises EngineError, also if the model takes none."""
        if self.vision is None:
            raise EngineError(
                "this engine takes no pictures",
                fix=f"Serve a classifier of the type {' or '.join(PICTURE_CLASSIFIERS)} with its image processor",
            )
        return self.vision.reader.read(given)

    def place_pictures(
        self, question: Sequence[int], pictures: Sequence[Any]
    ) -> tuple[tuple[int, ...], PreparedPictures | None]:
        """Return the question with all placeholders of `pictures` (from `read_pictures`), and its pictures; None: it has
        none. Raises EngineError if the question has another number of placeholders than pictures.
        """
        if self.vision is None:
            return tuple(question), None
        expanded = self.vision.reader.expand(question, pictures)
        return expanded, self.vision.reader.prompt(expanded, pictures)

    def scores(
        self, questions: Sequence[Sequence[int]], pictures: Sequence[PreparedPictures | None] = ()
    ) -> list[float]:
        """Return the score of each question, from one forward pass over all of them.

        `pictures`: those of each question, which has all their placeholders; empty: no question has any.
        """
        longest = max(map(len, questions))
        padding = self._padding(questions)
        ids = torch.full((len(questions), longest), padding or 0, dtype=torch.long)
        mask = torch.zeros((len(questions), longest), dtype=torch.long)
        for row, question in enumerate(questions):
            ids[row, : len(question)] = torch.tensor(question)
            mask[row, : len(question)] = 1
        place = self.shape.device
        # An all-ones mask would only disable the faster attention kernels.
        given: dict[str, Any] = {} if bool(mask.all()) else {"attention_mask": mask.to(place)}
        config = self.module.config.get_text_config()
        named, config.pad_token_id = config.pad_token_id, padding
        try:
            with torch.inference_mode():
                given |= self._picture_arguments(questions, pictures, ids)
                logits: torch.Tensor = self.module(input_ids=ids.to(place), **given).logits
        finally:
            config.pad_token_id = named
        found: list[float] = logits.reshape(len(questions), -1)[:, 0].float().tolist()
        return found

    def _picture_arguments(
        self, questions: Sequence[Sequence[int]], pictures: Sequence[PreparedPictures | None], ids: torch.Tensor
    ) -> dict[str, Any]:
        """The arguments of a forward pass for the pictures of its questions; runs the vision tower."""
        if self.vision is None or not any(one is not None for one in pictures):
            return {}
        parts = [
            PassPart(question, 0, len(question), its, None) for question, its in zip(questions, pictures, strict=True)
        ]
        self.vision.compute(parts)
        found = self.vision.arguments(parts, ids.to(self.shape.device))
        if self.vision.reader.three:
            positions = pass_positions(parts, ids.shape[1], three=True)
            found["position_ids"] = positions.to(self.shape.device)
        return found

    def _padding(self, questions: Sequence[Sequence[int]]) -> int | None:
        """Return the padding token for a pass over these questions.

        None: the model has no padding token, and no padding is needed or every token ends some question.
        """
        named: int | None = getattr(self.module.config.get_text_config(), "pad_token_id", None)
        if named is not None or len(questions) == 1:
            return named
        last = {question[-1] for question in questions}
        return next((token for token in range(self.vocabulary) if token not in last), None)


def load_classifier(
    folder: Path,
    *,
    dtype: str,
    device: str,
    context: int | None,
    text: Detokenizer | None,
    trust_remote_code: bool = False,
    blobs: Path | None = None,
) -> Classifier:
    """Load a classifier from a local folder. Raises DataError if it cannot be served.

    `context`: maximum context length in tokens; None: the model's. `text`: the tokenizer, whose vocabulary is checked.
    `blobs`: folder of the job's pictures.
    """
    config = require_config(folder)
    check_code(config, trusted=trust_remote_code, where=str(folder))
    check_classifier(config, where=str(folder))
    if has_vision(config) and config.get("model_type") not in HEADS and not trust_remote_code:
        raise without_picture_head(config, where=str(folder))
    module = load_module(AutoModelForSequenceClassification, folder, DTYPES[dtype], trust_remote_code=trust_remote_code)
    c = module.config.get_text_config()
    c.use_cache = False  # no tokens follow a question
    vocabulary = int(module.get_input_embeddings().weight.shape[0])
    check_vocabulary(text, vocabulary, folder)
    place = torch.device(device)
    module.to(place).eval().requires_grad_(False)
    align_weights(module)
    limit = _longest(module)
    length = min(limit, context or limit) if limit else context or CONTEXT
    model = Classifier(module, folder, CacheShape((), DTYPES[dtype], place), vocabulary, length)
    if config.get("model_type") in PICTURE_CLASSIFIERS and has_vision(config) and has_processor(folder):
        model.vision = PictureFeatures(module, PictureReader(module, folder, blobs))
    _try(model)
    return model


def _longest(module: Any) -> int | None:
    """Return the model's maximum number of positions; None: not limited.

    RoBERTa models lose the positions up to their padding index.
    """
    c = module.config.get_text_config()
    limit = getattr(c, "max_position_embeddings", None) or getattr(c, "n_positions", None)
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            return int(part.num_embeddings) - int(part.padding_idx) - 1
    return int(limit) if limit else None


FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
"""What a model raises for a pass that it cannot run."""


def _try(model: Classifier) -> None:
    """Set `model.pads` by comparing scores of questions in a padded batch and alone. Raises DataError if scoring fails, or
    if it gives other scores of questions with pictures than the model's own pass.
    """
    unusual = {model.module.config.get_text_config().pad_token_id, *media_token_ids(model.module.config)}
    tokens = [token for token in range(model.vocabulary) if token not in unusual]
    tried = [[tokens[(7 * i + n) % len(tokens)] for i in range(min(n, model.context))] for n in TRIED]
    shown: list[PreparedPictures | None] = [None] * len(tried)
    try:
        for question, pictures in _questions_with_pictures(model, tokens):
            tried.append(question)
            shown.append(pictures)
        alone = [model.scores([question], [its])[0] for question, its in zip(tried, shown, strict=True)]
        for question, its, score in zip(tried, shown, alone, strict=True):
            if its is not None and not _equal(model, own := _own_score(model, question, its), score):
                raise ValueError(f"a question with pictures scores {score:g}, but {own:g} in the model's own pass")
    except FAILURES as error:
        raise DataError(
            f"the torch engine cannot serve this classifier ({one_line(error)})",
            where=str(model.folder),
            fix="Use another model" if model.vision is not None else "Serve it with SGLang instead",
        ) from error
    try:
        together = model.scores(tried, shown)
    except FAILURES:
        model.pads = False
    else:
        model.pads = all(_equal(model, one, other) for one, other in zip(alone, together, strict=True))


def _equal(model: Classifier, expected: float, score: float) -> bool:
    return abs(expected - score) <= TOLERANCES[model.shape.dtype] * max(1.0, abs(expected))


def _questions_with_pictures(
    model: Classifier, tokens: Sequence[int]
) -> Iterator[tuple[list[int], PreparedPictures | None]]:
    """Yield the questions of the trial that have pictures and fit into the context. `tokens`: of text."""
    if model.vision is None:
        return
    reader = model.vision.reader
    for number, sizes in enumerate(TRIED_PICTURES):
        pictures = [(f"{height:032x}{width:032x}", reader.noise(height, width)) for height, width in sizes]
        around = [tokens[(7 * i + number) % len(tokens)] for i in range(len(sizes) + 1)]
        short = [one for token in around[:-1] for one in (token, reader.token)] + around[-1:]
        question = list(reader.expand(short, pictures))
        if len(question) < model.context:
            yield question, reader.prompt(question, pictures)


def _own_score(model: Classifier, question: Sequence[int], pictures: PreparedPictures) -> float:
    """The score of a question by the model's own pass: it computes features and positions itself."""
    assert model.vision is not None
    place = model.shape.device
    ids = torch.tensor([list(question)], device=place)
    known = inspect.signature(model.module.forward).parameters
    kinds = (ids == model.vision.reader.token).int()
    more = {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    with torch.inference_mode():
        logits = model.module(input_ids=ids, **picture_arguments(pictures.pictures, place), **more).logits
    return float(logits[0, 0])


@dataclass(slots=True)
class PictureScorer:
    """A loaded scorer of pictures. A question is a text and one picture."""

    module: Any
    """The CLIP model, without its head."""
    computes: ClipScores
    folder: Path
    shape: CacheShape
    """Dtype and device of the weights; there is no cache."""
    context: int
    """Context length of the text in tokens. A question must be shorter."""
    reader: PictureInput
    base: BaseFiles | None = None
    pads: bool = True
    """Whether texts of different lengths can share a pass."""
    asleep: bool = False
    """Whether the weights are released."""

    takes_pictures = True
    """Questions have pictures."""

    @property
    def vocabulary(self) -> int:
        """Number of token IDs."""
        return int(self.module.config.text_config.vocab_size)

    def read_pictures(self, given: Sequence[Any]) -> Sequence[Any]:
        """Read the pictures of a question from a request. Any thread. Raises EngineError."""
        return self.reader.read(given)

    def place_pictures(
        self, question: Sequence[int], pictures: Sequence[Any]
    ) -> tuple[tuple[int, ...], PreparedPictures | None]:
        """Return the text of a question and its picture. Raises EngineError unless there is one picture, and for a text that the
        model's tokenizer has not ended.
        """
        if len(pictures) != 1:
            raise EngineError(
                f"a question to a scorer of pictures has one picture, not {len(pictures)}",
                fix="Show one picture, as by {{ response }} in the judge's template",
            )
        if self.computes.head is None and not self.computes.ends(question):
            raise EngineError(
                "the text does not end with the model's end token",
                where=str(self.folder),
                fix="Save the model with its own tokenizer, which adds it",
            )
        return tuple(question), PreparedPictures((pictures[0][0],), (pictures[0][1],))

    def scores(
        self, questions: Sequence[Sequence[int]], pictures: Sequence[PreparedPictures | None] = ()
    ) -> list[float]:
        """Return the score of each question, from one pass over all of them. `pictures`: that of each question."""
        shown = [(its.names[0], its.pictures[0]) for its in pictures if its is not None]
        pixels = {name: picture.arguments["pixel_values"] for name, picture in shown}
        return self.computes(questions, [name for name, _ in shown], pixels)


ServedClassifier = Classifier | PictureScorer


def load_scorer(
    folder: Path, *, dtype: str, device: str, context: int | None, text: Detokenizer | None, blobs: Path | None
) -> PictureScorer:
    """Load a scorer of pictures from a local folder. Raises DataError if it cannot be served. Arguments: as of
    `load_classifier`."""
    check_classifier(require_config(folder), where=str(folder), pictures=True)
    module = load_module(CLIPModel, folder, DTYPES[dtype], trust_remote_code=False)
    c = module.config.text_config
    check_vocabulary(text, c.vocab_size, folder)
    place = torch.device(device)
    module.to(place).eval().requires_grad_(False)
    align_weights(module)
    head = load_head(folder, module.config.projection_dim)
    computes = ClipScores(module, None if head is None else head.to(place))
    length = min(c.max_position_embeddings, context or c.max_position_embeddings)
    reader, shape = PictureInput(folder, blobs), CacheShape((), DTYPES[dtype], place)
    model = PictureScorer(module, computes, folder, shape, length, reader)
    _try_scorer(model)
    return model


def _try_scorer(model: PictureScorer) -> None:
    """Set `model.pads` by comparing scores of questions in one pass and alone. Raises DataError if scoring fails, if it gives
    other scores than the model's own pass, or if the image processor makes pictures of another size than the model takes.
    """
    side = model.module.config.vision_config.image_size
    noise = [model.reader.noise(height, side).arguments.get("pixel_values") for height in (side, side + 8, side)]
    texts, names, are_equal = model.computes.trial_texts(TRIED[:3]), ("0", "1", "0"), model.computes.are_equal
    try:
        pixels = {name: one for name, one in zip(names, noise, strict=True) if one is not None}
        if found := {tuple(one.shape[-2:]) for one in pixels.values()} - {(side, side)}:
            height, width = min(found)
            raise ValueError(f"the image processor makes pictures of {width}x{height}, and it takes {side}x{side}")
        questions = list(zip(texts, names, strict=True))
        alone = [model.computes([text], [name], {name: pixels[name]})[0] for text, name in questions]
        for (text, name), score in zip(questions, alone, strict=True):
            own = score if model.computes.head is not None else model.computes.own_score(text, pixels[name])
            if not are_equal(own, score):
                raise ValueError(f"a picture scores {score:g}, but {own:g} in the model's own pass")
        together = model.computes(texts, names, pixels)
    except (*FAILURES, KeyError) as error:
        raise DataError(
            f"the torch engine cannot serve this scorer ({one_line(error)})",
            where=str(model.folder),
            fix="Copy the model again, with its preprocessor_config.json",
        ) from error
    model.pads = all(are_equal(one, other) for one, other in zip(alone, together, strict=True))


FIX = "Lower serving.batch_slots (questions at once), or shorten the judge's template"


@dataclass(frozen=True, slots=True)
class ClassifierRequest:
    """One question to score. `number`: given by the engine, unique while it lives. `rid`: given by the client."""

    number: int
    rid: str
    prompt: tuple[int, ...]
    pictures: PreparedPictures | None = field(default=None, repr=False, compare=False)
    """The question's pictures; its tokens have all their placeholders. None: it has none."""


@dataclass(frozen=True, slots=True)
class ClassifierOutput:
    """The result of a question. `score` None: it was aborted. `version`: that of the weights that scored it."""

    number: int
    score: float | None
    version: str
    ending: Finish


class ClassifierCore(EngineBase[ClassifierRequest, ClassifierOutput]):
    """Engine core of a classifier. Each cycle scores one batch of waiting questions.

    A forward pass is not interrupted, so a pause has nothing to preempt, and weight updates, aborts and sleep concern
    only waiting questions. There is no cache to flush or release. `slots`: maximum questions per pass. `chunk`: maximum
    tokens per pass, if it exceeds `IDLE_TOKENS`.
    """

    memory_fix = FIX

    def __init__(self, model: ServedClassifier, *, slots: int, chunk: int, version: str) -> None:
        super().__init__(model, version=version)
        self._model = model
        self._scoring = 0
        self._slots = slots if model.pads else 1
        self._tokens = max(IDLE_TOKENS, chunk)
        self._waiting: deque[ClassifierRequest] = deque()

    @property
    def model(self) -> ServedClassifier:
        """The loaded model."""
        return self._model

    @property
    def facts(self) -> dict[str, Any]:
        """Name of the engine."""
        return {"engine": ENGINE_NAME}

    @property
    def takes_pictures(self) -> bool:
        """Whether requests may have pictures."""
        return self._model.takes_pictures

    @property
    def rows(self) -> int:
        """Maximum number of questions in one pass."""
        return self._slots

    @property
    def running(self) -> int:
        """Number of questions in the present forward pass."""
        return self._scoring

    @property
    def waiting(self) -> int:
        """Number of waiting questions."""
        return len(self._waiting)

    def submit(self, tasks: list[ClassifierRequest]) -> None:
        """Queue checked questions."""
        self._waiting.extend(tasks)

    def cycle(self) -> None:
        """Score one batch. Raises EngineError if memory runs out."""
        first = list(islice(self._waiting, WINDOW))
        places = choose_batch([len(question.prompt) for question in first], slots=self.rows, tokens=self._tokens)
        chosen = [first[place] for place in places]
        self._scoring = len(chosen)
        try:
            with explain_memory_error("while it was scoring", FIX):
                scores = self.model.scores(
                    [question.prompt for question in chosen], [question.pictures for question in chosen]
                )
        finally:
            self._scoring = 0
        for place in sorted(places, reverse=True):
            del self._waiting[place]
        ending = Finish("stop")
        self.outbox += [
            ClassifierOutput(question.number, score, self.version, ending)
            for question, score in zip(chosen, scores, strict=True)
        ]

    def abort(self, unwanted: Callable[[ClassifierRequest], bool], message: str = ABORTED) -> None:
        """End the waiting questions for which `unwanted` is true, without a score."""
        ending = Finish("abort", message=message)
        gone = [question for question in self._waiting if unwanted(question)]
        if gone:
            numbers = {question.number for question in gone}
            self._waiting = deque(question for question in self._waiting if question.number not in numbers)
        self.outbox += [ClassifierOutput(question.number, None, self.version, ending) for question in gone]


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """The questions of an accepted request. `since`: arrival time on the monotonic clock, in seconds. `returns_prompt`:
    whether the response has the questions' tokens.
    """

    questions: tuple[ClassifierRequest, ...]
    since: float
    returns_prompt: bool


class ClassifierRequestHandler(AsyncEngine[ClassifierRequest, ClassifierOutput]):
    """Turns checked requests into questions, and scores into SGLang's responses. Call `open` before the first request.

    Runs on the event loop. Checks that depend on the model (token IDs, context length) are made here, before a question
    reaches the model's thread. A request whose client has disconnected is aborted.
    """

    def __init__(
        self, core: ClassifierCore, text: Detokenizer | None, *, clock: Clock, description: dict[str, Any]
    ) -> None:
        super().__init__(core, text, clock, {**description, "is_generation": False})
        self._classifier = core.model

    def encoded(self, request: ClassifyRequest) -> ClassifyRequest:
        """Return the request with its texts tokenized. May be called from any thread: a long text takes seconds."""
        return replace(request, questions=self.encode(request.questions))

    def with_pictures(self, request: ClassifyRequest) -> ClassifyRequest:
        """Return the request with its pictures read. May be called from any thread. Raises EngineError for what is not a
        picture.
        """
        read = tuple(self._classifier.read_pictures(pictures) if pictures else () for pictures in request.pictures)
        return replace(request, pictures=read)

    def admit(self, request: ClassifyRequest) -> AdmittedRequest:
        """Check a tokenized request and return its questions. Starts nothing. Raises EngineError."""
        shown = request.pictures or [()] * len(request.questions)
        checked = [self._checked(question, its) for question, its in zip(request.questions, shown, strict=True)]
        questions = (
            ClassifierRequest(self.number(), name, tokens, pictures)
            for name, (tokens, pictures) in zip(self.names(request.rids, len(checked)), checked, strict=True)
        )
        return AdmittedRequest(tuple(questions), self.clock.monotonic(), request.returns_prompt)

    def _checked(
        self, question: str | list[int], pictures: Sequence[Any]
    ) -> tuple[tuple[int, ...], PreparedPictures | None]:
        model = self._classifier
        if isinstance(question, str):
            raise EngineError("the model folder has no tokenizer.json", fix="Send input_ids")
        check_token_ids(question, model.vocabulary, "a question")
        tokens, placed = model.place_pictures(question, pictures)
        if len(tokens) >= model.context:
            raise EngineError(
                f"a question of {len(tokens)} tokens does not fit into the context of {model.context} tokens",
                fix=f"Send at most {model.context - 1} tokens",
            )
        return tokens, placed

    async def answers(self, admitted: AdmittedRequest) -> list[dict[str, Any]]:
        """Score all questions of a request, and return the response bodies in order."""
        questions = admitted.questions
        scored = await self.ended(list(questions), {question.rid for question in questions})
        latency = self.clock.monotonic() - admitted.since
        answers = [_answer(question, scored[question.number], latency) for question in questions]
        if admitted.returns_prompt:
            for question, answer in zip(questions, answers, strict=True):
                answer["prompt_token_ids"] = list(question.prompt)
        return answers


def _answer(question: ClassifierRequest, scored: ClassifierOutput, latency_s: float) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": "stop"}
    if scored.score is None:
        reason = {"type": "abort", "message": scored.ending.message, "status_code": None, "err_type": None}
    return {
        "embedding": [] if scored.score is None else [json_number(scored.score)],
        "meta_info": {
            "id": question.rid,
            "finish_reason": reason,
            "prompt_tokens": len(question.prompt),
            "cached_tokens": 0,
            "weight_version": scored.version,
            "e2e_latency": latency_s,
        },
    }


WORDLESS = ("/generate", "/v1/completions", "/v1/chat/completions")

UNSERVED = (
    "/encode",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""SGLang's routes that this engine refuses."""


def classifier_app(engine: ClassifierRequestHandler, keys: ApiKeys) -> ASGIApp:
    """Return the ASGI application of a classifier engine: SGLang's paths and fields, protected by the API keys."""

    async def classify(request: Request) -> Response:
        body = await read_body(request, lambda value: engine.encoded(classify_body(value)))
        if body.pictures:  # decoding takes long
            body = await asyncio.to_thread(engine.with_pictures, body)
        answers = await run_unless_disconnected(request, engine.answers(engine.admit(body)))
        if answers is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(answers if body.is_list else answers[0])

    async def refuse_text(request: Request) -> Response:
        raise EngineError("this engine serves a classifier, which does not generate text", fix="Use /classify")

    routes = [Route("/classify", answer_errors(classify), methods=["POST", "PUT"])]
    routes += [Route(path, answer_errors(refuse_text), methods=["POST", "PUT"]) for path in WORDLESS]
    routes += [Route("/health_generate", bind_engine(lambda _: engine, health), methods=["GET"])]
    return engine_app(engine, routes, UNSERVED, keys)


def start_classifier(launch: EngineLaunch, text: Detokenizer | None) -> ClassifierCore:
    """Load the model of a launch document and create its core. Raises UsageError, DataError, EngineError."""
    folder = Path(launch.model)
    given: dict[str, Any] = {"dtype": launch.dtype, "device": device_of(launch), "context": launch.context_length}
    given |= {"text": text, "blobs": Path(launch.blobs) if launch.blobs else None}
    model: ServedClassifier
    with explain_memory_error("while it loaded the model", TOO_BIG):
        if require_config(folder).get("model_type") in PICTURE_SCORERS:
            model = load_scorer(folder, **given)
        else:
            model = load_classifier(folder, trust_remote_code=launch.trust_remote_code, **given)
    return ClassifierCore(
        model, slots=launch.batch_slots, chunk=launch.prefill_chunk_tokens, version=launch.weight_version
    )
