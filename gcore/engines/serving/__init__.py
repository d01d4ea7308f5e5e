"""HTTP side that all of gcore's own engines share: request bodies, error responses, control routes, the OpenAI API."""
