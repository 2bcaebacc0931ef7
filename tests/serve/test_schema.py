"""The served description, and a tool that attacks a server with it."""

import subprocess
import sys

import pytest

from dcut_jax.serve import schema
from dcut_jax.serve.openapi import document

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection"
)
# All of JSON Schema that `check` knows.
KEYWORDS = {
    *("type", "description", "properties", "required", "additionalProperties"),
    *("items", "anyOf", "enum", "minimum", "maximum", "exclusiveMinimum"),
    *("minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
    "x-unsupported",
}


def schemas(value):
    """A schema and all within it."""
    yield value
    inner = [*value.get("anyOf", ()), *value.get("properties", {}).values()]
    inner += [value[k] for k in ("items", "additionalProperties") if value.get(k)]
    for one in inner:
        yield from schemas(one)


@pytest.mark.parametrize("request_", [schema.CHAT, schema.COMPLETION])
def test_what_is_described_is_checked(request_):
    for one in schemas(request_):
        assert set(one) <= KEYWORDS, one


@pytest.mark.parametrize(
    ("value", "fits"),
    [(1, True), (1.0, True), (True, False), (None, True), (0, False), ("1", False)],
)
def test_a_number_of_texts(value, fits):
    body = {"model": "a", "prompt": "b", "n": value}
    if fits:
        schema.check(body, schema.COMPLETION)
    else:
        with pytest.raises(schema.BadField) as caught:
            schema.check(body, schema.COMPLETION)
        assert caught.value.param == "n"


def test_the_name_that_is_served_is_in_the_document():
    paths = document("mine", keys=True)["paths"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]
    request = body["application/json"]["schema"]
    assert request["properties"]["model"]["enum"] == ["mine"]


def test_whatever_wants_a_key_says_so():
    paths = document("mine", keys=True)["paths"]
    guarded = {
        path for path, of in paths.items() for o in of.values() if "security" in o
    }
    assert guarded == {path for path in paths if path.startswith("/v1/")}
    assert "security" not in str(document("mine", keys=False)["paths"])


@pytest.mark.slow
def test_schemathesis_finds_no_fault(start):
    live = start()
    command = [sys.executable, "-m", "schemathesis.cli", "run"]
    command += [f"{live.url}/openapi.json", "--checks", CHECKS, "--seed", "5"]
    command += ["--max-examples", "30", "--phases", "examples,coverage,fuzzing"]
    command += ["--request-timeout", "60", "--exclude-path", "/"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    live.settle()
    assert live.scheduler.failure is None
