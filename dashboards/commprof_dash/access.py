"""Restricts access to the dashboard: checks the Host header and, if others can reach the port, an access token.

The Host header must name this machine. Otherwise, a foreign page in the same browser could read the pages of the
dashboard through its own host name, if this name resolves to this machine (DNS rebinding). Such requests carry
the foreign name in their Host header.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import flask

from commprof_dash.address import link

TOKEN_KEY: Final = "token"
COOKIE: Final = "commprof_token"
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS: Final[Mapping[str, str]] = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Dash and Plotly write styles and small scripts into the page; all other sources and targets are forbidden.
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
    ),
}


@dataclass(frozen=True)
class Access:
    """The conditions that a request must meet to be answered.

    Attributes:
        hosts: The names and addresses that a Host header may contain, in addition to those of the loopback
            interface.
        token: The access token that requests must contain; None if only this machine can reach the port.
    """

    hosts: frozenset[str] = field(default_factory=frozenset)
    token: str | None = None


def guard(server: flask.Flask, access: Access) -> None:
    """Make ``server`` answer only the requests that ``access`` allows, and send the content security policy."""

    @server.before_request
    def admit() -> Any:
        name = host_name(flask.request.host)
        if name is None or not (name in _LOCAL_NAMES or name in access.hosts):
            return _refusal(
                403,
                f"This dashboard does not accept the host name {flask.request.host[:200]!r}. "
                "Open the address that commprof printed.",
            )
        if access.token is None:
            return None
        offered = flask.request.args.get(TOKEN_KEY)
        if offered is not None and _is(offered, access.token):
            # Only the first address contains the token. Later requests send a cookie, so that shared
            # addresses do not reveal the token.
            rest = {key: flask.request.args.getlist(key) for key in flask.request.args if key != TOKEN_KEY}
            answer = flask.redirect(link(flask.request.path, **rest))
            answer.set_cookie(COOKIE, access.token, httponly=True, samesite="Strict")
            return answer
        if _is(flask.request.cookies.get(COOKIE, ""), access.token):
            return None
        return _refusal(
            401,
            "This dashboard needs its access token. Open it by the address that commprof printed, with ?token=...",
        )

    @server.after_request
    def tell(answer: flask.Response) -> flask.Response:
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer


def host_name(host: str) -> str | None:
    """Return the name or address in a Host header, in lower case and without its port; None if it is malformed.

    >>> host_name("localhost:8050"), host_name("[::1]:80"), host_name("a b"), host_name("::1")
    ('localhost', '::1', None, None)
    """
    name, rest = (
        host[1:].split("]", 1)
        if host.startswith("[") and "]" in host
        else (host.partition(":")[0], host.partition(":")[2])
    )
    port = rest.removeprefix(":")
    if port and not port.isdecimal():
        return None
    if host.startswith("["):
        try:
            return str(ipaddress.ip_address(name))
        except ValueError:
            return None
    name = name.lower().rstrip(".")
    return (
        name
        if name and all(part.replace("-", "").replace("_", "").isalnum() for part in name.split("."))
        else None
    )


def _is(offered: str, token: str) -> bool:
    return hmac.compare_digest(offered.encode("utf-8"), token.encode("utf-8"))


def _refusal(status: int, text: str) -> flask.Response:
    return flask.Response(text + "\n", status, mimetype="text/plain")
