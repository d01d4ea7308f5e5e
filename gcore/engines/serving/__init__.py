"""HTTP side of engines: request bodies, refusals, control and weight routes, the OpenAI API."""
