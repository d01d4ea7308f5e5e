"""How a model is spread over ranks and updated: DeepSpeed, process groups, variable-length attention."""
