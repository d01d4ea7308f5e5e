"""Inference engines: servers of the engine protocol (SGLang's native HTTP routes).

`torch` serves any Hugging Face model, `hf` does so with `generate` of transformers, `vllm` drives vLLM's engine core,
`sglang` adapts an SGLang server, `emulated` simulates compute. `serving` has the shared HTTP routes. Read `request` and `serving.io_struct` first.
"""
