"""Files that a browser keeps, made while they are sent."""

from __future__ import annotations

from collections.abc import Iterator

import flask


def download(name: str, blocks: Iterator[bytes]) -> flask.Response:
    """A CSV file for the browser to keep, sent as it is made."""
    answer = flask.Response(blocks, mimetype="text/csv")
    answer.headers["Content-Disposition"] = f"attachment; filename={name}"
    return answer
