"""``commprof dashboard``: serves the runs below a directory to a browser on this machine."""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.runs import finalise_first
from commprof.errors import CommprofError, TraceError, UsageError

HELP_ORDER = 180

LOOPBACK = "127.0.0.1"
_THREADS = 8
_SHORTEST_TOKEN = 8


def dashboard(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]", help="A directory of runs, one run, or 'latest'.", show_default="traces"
        ),
    ] = Path("traces"),
    port: Annotated[
        int, typer.Option("--port", help="The TCP port. The value 0 selects a free port.")
    ] = 8050,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="The address to listen on. An address other than 127.0.0.1 requires an access token.",
        ),
    ] = LOOPBACK,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TEXT",
            help="The access token. Default: a generated token if --host is not a loopback address.",
        ),
    ] = None,
) -> int:
    """Serve the dashboard of runs to a browser. Press Ctrl-C to stop."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: a TCP port was expected, 0 to 65535")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file; a directory of runs was expected")
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise UsageError(
            f"--token: {_SHORTEST_TOKEN} characters or more were expected, {len(token)} were given"
        )
    from commprof.trace.directory import LATEST, find_runs, resolve

    if str(directory) == LATEST:
        directory = resolve(directory)
    runs = find_runs(directory)
    with needed("dash", "for the dashboard"):
        import waitress

        from commprof_dash.access import Access
        from commprof_dash.app import create_app

        for run in runs:
            with contextlib.suppress(TraceError):  # the page lists the run with the reason
                finalise_first(run)
        # Listen before the application is created, because its access rules need the actual address.
        listening = _listen(host, port)
        address, actual_port = listening.getsockname()[:2]
        if token is None and not ipaddress.ip_address(address).is_loopback:
            token = secrets.token_urlsafe(24)
        app = create_app(directory, Access(_names(host, address), token))
    if not runs:
        say(
            f"there is no run in {directory} yet. Make one with: commprof run train.py; the page will show it"
        )
    shown = f"[{address}]" if ":" in address else address
    plural = "run" if len(runs) == 1 else "runs"
    if ipaddress.ip_address(address).is_unspecified:
        shown = socket.gethostname()
    asked = f"/?token={token}" if token is not None else ""
    say(f"{len(runs)} {plural} of {directory} at http://{shown}:{actual_port}{asked}  (Ctrl-C stops it)")
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, _leave)
    waitress.serve(app.server, sockets=[listening], threads=_THREADS, _quiet=True)
    return 0


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Exit this process immediately. The process that computes answers exits when its pipe closes.

    A thread may be in the middle of a query. A normal exit of the interpreter would unwind that thread through a library's
    C++, which aborts. So this calls the cleanup functions itself and then skips the interpreter's exit.
    """
    atexit._run_exitfuncs()
    os._exit(0)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host``:``port``.

    Raises:
        CommprofError: the port is in use, this user may not use it, or the address is not one of this machine.
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


def _names(host: str, address: str) -> frozenset[str]:
    """Return the host names that a browser may use for the dashboard.

    These are ``host`` and the listening address. For a wildcard address, all names and addresses of this machine
    are included.
    """
    names = {host.lower(), address}
    if ipaddress.ip_address(address).is_unspecified:
        own = socket.gethostname()
        names |= {own.lower(), socket.getfqdn().lower()}
        with contextlib.suppress(OSError):
            names |= {str(entry[4][0]) for entry in socket.getaddrinfo(own, None)}
    return frozenset(names)


def _other(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
