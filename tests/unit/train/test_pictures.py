"""Samples with pictures in the trainer: log-probabilities and gradients equal those of the plain model."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gcore.config.train import TrainSpec
from gcore.errors import DataError
from gcore.ledger.balance import SampleSlot
from gcore.ledger.records.chain import Seal, SealedGroup, SealState
from gcore.models.vision import (
    REPEATS,
    PictureProcessor,
    has_vision,
    media_token_ids,
    picture_arguments,
    text_attention,
)
from gcore.testing.models import make_tiny_model
from gcore.testing.vision_models import (
    FAMILIES,
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    Family,
    make_picture,
    make_tiny_vision_model,
)
from gcore.train.batching import MicroBatch, TokenFeeding, VisionFeeding, logits_of, make_batch, make_dummy, score_batch
from gcore.train.hf_models import check_names, load_module
from gcore.train.models import _trial_rows, choose_feeding, freeze_parts
from gcore.train.packing import MicroPlan, Rectangle
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.types import Medium, PromptRef, Version

TOKENS = {"qwen3_vl": 4, "qwen2_5_vl": 4, "smolvlm": 4, "gemma3": 4, "llava": 16}
"""Placeholders of a picture of 32 x 32 pixels."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_tiny_vision_model(tmp_path_factory.mktemp(family), family, seed=number)
        for number, family in enumerate(FAMILIES)
    }


@dataclass
class Case:
    """A model, and samples of it: a text, one picture twice, and two pictures of which one occurs before."""

    module: Any
    feeding: TokenFeeding
    work: StepInput
    plan: MicroPlan
    blobs: Path


def stored(blobs: Path, seed: int, height: int = 32, width: int = 32) -> Medium:
    data = make_picture(height, width, seed=seed)
    name = hashlib.sha256(data).hexdigest()
    (blobs / name).write_bytes(data)
    return Medium("picture", name, len(data), (height, width, 3), "uint8")


def prompt(*pictures: int) -> list[int]:
    """Tokens of a prompt; `pictures`: the number of placeholders of each."""
    ids = [5, 9]
    for count in pictures:
        ids += [VISION_START, *[IMAGE] * count, VISION_END, 7]
    return [*ids, 11]


def make_case(folder: Path, blobs: Path, family: Family, packing: str) -> Case:
    module = load_module(folder, torch.float32)
    check_names(folder, module)
    vision = VisionFeeding(module, PictureProcessor(folder), blobs)
    choice = choose_feeding(module, TrainSpec(packing=packing), None, list, vision=vision)  # type: ignore[arg-type]
    n = TOKENS[family]
    free = family.startswith("qwen")
    one, other = stored(blobs, 1), stored(blobs, 2, 64 if free else 32, 48 if free else 32)
    prompts = [prompt(), prompt(n), prompt(n, 3 * n if free else n)]
    media = [(), (one,), (other, one)]
    if free:
        prompts[2] = prompt(3 * n, n)
    groups, sealed = {}, []
    for number, (ids, of_prompt) in enumerate(zip(prompts, media, strict=True)):
        samples = {
            i: TrainSample(np.array([3 + number, 8, 12, 1][i:], np.int32), np.zeros(4 - i, np.float32), 1.0)
            for i in range(2)
        }
        ref, digest = PromptRef(0, 0, number), f"{number:032x}"
        groups[digest] = TrainGroup(ref, digest, np.array(ids, np.int32), samples, media=of_prompt)
        sealed.append(
            SealedGroup(
                ref=ref,
                digest=digest,
                prompt_tokens=len(ids),
                response_tokens=(4, 3),
                versions=(Version(0, 0),),
                holder="h",
            )
        )
    seal = Seal(
        lineage=0,
        step=1,
        attempt=1,
        state=SealState.READY,
        world="w",
        world_size=1,
        mini_batches=1,
        groups=tuple(sealed),
    )
    slots = tuple(SampleSlot(group, sample) for group in range(3) for sample in range(2))
    lengths = [len(prompts[slot.group]) + 4 - slot.sample for slot in slots]
    if choice.packing == "packed":
        shapes = tuple(Rectangle(1, length) for length in lengths)
    else:
        shapes = (Rectangle(len(slots), max(lengths)),)
    feeding = TokenFeeding(
        choice.packing, 64, torch.device("cpu"), forbidden=torch.tensor(media_token_ids(module.config)), vision=vision
    )
    work = StepInput(seal, None, 0, groups)  # type: ignore[arg-type]
    return Case(module, feeding, work, MicroPlan(slots, shapes), blobs)


