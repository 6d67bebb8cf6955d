"""Test requests that no page makes. The status must be correct, and the server must not print a traceback."""

import json
import random
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from commprof_dash.app import create_app
from support.runs import SyntheticRun

UPDATE = "/_dash-update-component"
FILES = "/_dash-component-suites"
VALUES = [
    None,
    0,
    -1,
    1e308,
    True,
    "",
    "x",
    "\x00\x1b",
    [],
    {},
    [[]],
    {"id": {}},
    {"id": "x", "property": "y"},
    "💥" * 99,
]


@pytest.fixture
def client(tmp_path):
    run = SyntheticRun(world_size=2)
    run.add_step(0, begin_ns=0, end_ns=1_000)
    run.write(tmp_path / "a-run")
    return create_app(tmp_path).server.test_client()


def send(client, body):
    return client.post(UPDATE, data=body, content_type="application/json", headers={"Host": "localhost"})


@pytest.mark.sampled
@pytest.mark.parametrize(
    "body",
    ["{}", "[]", "null", "3", '"x"', "{", "", "\xff\xfe", "NaN", '{"output": 3}', '{"output": null}', "[" * 100_000,
     '{"output": "nope.x", "inputs": [], "changedPropIds": []}', '"' + "a" * (17 * 2**20) + '"'],
    ids=lambda body: body[:12],
)  # fmt: skip
def test_a_malformed_update_is_a_bad_request(client, caplog, body):
    answer = send(client, body)
    assert answer.status_code == 400 and b"<" not in answer.data
    assert not any(record.exc_info for record in caplog.records)


def test_an_update_that_is_not_json_is_a_bad_request(client):
    assert client.post(UPDATE, data="x=1", headers={"Host": "localhost"}).status_code == 400


def test_a_real_request_with_any_part_of_it_changed_never_fails_the_server(client, caplog):
    chance = random.Random(20)
    callbacks = json.loads(client.get("/_dash-dependencies", headers={"Host": "localhost"}).data)
    seen = set()
    for _ in range(300):
        callback = chance.choice(callbacks)
        body = {
            "output": callback["output"],
            "outputs": chance.choice([[], {}, {"id": "heading", "property": "children"}]),
            "inputs": [{**each, "value": chance.choice(VALUES)} for each in callback["inputs"]],
            "state": [{**each, "value": chance.choice(VALUES)} for each in callback["state"]],
            "changedPropIds": chance.choice([[], ["x"], ["tick.n_intervals"]]),
        }
        if chance.random() < 0.7:
            body[chance.choice(list(body))] = chance.choice(VALUES)
        if chance.random() < 0.3:
            body.pop(chance.choice(list(body)))
        seen.add(send(client, json.dumps(body)).status_code)
    assert seen <= {200, 204, 400} and 400 in seen
    assert not any("Exception on" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/dash/../x.js", "/dash/nope.js", "/nope/x.js", "/dash/%00",
     "/dash/..%2f..%2fx", "/dash_mantine_components/", "/\\..\\x"],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_not_found(client, caplog, path):
    answer = client.get(FILES + path, headers={"Host": "localhost"})
    assert answer.status_code == 404 and b"root:" not in answer.data
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("path", "method"), [(UPDATE, "GET"), (UPDATE, "DELETE"), ("/", "POST"), (f"{FILES}/dash/x.js", "PUT")]
)
def test_a_method_that_nothing_has_is_not_allowed(client, path, method):
    assert client.open(path, method=method, headers={"Host": "localhost"}).status_code == 405


def test_the_server_answers_the_same_and_says_no_traceback(tmp_path):
    words = [sys.executable, "-m", "commprof", "dashboard", str(tmp_path), "--port", "0"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while "http://" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        address = said.partition("http://")[2].split()[0]

        def status(path, body=None):
            headers = {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"http://{address}{path}", body, headers)
            try:
                return urllib.request.urlopen(asked, timeout=30).status
            except urllib.error.HTTPError as error:
                return error.code

        found = [
            status(UPDATE, b"{}"), status(UPDATE, b"[[["), status(UPDATE), status(f"{FILES}/%2e%2e/x"), status("/"),
        ]  # fmt: skip
    finally:
        server.terminate()
        said += server.communicate(timeout=30)[1]
    assert found == [400, 400, 405, 404, 200]
    assert "Traceback" not in said and "Exception" not in said, said
