"""A request with pictures to an engine on another node than its controller: real stores and a real engine."""

import hashlib
from pathlib import Path
from typing import Any

from blob_stores import Start, TwoStores
from engine_processes import TORCH, engine_process

from controllers.changes import ChangeSignal
from controllers.workers.job_media import JobMedia
from gcore.media.client import BlobHttp
from gcore.media.placeholders import PictureRule
from gcore.rollout.api import SamplingParams
from gcore.rollout.client import EngineClient
from gcore.system.clock import SystemClock
from gcore.testing.vision_models import IMAGE, VISION_END, VISION_START, make_picture, make_tiny_vision_model
from gcore.types import PictureRef, Prompt, PromptRef


async def test_an_engine_samples_from_a_picture_that_only_the_controllers_node_had(
    start: Start, http: BlobHttp, tmp_path: Path
) -> None:
    own, other = start("n1"), start("n2")
    other.set_nodes(own)
    model = make_tiny_vision_model(tmp_path / "model", seed=3)
    file = tmp_path / "picture.png"
    file.write_bytes(make_picture(64, 48))
    picture = PictureRef(str(file), hashlib.sha256(file.read_bytes()).hexdigest(), 64, 48, 64, 48)
    short = (4, VISION_START, IMAGE, VISION_END, 7)
    expanded = PictureRule.load(model).expand(short, [(64, 48)])
    prompt = Prompt(PromptRef(0, 0, 0), "?", expanded, {}, "data", request_ids=short, pictures=(picture,))
    stores: Any = TwoStores(own, other, http)
    media = JobMedia(stores, "job", "n1.1", set, frozenset, ChangeSignal(), str, SystemClock())
    asked = await media.in_request(prompt, trained=True)
    (medium,) = asked.media
    assert not other.path(medium.sha256).exists()
    with engine_process(model, TORCH, batch_slots=2, blobs=str(other.folder / "job")) as url:
        client = EngineClient(url, timeout_s=120)
        params = SamplingParams(1.0, 4, pictures=await asked.at_node("n2"))
        samples = await client.generate_each([short, short], params, seeds=[1, 2], rid="a")
        await client.close()
    assert all(sample.token_ids for sample in samples)
    assert other.path(medium.sha256).read_bytes() == own.path(medium.sha256).read_bytes()
    await media.close(ended=False)
