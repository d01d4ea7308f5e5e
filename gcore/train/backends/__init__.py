"""How a model is spread over ranks and updated: DeepSpeed, FSDP2, process groups, variable-length attention."""