def add_tool_pictures(case: Case, family: Family) -> None:
    """Add a group whose responses have pictures of tools in the middle: one that no prompt has, and two of which a prompt
    has one."""
    n, free = TOKENS[family], family.startswith("qwen")
    first = case.work.groups[f"{1:032x}"]
    new, large = stored(case.blobs, 3), stored(case.blobs, 4, 32 if not free else 48, 32 if not free else 96)
    samples = {}
    for index, media in enumerate([(new,), (first.media[0], large)]):
        counts = [n, n * 9 // 2 if free else n][: len(media)]
        pieces = [[3 + index, 9], *([VISION_START, *[IMAGE] * count, VISION_END, 12, 8] for count in counts)]
        ids = [token for piece in pieces for token in piece]
        ends = np.cumsum([len(piece) for piece in pieces])
        observed = tuple((int(end), int(end) + count + 2) for end, count in zip(ends, counts, strict=False))
        zeros = np.zeros(len(ids), np.float32)
        samples[index] = TrainSample(np.array(ids, np.int32), zeros, 1.0, False, observed, media)
    ref, digest = PromptRef(0, 0, 9), f"{9:032x}"
    group = TrainGroup(ref, digest, first.prompt_ids, samples, media=first.media)
    lengths = tuple(len(one.token_ids) for one in samples.values())
    sealed = SealedGroup(
        ref=ref,
        digest=digest,
        prompt_tokens=len(group.prompt_ids),
        response_tokens=lengths,
        versions=(Version(0, 0),),
        observed=tuple(sum(end - start for start, end in one.observed) for one in samples.values()),
        holder="h",
    )
    seal = case.work.seal.model_copy(update={"groups": (*case.work.seal.groups, sealed)})
    case.work = StepInput(seal, case.work.layout, 0, {**case.work.groups, digest: group})
    slots = (*case.plan.slots, *(SampleSlot(3, index) for index in samples))
    whole = [sealed.prompt_tokens + length for length in lengths]
    if case.feeding.packing == "packed":
        shapes = (*case.plan.rectangles, *(Rectangle(1, length) for length in whole))
    else:
        shapes = (Rectangle(len(slots), max(case.plan.rectangles[0].length, *whole)),)
    case.plan = MicroPlan(slots, shapes)


def batch_of(case: Case) -> MicroBatch:
    return make_batch(case.work, case.plan, case.feeding)


def alone(case: Case, slot: SampleSlot) -> Tensor:
    """The log-probabilities of a sample's response by a forward pass of the model on this sequence alone."""
    group = case.work.groups[case.work.seal.groups[slot.group].digest]
    response = group.samples[slot.sample].token_ids
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, response]).astype(np.int64))[None]
    more: dict[str, Any] = {}
    processor = case.feeding.vision._processor  # type: ignore[union-attr]
    if media := (*group.media, *group.samples[slot.sample].media):
        REPEATS.places = None
        read = [processor.read(one.sha256, case.blobs / one.sha256) for one in media]
        more = picture_arguments(read, torch.device("cpu"))
        more["pixel_values"] = more["pixel_values"].to(case.module.dtype)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inspect.signature(case.module.forward).parameters:
                more[name] = (ids == IMAGE).long()
    logits = case.module(input_ids=ids, use_cache=False, **more).logits[0, len(group.prompt_ids) - 1 : -1]
    logits = logits.index_fill(1, case.feeding.forbidden, -torch.inf)
    targets = torch.from_numpy(response.astype(np.int64))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide, -1).gather(1, targets[:, None])[:, 0]


def generated(case: Case, slot: SampleSlot) -> Tensor:
    """Which tokens of a sample's response the policy generated: bool."""
    sample = case.work.groups[case.work.seal.groups[slot.group].digest].samples[slot.sample]
    own = torch.ones(len(sample.token_ids), dtype=torch.bool)
    for start, end in sample.observed:
        own[start:end] = False
    return own


