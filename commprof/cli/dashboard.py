"""``commprof dashboard``: serve the runs below a directory to a browser on this machine."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path
from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.errors import CommprofError, UsageError

_THREADS = 8


def dashboard(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]", help="A directory of runs, one run, or 'latest'.", show_default="traces"
        ),
    ] = Path("traces"),
    port: Annotated[int, typer.Option("--port", help="TCP port; 0 takes a free one.")] = 8050,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. Anything but 127.0.0.1 shows the runs to others."),
    ] = "127.0.0.1",
) -> int:
    """Look at runs in a browser. Stop it with Ctrl-C."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: a TCP port was expected, 0 to 65535")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file; a directory of runs was expected")
    from commprof.trace.directory import LATEST, find_runs, resolve

    if str(directory) == LATEST:
        directory = resolve(directory)
    runs = find_runs(directory)
    with needed("dash", "for the dashboard"):
        import waitress

        from commprof_dash.app import create_app

        listening = _listen(host, port)
        app = create_app(directory)
    address, actual_port = listening.getsockname()[:2]
    if not runs:
        say(
            f"there is no run in {directory} yet. Make one with: commprof run train.py; the page will show it"
        )
    shown = f"[{address}]" if ":" in address else address
    plural = "run" if len(runs) == 1 else "runs"
    say(f"{len(runs)} {plural} of {directory} at http://{shown}:{actual_port}  (Ctrl-C ends it)")
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        waitress.serve(app.server, sockets=[listening], threads=_THREADS, _quiet=True)
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at ``host``:``port``.

    Raises:
        CommprofError: the port is taken, or is not for this user, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise UsageError(
            f"--host {host}: this is no address of this machine; 127.0.0.1 was expected"
        ) from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise CommprofError(
                f"port {port} of {host} is in use, perhaps by another dashboard. Choose another one: --port {_other(port)}"
            ) from None
        if error.errno == errno.EACCES:
            raise CommprofError(
                f"no permission to listen on port {port}; choose one above 1023: --port 8050"
            ) from None
        raise CommprofError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --host"
        ) from None
    return listening


def _other(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
