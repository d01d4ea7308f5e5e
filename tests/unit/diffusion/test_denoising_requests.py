"""Requests for pictures: steps, windows and seeds depend on the spec, the training step and the prompt alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.flow.job_data import sample_seed
from gcore.config import parse_spec
from gcore.config.load import apply_flow_settings
from gcore.errors import DataError, EngineError, SpecError
from gcore.models.diffusion.files import check_kind
from gcore.models.diffusion.requests import PictureRequests, why_untrainable
from gcore.models.diffusion.windows import kept_states
from gcore.testing.pipelines import write_pipeline
from gcore.types import DenoisingTrajectory, Group, Medium, PromptRef, Sample, Version, VersionSpan

SEEDS = (11, 12, 13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipelines") / "sd3")


@pytest.fixture(scope="module")
def ddim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipelines") / "sd", "sd")


def requests(folder: Path, flow: str = "flow_grpo", **diffusion: Any) -> PictureRequests:
    tree = {
        "name": "t",
        "model": {"path": str(folder)},
        "data": {"path": "d"},
        "flow": {"name": flow, "steps": 1, "samples_per_prompt": len(SEEDS)},
        "rollout": {"diffusion": {"steps": 6, "height": 16, "width": 16, **diffusion}},
        "reward": {"name": "/r.py:r"},
    }
    found = PictureRequests.of(parse_spec(apply_flow_settings(tree)), folder)
    assert found is not None
    return found


def test_all_steps_but_the_last_of_a_flow_are_random(folder: Path, ddim: Path) -> None:
    assert requests(folder).params("a", 0, SEEDS).random_steps == (0, 1, 2, 3, 4)
    assert requests(ddim, "ddpo").params("a", 0, SEEDS).random_steps == (0, 1, 2, 3, 4, 5)


def test_a_window_moves_with_the_training_step(folder: Path) -> None:
    window = {"size": 2, "strategy": "progressive", "stay": 3}
    made = requests(folder, window=window)
    found = [made.params("a", step, SEEDS).random_steps for step in range(12)]
    assert found[0] == found[2] == (0, 1)
    assert found[3] == (2, 3)
    assert found[6] == (4,), "cut off at the last step that can be trained"
    assert found[9] == (0, 1)
    assert all(found), "never empty"
    again = requests(folder, window=window)
    assert again.params("a", 7, SEEDS).random_steps == made.params("a", 7, SEEDS).random_steps


@given(share=st.floats(0.01, 1.0), seed=st.integers(0, 2**62), step=st.integers(0, 100))
def test_a_share_of_the_steps_is_drawn_by_the_prompts_seed(share: float, seed: int, step: int) -> None:
    made = _MADE.with_share(share)
    found = made.trained_steps(step, seed)
    assert found == made.trained_steps(step, seed) == tuple(sorted(set(found)))
    assert set(found) <= set(made.random_steps(step))
    assert len(found) == max(1, round(share * 5))


class _Shares:
    folder: Path

    def with_share(self, share: float) -> PictureRequests:
        return requests(self.folder, trained_share=share)


_MADE = _Shares()


@pytest.fixture(autouse=True)
def _prepared(folder: Path) -> None:
    _MADE.folder = folder


def test_dance_grpo_begins_a_group_with_the_same_noise_and_trains_some_random_steps(folder: Path) -> None:
    params = requests(folder, "dance_grpo").params("a", 0, SEEDS)
    assert params.noise_seeds == (11, 11, 11)
    assert params.random_steps == (0, 1, 2, 3, 4)
    assert params.kept_steps is not None
    assert len(params.kept_steps) == 3


def test_two_samples_with_equal_noise_are_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match="two pictures of a group have equal noise"):
        requests(folder).params("a", 0, (1, 2, 1))


@given(
    name=st.text(max_size=8),
    seed=st.integers(0, 2**40),
    keys=st.sets(st.tuples(*(st.integers(0, 40) for _ in range(5))), min_size=2, max_size=60),
)
def test_each_sample_has_noise_of_its_own_that_a_restarted_controller_repeats(
    name: str, seed: int, keys: set[tuple[int, ...]]
) -> None:
    def seeds() -> list[int]:
        data: Any = SimpleNamespace(spec=SimpleNamespace(name=name, seed=seed))
        return [sample_seed(data, PromptRef(*key[:3]), *key[3:]) for key in sorted(keys)]

    found = seeds()
    assert len(set(found)) == len(keys)
    assert seeds() == found


def picture(*, steps: tuple[int, ...] = (), kinds: str = "dte") -> Sample:
    names = {"d": "decoded", "t": "trajectory", "e": "embeds"}
    media = tuple(Medium(names[one], one * 64, 1, (1,), "uint8") for one in kinds)  # type: ignore[arg-type]
    spans = (VersionSpan(Version(0, 3), 0, len(steps)),)
    output = DenoisingTrajectory(steps, (1.0, 0.5, 0.0), (0.0,) * len(steps), spans, 1, media)
    return Sample(output=output, finish_reason="stop")


def test_finished_pictures_get_the_noise_levels_that_are_trained(folder: Path) -> None:
    made = requests(folder, "diffusion_nft", trained_share=0.6)
    params = made.params("a", 4, SEEDS)
    assert (params.kind, params.random_steps, params.kept_steps) == ("ode", None, None)
    found = made.finished([picture(), picture()], 4, SEEDS)
    steps = made.trained_steps(4, SEEDS[0])
    for sample in found:
        assert isinstance(sample.output, DenoisingTrajectory)
        assert sample.output.steps == steps
        assert sample.logprobs == (0.0,) * 3
        assert sample.spans == (VersionSpan(Version(0, 3), 0, 3),)
    group = Group(PromptRef(0, 0, 0), (1,), found)
    assert why_untrainable(group) is None


def test_evaluation_follows_the_ode_with_its_own_number_of_steps(folder: Path) -> None:
    found = requests(folder, eval_steps=20, guidance=3.0).evaluation("a")
    assert (found.kind, found.steps, found.guidance, found.returns_states) == ("ode", 20, 3.0, False)


def test_room_is_reserved_for_all_blobs_of_a_group(folder: Path) -> None:
    made = requests(folder)
    state = 4 * 3 * 16 * 16
    assert made.group_bytes > len(SEEDS) * len(kept_states((0, 1, 2, 3, 4))) * state
    window = requests(folder, window={"size": 2})
    assert made.group_bytes - window.group_bytes == len(SEEDS) * 3 * state
    nft = requests(folder, "diffusion_nft")
    assert made.group_bytes - nft.group_bytes == len(SEEDS) * 5 * state


def test_sizes_with_a_window_that_stays_for_a_billion_steps_are_computed_at_once(folder: Path) -> None:
    made = requests(folder, window={"size": 2, "strategy": "progressive", "stay": 10**9})
    assert made.mean_trained_steps == 5 / 3, "windows of 2, 2 and 1 steps"
    assert made.group_bytes == requests(folder, window={"size": 2}).group_bytes


def test_guidance_costs_a_pass_without_a_gradient(folder: Path) -> None:
    assert requests(folder).step_tokens == 16
    assert requests(folder, guidance=3.0).step_tokens == 22


UNFIT = [
    ("flow_grpo", {"height": 18}, "must be multiples of 4 pixels"),
    ("flow_grpo", {"height": 64, "width": 64}, "larger than the network's 16 pixels"),
    ("flow_grpo", {"steps": 1}, "0 can be trained"),
    ("flow_grpo", {"window": {"size": 2, "start": 4}}, "5 can be trained .* asks for 2 from step 4"),
]


@pytest.mark.parametrize(("flow", "diffusion", "message"), UNFIT, ids=[message for *_, message in UNFIT])
def test_sizes_and_windows_that_the_pipeline_does_not_have_are_refused(
    folder: Path, flow: str, diffusion: dict[str, Any], message: str
) -> None:
    spec = requests(folder, flow, **diffusion).spec
    with pytest.raises((DataError, SpecError), match=message):
        check_kind(spec, folder)


def test_samplers_and_losses_of_flow_matching_are_refused_with_ddim(ddim: Path) -> None:
    for flow, diffusion, message in (
        ("dance_grpo", {}, "sampler dance is for flow matching"),
        ("ddpo", {"noise_level": 1.5}, "replace at most all of their noise"),
        ("diffusion_nft", {}, "loss nft is for flow matching"),
    ):
        with pytest.raises(SpecError, match=message):
            check_kind(requests(ddim, flow, **diffusion).spec, ddim)
    spec = requests(ddim, "ddpo").spec
    guarded = spec.model_copy(update={"train": spec.train.model_copy(update={"loss": "grpo_guard"})})
    with pytest.raises(SpecError, match="loss grpo_guard is for flow matching"):
        check_kind(guarded, ddim)


def test_engine_and_model_must_be_of_one_kind(folder: Path, tmp_path: Path) -> None:
    text = parse_spec(
        {
            "name": "t",
            "model": {"path": str(folder)},
            "data": {"path": "d"},
            "flow": {"steps": 1},
            "rollout": {"max_new_tokens": 4},
        }
    )
    with pytest.raises(SpecError, match="the model generates pictures, which the engine torch cannot"):
        check_kind(text, folder)
    with pytest.raises(DataError, match="cannot read a file of the pipeline"):
        check_kind(requests(folder).spec, tmp_path)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample((1,), (0.0,), "a", "stop", (VersionSpan(Version(0, 0), 0, 1),)), "returned a text"),
        (picture(), "0 trained steps"),
        (picture(steps=(0,), kinds="de"), "with the blobs"),
    ],
)
def test_groups_that_ranks_could_not_train_are_refused(sample: Sample, message: str) -> None:
    assert message in (why_untrainable(Group(PromptRef(0, 0, 0), (1,), (sample,))) or "")
