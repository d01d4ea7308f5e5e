"""`python -m gcore.engines.torch`: the torch engine, under its supervisor or started by hand."""

from gcore.engines.launch import run_engine


def run() -> None:
    """Serve until stopped, and end the process."""
    run_engine("gcore.engines.torch", "gcore.engines.torch.server")


if __name__ == "__main__":
    run()
