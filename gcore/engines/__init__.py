"""Inference engines: servers of the engine contract (SGLang's native HTTP routes).

`torch` serves any Hugging Face model, `sglang` adapts an SGLang server, `emulated` simulates compute. `serving` has the HTTP routes they share.
Read `request` and `serving.io_struct` first.
"""
