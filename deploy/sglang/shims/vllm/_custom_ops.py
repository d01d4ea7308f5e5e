"""The only name that SGLang imports from here on a machine without CUDA."""


def rotary_embedding(*arguments: object) -> None:
    """Never called: SGLang uses its own PyTorch implementation on the CPU."""
    raise NotImplementedError("vLLM's rotary_embedding is not part of this environment; use SGLang's own")
