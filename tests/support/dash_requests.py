"""Requests the pages of the dashboard from its server as a browser does, without a browser."""

from __future__ import annotations

import dash


def page_of(app: dash.Dash, path: str, search: str, scheme: str = "light") -> str:
    """Return the JSON that the server sends for an address, for the color ``scheme`` that a browser reports."""
    key = next(key for key in app.callback_map if "heading.children" in key)
    spec = app.callback_map[key]
    values = {"address.pathname": path, "address.search": search, "scheme.data": scheme}
    request = {
        "output": key,
        "outputs": [
            {"id": name, "property": kind}
            for name, kind in (part.rsplit(".", 1) for part in key.strip(".").split("..."))
        ],
        "inputs": [one | {"value": values.get(f"{one['id']}.{one['property']}")} for one in spec["inputs"]],
        "state": [[] for _ in spec["state"]],
        "changedPropIds": ["address.pathname"],
    }
    answer = app.server.test_client().post("/_dash-update-component", json=request)
    text: str = answer.get_data(as_text=True)
    assert answer.status_code == 200, text[:2000]
    return text
