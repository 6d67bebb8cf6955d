"""``python -m commprof`` is the ``commprof`` command."""

from commprof.cli import main

if __name__ == "__main__":
    main()