def own_attention(case: Case) -> None:
    case.module.set_attn_implementation({"text_config": "eager"})


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_equal_a_forward_pass_of_each_sequence(
    folders: dict[str, Path], tmp_path: Path, family: Family
) -> None:
    case = make_case(folders[family], tmp_path, family, "auto")
    with torch.no_grad():
        batch = batch_of(case)
        scores = score_batch(logits_of(case.module), batch)
        own_attention(case)
        for row, slot in enumerate(case.plan.slots):
            expected = alone(case, slot)
            assert torch.allclose(scores.logp[row, : len(expected)], expected, atol=1e-5), slot


@pytest.mark.parametrize(("family", "packing"), [("qwen3_vl", "packed"), ("qwen3_vl", "bucketed"), ("llava", "packed")])
def test_gradients_equal_those_of_a_plain_loop(
    folders: dict[str, Path], tmp_path: Path, family: Family, packing: str
) -> None:
    case = make_case(folders[family], tmp_path, family, packing)
    score_batch(logits_of(case.module), batch_of(case)).logp.sum().backward()
    together = {name: one.grad.clone() for name, one in case.module.named_parameters() if one.grad is not None}
    case.module.zero_grad()
    own_attention(case)
    torch.stack([alone(case, slot).sum() for slot in case.plan.slots]).sum().backward()
    expected = {name: one.grad for name, one in case.module.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in expected.values())
    for name, one in expected.items():
        assert float((together[name] - one).abs().max()) <= 1e-5 * largest, name
    assert any("vision" in name or "visual" in name for name in together)


@pytest.mark.parametrize(
    ("family", "packing"),
    [("qwen3_vl", "packed"), ("qwen3_vl", "bucketed"), ("qwen2_5_vl", "auto"), ("llava", "packed"), ("gemma3", "auto")],
)
def test_responses_with_pictures_of_tools_equal_a_plain_loop(
    folders: dict[str, Path], tmp_path: Path, family: Family, packing: str
) -> None:
    case = make_case(folders[family], tmp_path, family, packing)
    add_tool_pictures(case, family)
    batch = batch_of(case)
    scores = score_batch(logits_of(case.module), batch)
    assert scores.logp.requires_grad
    torch.where(batch.mask, scores.logp, 0.0).sum().backward()
    together = {name: one.grad.double() for name, one in case.module.named_parameters() if one.grad is not None}
    case.module = copy.deepcopy(case.module).double()
    case.module.zero_grad()
    own_attention(case)
    total = torch.zeros((), dtype=torch.float64)
    for row, slot in enumerate(case.plan.slots):
        expected, own = alone(case, slot), generated(case, slot)
        assert batch.mask[row, : len(own)].tolist() == own.tolist(), "tokens of a tool are never trained"
        found = scores.logp[row, : len(own)].double()
        assert torch.allclose(found[own], expected[own], atol=1e-5), slot
        total = total + expected[own].sum()
    total.backward()
    expected_grads = {name: one.grad for name, one in case.module.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in expected_grads.values())
    for name, one in expected_grads.items():
        assert float((together[name] - one).abs().max()) <= 1e-5 * largest, name


