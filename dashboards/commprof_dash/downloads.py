"""Sends files that a browser downloads, and generates them while they are sent."""

from __future__ import annotations

from collections.abc import Iterator

import flask


def download(name: str, blocks: Iterator[bytes]) -> flask.Response:
    """Return a response that downloads a CSV file, which is generated while it is sent."""
    answer = flask.Response(blocks, mimetype="text/csv")
    answer.headers["Content-Disposition"] = f"attachment; filename={name}"
    return answer
