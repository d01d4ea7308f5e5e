"""Foreign agent code that speaks OpenAI's API, and is trained as it is: each response is asked for at an address of its own.

    api        what an agent is called with, and what goes wrong with one
    asked      the body of a request, checked;  words: messages, answers and calls;  written: completions and refusals
    dialogue   messages as one growing sequence of tokens, of which nothing that was generated is tokenized again
    served     one response: its questions, its limits, its time
    endpoint   the HTTP server
    registry   agents by name;  trial: tried before there is a job
    pool       the processes that agents run in, and what becomes of one that hangs, dies or raises

Nothing here asks an engine.
"""
