"""A stand-in for SGLang's diffusion server: it computes rollouts of a tiny pipeline as SGLang 0.5.23 does, and has its routes.

`FakeRollouts` makes answers for tests. Run as `... -m sglang.multimodal_gen.runtime.launch_server OPTIONS`, this file serves
them. A prompt that ends with `!NAME` selects a fault or another behaviour (`FAULTS`). The tests with a real server compare
its answers with these.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgpack
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from gcore.models.diffusion.files import PACKED
from gcore.models.diffusion.networks import Condition, pack_squares, unpack_squares
from gcore.models.diffusion.pipeline import ImagePipeline
from gcore.models.diffusion.steps import StepKind, flow_step

SLOW_S = 0.5


def install(folder: Path) -> Path:
    """An executable that can be named as SGLang's Python, in an environment that seems to have its diffusion packages."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore "{__file__}" "$@"\n')
    python.chmod(0o755)
    package = folder / "lib" / "python3" / "site-packages" / "diffusers" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    return python


def encoded(value: Any) -> Any:
    """Tensors of an answer as SGLang sends them, at any depth."""
    if isinstance(value, Tensor):
        data = save({"t": value.contiguous()})
        return {"__tensor__": True, "data": data, "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {name: encoded(one) for name, one in value.items()}
    return [encoded(one) for one in value] if isinstance(value, list | tuple) else value


class FakeRollouts:
    """Rollouts of the pipeline in `folder`. `embedded`: guidance that a Flux network gets as an input, whatever requests say."""

    def __init__(self, folder: Path, embedded: float = 3.5) -> None:
        self.embedded = embedded
        self.pipeline = ImagePipeline.load(folder, guidance=1.0, dtype=torch.float32, device="cpu")

    @torch.inference_mode()
    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer to a request, with tensors in the place of their bytes."""
        assert body["num_outputs_per_prompt"] == 1
        assert body["rollout_debug_mode"] is False
        assert body["generator_device"] == "cpu"
        text, _, fault = body["prompt"].partition("!")
        files, network = self.pipeline.files, self.pipeline.network
        shape = files.state_shape(body["height"], body["width"])
        levels = self.pipeline.levels(body["num_inference_steps"], shape)
        given = body.get("true_cfg_scale")
        scale = body["guidance_scale"] if given is None else given
        guided = scale > 1 and body.get("negative_prompt") is not None
        assert not (guided and network.is_distilled)
        network.guidance = self.embedded if network.is_distilled else scale if guided else 1.0
        condition = self.pipeline.condition(text)
        negatives = [self.pipeline.condition(body["negative_prompt"])] if guided else []
        packed = files.kind in PACKED
        rows, columns = shape[1] // 2, shape[2] // 2
        generator = torch.Generator().manual_seed(body["seed"])
        state = torch.randn(1, *shape, generator=generator)
        logprobs, states, times = [], [], []
        for index, (level, following) in enumerate(itertools.pairwise(levels)):
            if index in body["rollout_return_step_indices"]:
                states.append(state)
                times.append(1000 * level)
            velocity = network.predict(state, torch.tensor([level]), [condition], negatives)
            random = index in body["rollout_sde_step_indices"] or fault == "all-random"
            kind: StepKind = body["rollout_sde_type"] if random and following > 0 else "ode"
            step = flow_step(kind, state, velocity, list(levels), index, body["rollout_noise_level"])
            if kind == "ode":
                assert body["rollout_sde_type"] != "ode" or body["rollout_log_prob_no_const"]
                state, logprob = step.mean, 0.0
            else:
                drawn = torch.randn((1, rows * columns, 4 * shape[0]) if packed else state.shape, generator=generator)
                noise = step.std * (unpack_squares(drawn, rows, columns) if packed else drawn)
                state, squares = step.mean + noise, float((noise**2).mean())
                logprob = -squares
                if not body["rollout_log_prob_no_const"]:
                    logprob = -squares / (2 * step.std**2) - math.log(step.std) - 0.5 * math.log(2 * math.pi)
            logprobs.append(logprob)
            if fault == "bf16":
                state = state.bfloat16().float()
        if len(levels) - 1 in body["rollout_return_step_indices"]:
            states.append(state)
            times.append(0.0)
        stacked = torch.cat(states)
        answer = {
            "request_id": "r",
            "prompt": body["prompt"],
            "seed": body["seed"],
            "generated_output": _picture(self.pipeline.decode(state), files.kind),
            "rollout_log_probs": torch.tensor(logprobs),
            "rollout_debug_tensors": None,
            "denoising_env": {
                "image_kwargs": None,
                "pos_cond_kwargs": _kwargs(condition, files.kind),
                "neg_cond_kwargs": _kwargs(negatives[0], files.kind) if guided else None,
                "guidance": torch.tensor(1000 * network.guidance) if network.is_distilled else None,
            },
            "dit_trajectory": {
                "latents": pack_squares(stacked) if packed else stacked,
                "timesteps": torch.tensor(times),
                "sigmas": torch.tensor(levels),
            },
            "inference_time_s": 0.1,
            "peak_memory_mb": None,
        }
        if fault in FAULTS:
            FAULTS[fault](answer)
        return [answer, answer] if fault == "two" else [answer]


def _picture(pixels: Tensor, kind: str) -> Tensor:
    """[3, height, width] with values from 0 to 1; Qwen-Image's has a dimension for frames."""
    found = pixels[0].permute(2, 0, 1).float() / 255
    return found.unsqueeze(1) if kind == "QwenImagePipeline" else found


def _kwargs(condition: Condition, kind: str) -> dict[str, Any]:
    """What the network gets of a prompt. The leading dimension of one sample is dropped, but not that of a table of positions."""
    embeds = condition["embeds"][0]
    if kind == "QwenImagePipeline":
        return {
            "encoder_hidden_states_mask": None,
            "txt_seq_lens": [len(embeds)],
            "freqs_complex": [torch.zeros(4, 2, dtype=torch.complex64)],
            "img_shapes": [[[1, 4, 4]]],
            "encoder_hidden_states": [embeds],
        }
    return {"pooled_projections": condition["pooled"][0], "encoder_hidden_states": embeds}


def _set(*path: str, to: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """A fault: replaces a part of the answer."""

    def change(answer: dict[str, Any]) -> None:
        place = answer
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = to(place[path[-1]])

    return change


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no-trajectory": _set("dit_trajectory", to=lambda _: None),
    "no-log-probs": _set("rollout_log_probs", to=lambda _: None),
    "no-embeds": _set("denoising_env", "pos_cond_kwargs", "encoder_hidden_states", to=lambda _: None),
    "half": _set("dit_trajectory", "latents", to=lambda states: states.half()),
    "half-values": _set("dit_trajectory", "latents", to=lambda states: states.half().float()),
    "nan-states": _set("dit_trajectory", "latents", to=lambda states: states * math.nan),
    "nan-picture": _set("generated_output", to=lambda pixels: pixels * math.nan),
    "nan-log-probs": _set("rollout_log_probs", to=lambda numbers: numbers * math.nan),
    "fewer-states": _set("dit_trajectory", "latents", to=lambda states: states[1:]),
    "smaller-states": _set("dit_trajectory", "latents", to=lambda states: states[..., :-1]),
    "other-states": _set("dit_trajectory", "timesteps", to=lambda times: times + 250),
    "fewer-steps": _set("rollout_log_probs", to=lambda numbers: numbers[1:]),
    "smaller-picture": _set("generated_output", to=lambda pixels: pixels[..., :-1]),
    "other-seed": _set("seed", to=lambda seed: seed + 1),
    "other-levels": _set("dit_trajectory", "sigmas", to=lambda levels: levels**1.01),
    "rising-levels": _set("dit_trajectory", "sigmas", to=lambda levels: levels.flip(0)),
    "unguided": _set("denoising_env", "neg_cond_kwargs", to=lambda _: None),
    "guided": _set("denoising_env", "neg_cond_kwargs", to=lambda _: {"encoder_hidden_states": torch.ones(2, 32)}),
    "masked": _set("denoising_env", "pos_cond_kwargs", "encoder_hidden_states_mask", to=lambda _: torch.ones(1, 14)),
    "no-tensor": _set("dit_trajectory", "sigmas", to=lambda _: {"__tensor__": True, "data": b"nothing"}),
}


class _Server:
    """The routes of a server. One request at a time, as SGLang's scheduler does."""

    def __init__(self, folder: Path, embedded: float) -> None:
        self.rollouts = FakeRollouts(folder, embedded)
        self._turn = threading.Lock()
        self._network: Any = self.rollouts.pipeline.network.module

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of a POST request."""
        with self._turn:
            match path:
                case "/rollout/generate":
                    return self._generate(body)
                case "/update_weights_from_disk":
                    success = self._update(Path(body["model_path"]), body["target_modules"])
                    message = "Updated." if success else "Failed. All modules rolled back to original weights."
                    return (200 if success else 400), json.dumps({"success": success, "message": message}).encode()
                case "/get_weights_checksum":
                    names = body["module_names"] or ["transformer"]
                    return 200, json.dumps(dict.fromkeys(names, self._checksum())).encode()
        return 404, b"{}"

    def _generate(self, body: dict[str, Any]) -> tuple[int, bytes]:
        match body["prompt"].partition("!")[2]:
            case "die":
                print("RuntimeError: the scheduler ran out of memory", flush=True)
                os._exit(3)
            case "slow":
                time.sleep(SLOW_S)
            case "refused":
                return 500, json.dumps({"detail": "Error executing request: out of memory"}).encode()
            case "ended":
                return 503, json.dumps({"error": "Scheduler worker exited; restart the server."}).encode()
            case "not-msgpack":
                return 200, b"\xc1"
        return 200, msgpack.packb(encoded(self.rollouts.answer(body)))

    def _update(self, folder: Path, modules: list[str]) -> bool:
        """Like SGLang, it takes the tensors that it knows. A file `refused` lets it fail half-way."""
        assert modules == ["transformer"]
        files = sorted((folder / "transformer").glob("*.safetensors"))
        weights = {name: one for file in files for name, one in load_file(file).items()}
        if refused := (folder / "transformer" / "refused").exists():
            weights = {"proj_out.weight": weights["proj_out.weight"]}
        self._network.load_state_dict(weights, strict=False)
        return not refused

    def _checksum(self) -> str:
        state = self._network.state_dict()
        return hashlib.sha256(save({name: one.clone() for name, one in state.items()})).hexdigest()


def main() -> None:
    """Serve with the options of SGLang's command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", dest="module")
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--embedded-cfg-scale", type=float, default=3.5)
    parser.add_argument("--fake-pid", type=Path, help="file to write the process ID to")
    options, _ = parser.parse_known_args()
    assert options.module == "sglang.multimodal_gen.runtime.launch_server"
    torch.set_num_threads(1)
    if options.fake_pid:
        options.fake_pid.write_text(str(os.getpid()))
    print("loading", flush=True)
    server = _Server(options.model_path, options.embedded_cfg_scale)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(*((200, b'{"status": "ok"}') if self.path == "/health" else (404, b"{}")))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer(*server.respond(self.path, body))

        def _answer(self, status: int, body: bytes) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
