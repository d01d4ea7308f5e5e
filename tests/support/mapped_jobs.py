"""Jobs and clusters for tests of the placement search: models by their sizes, specs as trees."""

from __future__ import annotations

from typing import Any

from gcore.config import JobSpec, parse_spec
from placement.mapping.cluster import ClusterSpec, parse_cluster
from placement.mapping.workload import JobShapes, MeanLengths, ModelShape, Workload, make_workload, read_shape

TREE: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "data": {"path": "d", "max_prompt_tokens": 512},
    "flow": {"steps": 3, "groups_per_step": 128, "samples_per_prompt": 8},
    "rollout": {"max_new_tokens": 1024, "batch_slots": 128},
    "train": {"dtype": "bf16", "micro_batch_tokens": 16384, "activation_checkpointing": True},
}
JUDGE: dict[str, Any] = {
    "name": "right",
    "model": {"path": "p"},
    "template": "{{ prompt }}{{ response }} Is that right?",
    "max_new_tokens": 64,
    "temperature": 0.7,
}


def model(width: int = 3584, layers: int = 28, *, heads: int = 28, kv_heads: int = 4) -> ModelShape:
    """A qwen2; as it stands here about 7B parameters."""
    return read_shape(
        {
            "model_type": "qwen2",
            "hidden_size": width,
            "intermediate_size": width * 37 // 7,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
        },
        where="a test",
    )


SMALL = model(896, 24, heads=14, kv_heads=2)
SEVEN = model()
SEVENTY = model(8192, 80, heads=64, kv_heads=8)


def spec(**more: Any) -> JobSpec:
    """`TREE` with fields of its sections replaced."""
    tree = dict(TREE)
    for name, value in more.items():
        tree[name] = tree[name] | value if isinstance(value, dict) and isinstance(tree.get(name), dict) else value
    return parse_spec(tree)


def work(policy: ModelShape = SEVEN, judge: ModelShape | None = None, **more: Any) -> Workload:
    """A step of that job, with a judge if one is given."""
    judged: dict[str, Any] = {"judges": [JUDGE], "reward": {"judge": "right"}} if judge is not None else {}
    said = spec(**(judged | more))
    shapes = JobShapes(policy, None, {} if judge is None else {"right": judge})
    return make_workload(said, shapes, MeanLengths.guessed(said, policy))


def machines(count: int = 1, accelerators: int = 8, **more: Any) -> ClusterSpec:
    """Nodes of H100, unless told otherwise."""
    node = {"count": count, "accelerators": accelerators, "device": "h100", "host_memory_gib": 2000} | more
    return parse_cluster({"nodes": [node]}, where="a test")
