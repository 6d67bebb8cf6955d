"""The command line: one module per verb."""


def main() -> None:
    """Run the ``commprof`` command."""
    raise SystemExit(2)
