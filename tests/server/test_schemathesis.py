"""Requests drawn from the server's own OpenAPI document: none of them makes it fail."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.live_server import LiveServer

EXAMPLES = 25
"""Of each route; a token takes a few milliseconds on a CPU, and drawn bodies may ask for many."""


def test_no_drawn_request_makes_a_server_error(server: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/tokenize"}
    seen: dict[str, set[int]] = {}
    for operation in operations:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def call(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body["max_tokens"] = 3 if case.body.get("max_tokens") else case.body.get("max_tokens")
            answer = case.call(timeout=300)
            seen.setdefault(case.operation.path, set()).add(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        call()
    assert all(400 in seen[path] for path in ("/v1/completions", "/v1/chat/completions"))
    server.await_idle()
