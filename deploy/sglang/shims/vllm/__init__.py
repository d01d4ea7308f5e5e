"""Empty stand-in: SGLang's CPU path imports one operator of vLLM at start and never calls it."""
