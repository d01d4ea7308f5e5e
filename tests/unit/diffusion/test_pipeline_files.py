"""Files of pipelines that are missing, cut off or have settings of a wrong type: each is refused by its name, without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gcore.config.diffusion import DenoisingSpec
from gcore.errors import GcoreError
from gcore.models.diffusion.files import check_pipeline
from gcore.testing.pipelines import FAMILIES, Family, write_pipeline

Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {family: write_pipeline(root / family, family) for family in FAMILIES}


def without(name: str) -> Edit:
    def remove(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def cut(name: str) -> Edit:
    def shorten(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return shorten


def having(name: str, **settings: Any) -> Edit:
    """With other settings in a file; `...` removes one."""

    def change(folder: Path) -> None:
        tree = json.loads((folder / name).read_text()) | settings
        (folder / name).write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))

    return change


INDEX, NETWORK, UNET, VAE = "model_index.json", "transformer/config.json", "unet/config.json", "vae/config.json"
SCHEDULER, WEIGHTS = "scheduler/scheduler_config.json", "diffusion_pytorch_model.safetensors"
BROKEN: list[tuple[Family, Edit, str]] = [
    ("sd3", without(INDEX), "cannot read a file of the pipeline"),
    ("sd3", cut(INDEX), "is not JSON"),
    ("sd3", having(INDEX, _class_name=["a"]), "does not name its class"),
    ("sd3", having(INDEX, text_encoder="x"), "text_encoder is x instead of a class"),
    ("sd3", having(INDEX, text_encoder=["transformers"]), "instead of a class"),
    ("sd3", having(INDEX, text_encoder={"a": 1}), "instead of a class"),
    ("sd3", having(INDEX, tokenizer=["os", "system"]), "instead of a class of diffusers or transformers"),
    ("sd3", having(INDEX, feature_extractor=["os", "system"]), "instead of a class of diffusers or transformers"),
    ("sd3", having(INDEX, vae="x"), "vae is x"),
    ("sd3", without("text_encoder"), "the pipeline has no text_encoder"),
    ("sd3", without("text_encoder/config.json"), "cannot read a file of the pipeline"),
    ("sd3", without("text_encoder_2/model.safetensors"), "cannot read the weights"),
    ("sd3", cut("text_encoder/model.safetensors"), "is cut off"),
    ("sd3", without("tokenizer_2/tokenizer.json"), "the tokenizer has none of the files"),
    ("sd3", cut("tokenizer/tokenizer.json"), "is not JSON"),
    ("sd3", cut(f"transformer/{WEIGHTS}"), "is cut off"),
    ("flux", without(f"vae/{WEIGHTS}"), "cannot read the weights"),
    ("sd3", having(NETWORK, in_channels=...), "in_channels: Field required"),
    ("sd3", having(NETWORK, in_channels="x"), "in_channels is 'x'"),
    ("sd3", having(NETWORK, sample_size=...), "the pipeline's size of pictures is not known"),
    ("sd3", having(NETWORK, sample_size=0), "sample_size is '0': Input should be greater than 0"),
    ("sd3", having(NETWORK, patch_size=[2, 2]), "patch_size"),
    ("sd3", having(NETWORK, num_attention_heads="a"), "num_attention_heads"),
    ("sd3", having(NETWORK, attention_head_dim=None), "attention_head_dim"),
    ("sd3", having(NETWORK, _class_name="FluxTransformer2DModel"), "the network is a FluxTransformer2DModel"),
    ("sd3", having("text_encoder/config.json", max_position_embeddings="x"), "max_position_embeddings"),
    ("flux", having(VAE, block_out_channels=...), "block_out_channels: Field required"),
    ("flux", having(VAE, block_out_channels=["x"]), "block_out_channels.0"),
    ("qwen_image", having(VAE, temperal_downsample=5), "temperal_downsample"),
    ("qwen_image", having(VAE, dim_mult="x"), "dim_mult"),
    ("sd", having(UNET, block_out_channels=5), "block_out_channels"),
    ("sd", having(UNET, layers_per_block=[1, 1]), "layers_per_block"),
    ("sd", having(UNET, cross_attention_dim="x"), "cross_attention_dim"),
    ("sd3", having(SCHEDULER, shift=0), "shift is '0'"),
    ("sd3", having(SCHEDULER, shift_terminal=2.0), "shift_terminal"),
    ("sd3", having(SCHEDULER, max_image_seq_len=256), "no line goes through both"),
    ("sd3", having(SCHEDULER, _class_name="DDIMScheduler"), "does not belong to a StableDiffusion3Pipeline"),
    ("sd", having(SCHEDULER, beta_schedule="x"), "beta_schedule"),
    ("sd", having(SCHEDULER, beta_start=float("nan")), "beta_start is 'nan'"),
    ("sd", having(SCHEDULER, trained_betas=[0.1]), "trained_betas has 1 values"),
    ("sd", having(SCHEDULER, steps_offset=0), "the last timestep is 0"),
    ("sd", having(SCHEDULER, num_train_timesteps=3), "4 steps are more than the scheduler's 3 timesteps"),
]


@pytest.mark.parametrize(("family", "edit", "message"), BROKEN, ids=[f"{one[0]}: {one[2]}" for one in BROKEN])
def test_a_broken_pipeline_is_refused_by_the_name_of_what_is_wrong(
    pipelines: dict[str, Path], tmp_path: Path, family: Family, edit: Edit, message: str
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(pipelines[family], folder)
    edit(folder)
    with pytest.raises(GcoreError, match=message):
        check_pipeline(DenoisingSpec(steps=4), folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_pipelines_pass(pipelines: dict[str, Path], family: Family) -> None:
    check_pipeline(DenoisingSpec(steps=4), pipelines[family])


def test_evaluation_has_at_most_as_many_steps_as_the_scheduler(pipelines: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(pipelines["sd"], tmp_path / "p")
    having(SCHEDULER, num_train_timesteps=5)(tmp_path / "p")
    check_pipeline(DenoisingSpec(steps=4), tmp_path / "p")
    with pytest.raises(GcoreError, match="6 steps are more than the scheduler's 5 timesteps"):
        check_pipeline(DenoisingSpec(steps=4, eval_steps=6), tmp_path / "p")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(GcoreError, match="there is no such folder"):
        check_pipeline(DenoisingSpec(steps=4), tmp_path / "nowhere")
