"""Test which requests the dashboard answers: requests to names of this machine, and requests with the access token."""

from __future__ import annotations

import pytest

from commprof_dash.access import COOKIE, Access, host_name
from commprof_dash.app import create_app


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8050", "localhost"),
        ("LOCALHOST", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:8050", "::1"),
        ("[0:0:0:0:0:0:0:1]", "::1"),
        ("gpu-node_7.example.", "gpu-node_7.example"),
        ("", None),
        ("a b", None),
        ("localhost:x", None),
        ("::1", None),
        ("[nonsense]", None),
        ("localhost@evil.example", None),
    ],
)
def test_the_name_in_a_host_header(host, name):
    assert host_name(host) == name


def asked(client, host, path="/", **more):
    return client.get(path, headers={"Host": host}, **more)


def test_other_names_are_not_answered(tmp_path):
    client = create_app(tmp_path).server.test_client()
    assert asked(client, "localhost:8050").status_code == 200
    assert asked(client, "127.0.0.1").status_code == 200
    for path in ("/", "/_dash-layout", "/_dash-dependencies", "/assets/app.css"):
        refused = asked(client, "attacker.example:8050", path)
        assert refused.status_code == 403 and b"attacker.example" in refused.data
    named = create_app(tmp_path, Access(frozenset({"node7"}))).server.test_client()
    assert asked(named, "node7:8050").status_code == 200
    assert asked(named, "node8:8050").status_code == 403


def test_a_refusal_is_text_and_no_markup(tmp_path):
    client = create_app(tmp_path).server.test_client()
    refused = asked(client, "<script>alert(1)</script>")
    assert refused.status_code in (400, 403)
    assert not refused.mimetype.endswith("html") or b"<script>" not in refused.data


def test_the_token_is_asked_for_and_kept_by_the_browser(tmp_path):
    server = create_app(tmp_path, Access(token="a-long-secret")).server
    client = server.test_client()
    for path in ("/", "/compare", "/_dash-layout"):
        assert asked(client, "localhost", path).status_code == 401
        assert asked(client, "localhost", f"{path}?token=wrong").status_code == 401
    moved = asked(client, "localhost", "/compare?run=a%20b&token=a-long-secret")
    assert moved.status_code == 302 and moved.location.endswith("/compare?run=a%20b")
    cookie = client.get_cookie(COOKIE, domain="localhost")
    assert cookie is not None and cookie.http_only and cookie.same_site == "Strict"
    assert asked(client, "localhost", "/_dash-layout").status_code == 200


def test_browsers_are_told_to_load_nothing_from_elsewhere(tmp_path):
    answer = asked(create_app(tmp_path).server.test_client(), "localhost")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "connect-src 'self'" in policy and "http" not in policy
    assert (
        answer.headers["X-Frame-Options"] == "DENY" and answer.headers["X-Content-Type-Options"] == "nosniff"
    )
