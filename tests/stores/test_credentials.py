"""Credentials and addresses as the users of each cloud have them: options, variables, connection strings, profiles, emulators."""

import http.server
import os
import pickle
import re
import subprocess
import threading

import penstock as ps
import pytest
import servers

ACCOUNT, KEY = servers.Azurite.ACCOUNT, servers.Azurite.ACCOUNT_KEY


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    yield from servers.running(servers.Azurite(tmp_path_factory.mktemp("azurite")))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Remove every variable of a cloud, and every profile."""
    for name in list(os.environ):
        if name.startswith(("AZURE_", "AZURITE_", "AWS_", "GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def works(uri, **options):
    ds = ps.create(uri, {"n": "int32"}, storage_options=options)
    ds.append({"n": [1, 2]})
    assert ps.open(uri, storage_options=options)["n"][:].tolist() == [1, 2]
    return ds


def test_azure_by_connection_string_options_and_variables(azurite, bare):
    endpoint = f"{azurite.endpoint}/{ACCOUNT}"
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
    ds = works(f"{azurite.root}/option", connection_string=text)
    assert KEY.encode() not in pickle.dumps(ds) and b"connection_string" not in pickle.dumps(ds)
    ds = works(f"{azurite.root}/names", account_name=ACCOUNT, account_key=KEY, endpoint=endpoint)
    assert KEY.encode() not in pickle.dumps(ds) and ACCOUNT.encode() in pickle.dumps(ds)
    with pytest.raises(ps.PermissionDeniedError):
        pickle.loads(pickle.dumps(ds))
    bare.setenv("AZURE_STORAGE_KEY", KEY)
    assert len(pickle.loads(pickle.dumps(ds))) == 2, "the other process has the key in its environment"
    bare.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    works(f"{azurite.root}/cli-variables", endpoint_url=endpoint)
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT"):
        bare.delenv(name)
    bare.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    works(f"{azurite.root}/variable")
    bare.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=other;AccountKey=b3RoZXI=")
    works(f"{azurite.root}/options-count-most", account_name=ACCOUNT, account_key=KEY, endpoint=endpoint)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({}, "credentials-missing", "no storage account is named"),
        ({"account_name": "a"}, "credentials-missing", "no credentials were found"),
        ({"connection_string": "AccountName"}, "invalid-argument", "a part without `=`"),
        ({"connection_string": "AccountName=a;Secret=hidden"}, "invalid-argument", "unknown key `Secret`"),
        ({"connection_string": "DefaultEndpointsProtocol=ftp;AccountName=a;AccountKey=YQ=="}, "invalid-argument", "neither http nor https"),
        ({"account_name": "a", "account_key": "not base64!"}, "invalid-argument", "check storage_options"),
        ({"service_account_path": "x"}, "invalid-argument", "is not one of Azure"),
        ({"nonsense": "x"}, "invalid-argument", "there is no such option"),
    ],
    ids=str,
)
def test_azure_says_what_is_missing(bare, options, code, text):
    with pytest.raises(ps.Error) as caught:
        ps.open("az://container/set", storage_options=options)
    error = caught.value
    assert error.code == code and text in str(error) and "hidden" not in str(error)
    if code == "credentials-missing":
        assert "AZURE_STORAGE_CONNECTION_STRING" in error.hint


def test_azure_names_wrong_keys_and_containers(azurite, bare):
    known = {"account_name": ACCOUNT, "endpoint": f"{azurite.endpoint}/{ACCOUNT}"}
    with pytest.raises(ps.PermissionDeniedError) as caught:
        ps.open(f"{azurite.root}/set", storage_options={**known, "account_key": "b3RoZXI="})
    # Azure itself answers AuthenticationFailed, which is credentials-refused.
    assert caught.value.code in ("credentials-refused", "permission-denied") and "credentials" in caught.value.hint
    with pytest.raises(ps.NotFoundError) as caught:
        ps.create("az://no-such-container/set", {"n": "int8"}, storage_options={**known, "account_key": KEY})
    assert caught.value.code == "bucket-not-found" and "container" in caught.value.hint


class Recorder(http.server.BaseHTTPRequestHandler):
    """Answers every request with 404, and notes it."""

    seen: list = []

    def do_GET(self):
        self.seen.append((self.path, dict(self.headers)))
        body = b"<Error><Code>NoSuchBucket</Code></Error>"
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def recorder():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    Recorder.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_google_uses_the_emulator_and_no_credentials(recorder, bare):
    for host in (recorder, f"http://{recorder}/"):
        bare.setenv("STORAGE_EMULATOR_HOST", host)
        with pytest.raises(ps.NotFoundError) as caught:
            ps.open("gs://bucket/set")
        assert caught.value.code == "bucket-not-found" and Recorder.seen
        assert all("bucket" in path and "authorization" not in {name.lower() for name in headers} for path, headers in Recorder.seen)
    bare.delenv("STORAGE_EMULATOR_HOST")
    Recorder.seen.clear()
    with pytest.raises(ps.NotFoundError):
        ps.open("gs://bucket/set", storage_options={"endpoint_url": f"http://{recorder}", "bearer_token": "tok"})
    assert {headers["authorization"] for _, headers in Recorder.seen} == {"Bearer tok"}


def test_google_says_what_is_missing(bare, tmp_path):
    with pytest.raises(ps.PermissionDeniedError) as caught:
        ps.open("gs://bucket/set")
    assert caught.value.code == "credentials-missing" and "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint
    bare.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(ps.Error, match=r"none\.json"):
        ps.open("gs://bucket/set")
    with pytest.raises(ps.InvalidInputError, match="is not one of Google"):
        ps.open("gs://bucket/set", storage_options={"account_name": "a"})
    with pytest.raises(ps.InvalidInputError, match="is not one of S3"):
        ps.open("s3://bucket/set", storage_options={"account_name": "a"})


def test_an_aws_profile_names_services_and_what_it_cannot_do(recorder, bare, tmp_path):
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text("[dev]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    (folder / "config").write_text(
        "[profile dev]\nservices = here\nendpoint_url = http://127.0.0.1:1\n"
        f"[services here]\ndynamodb =\n  endpoint_url = http://127.0.0.1:1\ns3 =\n  endpoint_url = http://{recorder}\n"
        "[profile made]\ncredential_process = /bin/keys\n[profile sso]\nsso_session = corp\n[profile role]\nrole_arn = arn:aws:iam::1:role/x\n"
    )
    for options in ({"profile": "dev"}, {}):
        bare.setenv("AWS_PROFILE", "dev")
        with pytest.raises(ps.NotFoundError) as caught:
            ps.open("s3://bucket/set", storage_options=options)
        assert caught.value.code == "bucket-not-found" and Recorder.seen
    for name, setting in (("made", "credential_process"), ("sso", "sso_session"), ("role", "role_arn")):
        bare.setenv("AWS_PROFILE", name)
        for options in ({"profile": name}, {}):
            with pytest.raises(ps.PermissionDeniedError, match=f"gets its keys through `{setting}`") as caught:
                ps.open("s3://bucket/set", storage_options=options)
            assert f"export-credentials --profile {name}" in caught.value.hint


@pytest.mark.parametrize("uri", ["s3", "az", "gs"])
def test_a_host_that_never_answered_is_given_up_soon(bare, uri):
    """It is tried for 2.5 seconds, in which waits allow about 8 attempts. In the deadline of 60 seconds, there would be over 20."""
    options = {
        "s3": {"access_key_id": "a", "secret_access_key": "b"},
        "az": {"account_name": "a", "account_key": "YQ=="},
        "gs": {"bearer_token": "t"},
    }[uri]
    with pytest.raises(ps.UnavailableError) as caught:
        ps.open(f"{uri}://bucket/set", storage_options={"endpoint_url": "http://127.0.0.1:9", **options})
    assert caught.value.code == "storage-unreachable" and "127.0.0.1:9" in str(caught.value)
    assert 2 <= int(re.search(r"\((\d+) attempts in", str(caught.value))[1]) <= 14


@pytest.mark.long
def test_imports_and_the_command_line_take_options_of_stores(azurite, bare, tmp_path):
    """`penstock --option name=value VERB` works for each verb."""
    import sys

    (tmp_path / "rows.csv").write_text("n\n1\n2\n")
    options = {"connection_string": f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={azurite.endpoint}/{ACCOUNT};"}
    place = f"{azurite.root}/imported"
    assert ps.importers.import_data(tmp_path / "rows.csv", place, storage_options=options).samples == 2
    flags = ["--option", f"connection_string={options['connection_string']}"]

    def run(*verb):
        return subprocess.run([sys.executable, "-m", "penstock", *verb], capture_output=True, text=True)

    assert "imported 2 samples" in run(*flags, "import", str(tmp_path / "rows.csv"), place, "--mode", "append").stdout
    for verb in ("info", "head", "log", "stats", "verify"):
        done = run(*flags, verb, place, "--json")
        assert done.returncode == 0, done.stderr
    assert run("info", place).returncode == 1
    assert "expected name=value" in run("--option", "endpoint", "info", place).stderr
