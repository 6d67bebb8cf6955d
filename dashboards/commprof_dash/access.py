"""Who is answered: requests to a name of this machine only, and with a token where others can reach the port.

A page of somebody's in the same browser could otherwise ask for our pages through a name of its own that leads here (DNS
rebinding): its requests carry that name as their Host.
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
    # Dash and Plotly write styles and small scripts into the page; nothing may come from, or go to, elsewhere.
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
    ),
}


@dataclass(frozen=True)
class Access:
    """Which requests are answered.

    Attributes:
        hosts: names and addresses, besides those of the loopback, that a request may name in its Host header.
        token: what a request must know; None where only this machine can reach the port.
    """

    hosts: frozenset[str] = field(default_factory=frozenset)
    token: str | None = None


def guard(server: flask.Flask, access: Access) -> None:
    """Have ``server`` answer the requests that ``access`` allows, and say to browsers what the pages may load."""

    @server.before_request
    def admit() -> Any:
        name = host_name(flask.request.host)
        if name is None or not (name in _LOCAL_NAMES or name in access.hosts):
            return _refusal(
                403,
                f"This dashboard does not answer to the name {flask.request.host[:200]!r}. "
                "Open it by the address that commprof printed.",
            )
        if access.token is None:
            return None
        given = flask.request.args.get(TOKEN_KEY)
        if given is not None and _is(given, access.token):
            # Once, by the address; from then on the browser has it, and it stands in no address that is shared.
            rest = {key: flask.request.args.getlist(key) for key in flask.request.args if key != TOKEN_KEY}
            answer = flask.redirect(link(flask.request.path, **rest))
            answer.set_cookie(COOKIE, access.token, httponly=True, samesite="Strict")
            return answer
        if _is(flask.request.cookies.get(COOKIE, ""), access.token):
            return None
        return _refusal(
            401,
            "This dashboard asks for its token. Open it by the address that commprof printed, with ?token=...",
        )

    @server.after_request
    def tell(answer: flask.Response) -> flask.Response:
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer


def host_name(host: str) -> str | None:
    """The name or address in a Host header, in lower case and without its port; None where it is malformed.

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


def _is(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8"), token.encode("utf-8"))


def _refusal(status: int, text: str) -> flask.Response:
    return flask.Response(text + "\n", status, mimetype="text/plain")
