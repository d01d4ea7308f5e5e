"""Multi-turn production: what an environment is, and what it and its tools are run by.

    api           the interface: reset, step, close; what is shown, what ends
    transcript    turns and observations as one response, token by token
    episode       an environment and its response, driven by whoever has an engine
    tooled        gcore's own environment: a model that calls tools;  calls: how a call is written
    calculator    gcore's own tool
    registry      environments and tools by name;  trial: tried before there is a job
    pool          the processes that tools run in, and what becomes of one that hangs or dies

Nothing here asks an engine.
"""
