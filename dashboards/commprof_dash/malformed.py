"""Answers malformed requests with their status and one line of text, never with a traceback."""

from __future__ import annotations

import logging
import traceback
from typing import Any, Final

import flask
from dash.exceptions import DependencyException
from werkzeug.exceptions import HTTPException

_LOG: Final = logging.getLogger(__name__)
_UPDATE: Final = "/_dash-update-component"
_ANY_PAGE: Final = "/<path:path>"
# The largest size of a request in bytes; the requests of the dashboard's pages have a few kB.
_LARGEST: Final = 16 * 2**20


def refuse_malformed(server: flask.Flask) -> None:
    """Make ``server`` answer 400 to an update that cannot be carried out, and 404 to an unknown file."""
    server.config["MAX_CONTENT_LENGTH"] = _LARGEST

    @server.before_request
    def not_a_page() -> flask.Response | None:
        # Dash answers every address that has no other handler with the shell of the pages.
        rule = flask.request.url_rule
        if rule is None or rule.rule != _ANY_PAGE or not flask.request.path.startswith("/_dash-"):
            return None
        if flask.request.path == _UPDATE:
            return _text(405, "An update must be requested by POST.", Allow="POST")
        return _text(404, "There is no such file.")

    @server.errorhandler(DependencyException)
    def no_such_file(error: DependencyException) -> flask.Response:
        return _text(404, "There is no such file.")

    @server.errorhandler(Exception)
    def no_such_update(error: Exception) -> Any:
        if flask.request.path != _UPDATE or (isinstance(error, HTTPException) and error.code == 405):
            if isinstance(error, HTTPException):
                return error
            raise error
        place = traceback.extract_tb(error.__traceback__)[-1]
        # The body comes from an unknown sender, so the answer does not repeat it.
        _LOG.warning("an update was refused: %s at %s:%s", type(error).__name__, place.filename, place.lineno)
        return _text(400, "No page of this dashboard requests this update.")


def _text(status: int, text: str, **headers: str) -> flask.Response:
    return flask.Response(text + "\n", status, headers, mimetype="text/plain")