def test_a_picture_of_a_tool_that_a_prompt_has_too_is_encoded_once(folders: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(folders["qwen3_vl"], tmp_path, "qwen3_vl", "packed")
    add_tool_pictures(case, "qwen3_vl")
    batch = batch_of(case)
    assert batch.inputs.pictures is not None
    assert len(batch.inputs.pictures.arguments["image_grid_thw"]) == 4
    assert batch.inputs.pictures.places == (0, 0, 1, 0, 1, 0, 0, 2, 0, 0, 3)


def test_each_distinct_picture_is_decoded_and_encoded_once(folders: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(folders["qwen3_vl"], tmp_path, "qwen3_vl", "packed")
    batch = batch_of(case)
    assert batch.inputs.pictures is not None
    assert len(batch.inputs.pictures.arguments["image_grid_thw"]) == 2
    assert batch.inputs.pictures.places == (0, 0, 1, 0, 1, 0)
    assert case.feeding.vision is not None
    assert case.feeding.vision._processor.decoded == 2
    seen: list[int] = []
    case.module.model.visual.register_forward_hook(lambda _m, args, _o: seen.append(len(args[0])))
    score_batch(logits_of(case.module), batch)
    assert seen == [16 + 48]  # patches of 8 x 8 pixels


def test_a_file_with_other_bytes_than_its_name_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Engine and trainer would see another picture, with as many tokens."""
    processor, data = PictureProcessor(folders["qwen3_vl"]), make_picture(32, 32)
    name = hashlib.sha256(data).hexdigest()
    (tmp_path / name).write_bytes(make_picture(32, 32, seed=1))
    with pytest.raises(DataError, match="the bytes of the picture have changed"):
        processor.read(name, tmp_path / name)
    (tmp_path / name).write_bytes(data)
    assert processor.read(name, tmp_path / name).grid == (1, 4, 4)


def test_a_pass_without_pictures_runs_the_tower_and_changes_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(folders["qwen3_vl"], tmp_path, "qwen3_vl", "packed")
    dummy = make_dummy(case.feeding)
    score_batch(logits_of(case.module), dummy).logp.sum().mul(0.0).backward()
    tower = {name: one.grad for name, one in case.module.named_parameters() if "visual" in name}
    assert tower
    assert all(grad is not None and not grad.any() for grad in tower.values())


def test_trial_tokens_stand_for_media_only_in_pictures(folders: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(folders["qwen3_vl"], tmp_path, "qwen3_vl", "packed")
    vision = case.feeding.vision
    assert vision is not None
    assert len(vision.media_tokens) > 1
    for _, made in _trial_rows(max(vision.media_tokens) + 1, vision):
        for row in made:
            counts = sum(vision.count(one) for one in row.pictures.pictures)
            assert int(torch.isin(row.ids, torch.tensor(vision.media_tokens)).sum()) == counts


def test_media_tokens_have_no_probability(folders: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(folders["qwen3_vl"], tmp_path, "qwen3_vl", "packed")
    assert media_token_ids(case.module.config) == (VISION_START, IMAGE, VIDEO)
    with torch.no_grad():
        case.module.lm_head.weight[IMAGE] += 50.0
        batch = batch_of(case)
        scores = score_batch(logits_of(case.module), batch)
    assert bool(torch.isfinite(scores.logp).all())
    assert float(scores.logp[batch.scored].max()) < 0


@pytest.mark.parametrize("media", [(), ("one", "one")])
def test_another_number_of_placeholders_is_refused(
    folders: dict[str, Path], tmp_path: Path, media: Sequence[str]
) -> None:
    case = make_case(folders["qwen3_vl"], tmp_path, "qwen3_vl", "packed")
    group = case.work.groups[f"{1:032x}"]
    changed = {**case.work.groups, group.digest: _with_media(group, group.media * len(media))}
    case.work = StepInput(case.work.seal, case.work.layout, 0, changed)
    with pytest.raises(DataError, match="4 placeholders"):
        batch_of(case)


def _with_media(group: TrainGroup, media: tuple[Medium, ...]) -> TrainGroup:
    return TrainGroup(group.ref, group.digest, group.prompt_ids, group.samples, media=media)


def test_a_tensor_that_the_checkpoint_lacks_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "renamed"
    folder.mkdir()
    for file in folders["qwen3_vl"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    name = "model.visual.blocks.0.attn.qkv.weight"
    weights["model.visual.blocks.0.attn.other.weight"] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=name):
        load_module(folder, torch.float32)


def test_a_transformers_that_confuses_pictures_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore.models.vision.version", lambda _: "5.17.0")
    with pytest.raises(DataError, match=r"pictures need transformers 5\.18 or newer, and 5\.17\.0 is installed"):
        PictureProcessor(folders["qwen3_vl"])


def test_a_text_model_has_no_vision(tmp_path: Path) -> None:
    module: Any = load_module(make_tiny_model(tmp_path), torch.float32)
    assert not has_vision(module.config)
    assert media_token_ids(module.config) == ()
    assert text_attention(module) == module.config._attn_implementation


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_parts_that_can_be_frozen(folders: dict[str, Path], family: Family) -> None:
    module = load_module(folders[family], torch.float32)
    tower = freeze_parts(module, ["vision"], folders[family])
    projector = freeze_parts(module, ["projector"], folders[family])
    left = {name for name, one in module.named_parameters() if one.requires_grad}
    assert tower.keys()
    assert projector.keys()
    assert not tower.keys() & projector.keys()
    assert left
    assert not any("visi" in name or "visual" in name for name in left)


def test_a_text_model_has_nothing_to_freeze(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    with pytest.raises(DataError, match="has no part 'vision'"):
        freeze_parts(load_module(folder, torch.float32), ["vision"], folder)
