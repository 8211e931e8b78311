"""What operators use: the configuration file, `--check`, the systemd unit, the image, alerts and the board."""

import base64
import concurrent.futures
import configparser
import json
import os
import pathlib
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import botocore.exceptions
import pytest
import servers
import trustme
import yaml
from waiting import until

DEPLOY = pathlib.Path(__file__).parent.parent.parent / "deploy"


@pytest.fixture
def files(tmp_path):
    """Return a folder with a served folder and keys."""
    (tmp_path / "cold" / "penstock").mkdir(parents=True)
    servers.write_secret(tmp_path / "keys.json", json.dumps({"keys": [{"access_key": servers.KEY, "secret_key": servers.SECRET}]}))
    return tmp_path


def serve(*arguments):
    command = [sys.executable, "-m", "penstock", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def said(found):
    """Return what a run printed, without line breaks and frames."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", found.stderr).split())


def test_options_come_from_a_file_and_the_command_line_wins(files):
    config = files / "serve.toml"
    config.write_text(
        f'cold = "{files / "cold"}"\nkeys = "{files / "keys.json"}"\nlisten = "127.0.0.1:1"\nidle_seconds = 5\n'
        f'cache = ["{files / "cache"}:10MB"]\n[option]\nregion = "eu-north-1"\n'
    )
    assert serve("--config", config, "--check").stdout == "the options are valid\n"
    assert sorted(path.name for path in files.iterdir()) == ["cold", "keys.json", "serve.toml"], "a check creates nothing"

    class Configured(servers.Penstock):
        def command(self):
            return [sys.executable, "-m", "penstock", "serve", "--config", str(config), "--listen", f"127.0.0.1:{self.port}"], {}

        def make_bucket(self):
            pass

    (files / "run").mkdir()
    server = Configured(files / "run")
    try:
        server.put("penstock", "a", b"x")
        assert server.get("penstock", "a") == b"x" and (files / "cold" / "penstock" / "a").read_bytes() == b"x"
        assert (files / "cache").is_dir()
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory_byte = 1", "unknown key `memory_byte`; did you mean `memory-bytes`?"),
        ("zzz = 1", "unknown key `zzz`; known are"),
        ("config = 'x'", "unknown key `config`"),
        ("idle-seconds = 5\nidle_seconds = 6", "contains `idle-seconds` twice"),
        ("[tls]\nkey = 'x'", "unknown key `tls`; did you mean"),
        ("[keys]\na = 'x'", "must be a non-empty string"),
        ("status = ''", "`status` in"),
        ("status = []", "must be a non-empty string"),
        ("listen = 9100", "must be a non-empty string"),
        ("drain-seconds = true", "must be a number"),
        ("memory-bytes = '1GB'", "must be a number"),
        ("anonymous = ''", "must be true or false"),
        ("write-back = ['x', 1]", "must be a non-empty string"),
        ("domain = ['x', 1]", "or a list of them"),
        ("domain = false", "or a list of them"),
        ("option = 'x'", "is not a table"),
        ("[option]\nregion = ['a']", "`region` under [option]"),
        ("connections = 9223372036854775807", "--connections"),
        ("lame-duck = inf", "--lame-duck"),
        ("idle-seconds = inf", "--idle-seconds"),
        ("memory-bytes = -1", "--memory-bytes"),
        (f"requests = {'9' * 5000}", "cannot read"),
        (f"requests = {'[' * 5000}", "cannot read"),
        ("idle-seconds = 'soon'", "must be a number"),
        ("idle-seconds =", "cannot read"),
        ("tls-key = 'x'", "--tls-certificate and --tls-key together"),
        ("anonymous = true", "either --keys FILE or --anonymous"),
        ("listen = 'nowhere'", "cannot listen at `nowhere`"),
        ("revalidate = 'sometimes'", "--revalidate cannot be `sometimes`"),
        ("cold = 'gs://bucket'", "serve s3://bucket"),
        ("cold = 's3://bucket/folder'", "it names a folder in a bucket"),
        ("cold = '/nowhere/at/all'", "create it first"),
        ("keys = '/nowhere/keys.json'", "cannot use the keys in"),
        ("memory-bytes = 1", "--memory-bytes 67108864"),
        ("cache = 'x'", "cache"),
        ("write-back = '/nowhere'", "cannot write back through"),
        ("domain = ['http://x']", "is not a domain"),
        ("quotas = ['bucket=1GB']", "unknown key `quotas`; did you mean `quota`?"),
        ("quota = ['bucket']", "cannot use quota `bucket`: it has no size"),
        ("quota = ['bucket=1XB']", "`1XB` is not a size above 0"),
        ("quota = ['B=1GB']", "`B` is not the name of a bucket"),
        ("quota = ['bucket=1GB', 'bucket/=2GB']", "`bucket` has two sizes"),
        ("cold = 's3://one'\nquota = ['two/a=1GB']", "only the bucket `one` is served"),
        ("status-token = '/nowhere'", "--status-token requires --status"),
        ("status-tls = true", "--status-tls requires --status"),
        ("status = '127.0.0.1:0'\nstatus-tls = true", "--status-tls requires --tls-certificate"),
        ("status = '127.0.0.1:0'\nstatus-token = '/nowhere'", "cannot use the token in"),
        ("immutable = ['bucket/a']", "--immutable has no effect without --cache"),
    ],
)
def test_wrong_configurations_are_refused_by_name(files, text, says):
    config = files / "serve.toml"
    cold = "" if text.startswith("cold") else f'cold = "{files / "cold"}"\n'
    keys = "" if text.startswith(("keys", "[keys")) else f'keys = "{files / "keys.json"}"\n'
    config.write_text(cold + keys + text + "\n")
    found = serve("--config", config, "--check")
    assert found.returncode in (1, 2) and " ".join(says.split()) in said(found), said(found)
    assert found.stdout == ""


def test_the_example_of_a_configuration_is_valid(files):
    text = (DEPLOY / "serve.toml").read_text()
    text = text.replace("/etc/penstock", str(files)).replace("/nvme1", str(files / "nvme1"))
    text = re.sub(r"tls-.*\n", "", text)
    (files / "serve.toml").write_text(text)
    found = serve("--config", files / "serve.toml", "--check")
    assert found.stdout == "the options are valid\n", found.stderr


def test_the_unit_for_systemd_starts_what_exists(tmp_path):
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "penstock-serve.service")
    for key in ("ExecStart", "ExecStartPre"):
        words = shlex.split(unit["Service"][key])
        assert words[1] == "serve" and pathlib.Path(words[0]).name == "penstock"
        # Each option exists.
        assert all(word in serve("--help").stdout for word in words if word.startswith("--"))
    if systemd := shutil.which("systemd-analyze"):
        # It looks for the program.
        text = (DEPLOY / "penstock-serve.service").read_text().replace("/usr/local/bin/penstock", "/bin/true")
        (tmp_path / "penstock-serve.service").write_text(text)
        found = subprocess.run([systemd, "verify", tmp_path / "penstock-serve.service"], capture_output=True, text=True, timeout=300)
        assert "penstock-serve.service" not in found.stderr, found.stderr


def test_the_recipe_of_the_image_is_sound():
    lines = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if line and not line.startswith("#")]
    steps = [line.split(maxsplit=1) for line in lines]
    found = {name: rest for name, rest in steps}
    assert steps[0][0] == "FROM" and re.search(r":[\w.-]+$", found["FROM"]) and not found["FROM"].endswith(":latest")
    assert found["USER"].isdecimal() and found["USER"] != "0", "it runs as nobody's administrator"
    assert json.loads(found["ENTRYPOINT"]) == ["penstock", "serve"] and json.loads(found["CMD"])[0] in serve("--help").stdout
    assert found["COPY"].split()[0] == "dist/*.whl" and "dist" in (DEPLOY.parent / "tools" / "wheel.sh").read_text()


def status_of(url, token="", kind="Bearer", method="GET", context=None):
    """Return the status and the body of an answer."""
    headers = {"Authorization": f"{kind} {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=300, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_status_needs_its_token_and_purges(tmp_path, minio):
    folder, port, token = tmp_path / "served", servers.free_port(), "a-long-token"
    folder.mkdir()
    servers.write_secret(tmp_path / "token", token + "\n")
    options = ("--cache", f"{folder / 'cache'}:50MB", "--status", f"127.0.0.1:{port}", "--status-token", str(tmp_path / "token"))
    server = servers.Penstock(folder, "s3://", *options, "--revalidate", "never", environment=minio.environment)
    url = f"http://127.0.0.1:{port}"
    try:
        assert status_of(f"{url}/health") == (200, "ok\n")
        basic = base64.b64encode(f"me:{token}".encode()).decode()
        for path in ("/", "/metrics", "/status.json", "/nowhere"):
            assert [status_of(url + path, *given)[0] for given in ((), ("a-long-tokem",), ("a-long-token-",), ("x", "Basic"))] == [401] * 4
            assert status_of(url + path, token)[0] == status_of(url + path, basic, "Basic")[0] == (404 if path == "/nowhere" else 200)
        bodies = {f"{name}/{n}": os.urandom(40_000) for name in ("purge", "purge-not", "püre e", "x/purge") for n in range(3)}
        for key, body in bodies.items():
            minio.client().put_object(Bucket="penstock", Key=key, Body=body)
            assert server.get("penstock", key) == body
            minio.client().put_object(Bucket="penstock", Key=key, Body=b"new")
            assert server.get("penstock", key) == body
        purge = f"{url}/purge?prefix="
        assert [status_of(purge + "penstock/purge/", *given)[0] for given in (("", "", "POST"), (token,))] == [401, 405]
        assert [status_of(f"{url}/purge{query}", token, method="POST")[0] for query in ("", "?prefix=penstock")] == [400, 400]
        freed = [
            status_of(purge + prefix, token, method="POST") for prefix in ("penstock/purge/", "penstock/p%C3%BCre%20", "penstock/purge/")
        ]
        assert [code for code, _ in freed] == [200] * 3
        sizes = [json.loads(text)["freed_bytes"] for _, text in freed]
        assert sizes[0] >= 120_000 and sizes[1] >= 120_000 and sizes[2] == 0
        for key, body in bodies.items():
            expected = body if key.startswith(("purge-not", "x/")) else b"new"
            # What memory knew of them is forgotten, too.
            assert server.client().head_object(Bucket="penstock", Key=key)["ContentLength"] == len(expected), key
            assert server.get("penstock", key) == expected, key
    finally:
        server.stop()


def test_what_is_read_during_a_purge_is_not_known_after_it(tmp_path, minio):
    folder, port, token, keys = tmp_path / "served", servers.free_port(), "a-long-token", [f"during-a-purge/{n}" for n in range(200)]
    folder.mkdir()
    servers.write_secret(tmp_path / "token", token)
    options = ("--cache", f"{folder / 'cache'}:50MB", "--status", f"127.0.0.1:{port}", "--status-token", str(tmp_path / "token"))
    options += ("--revalidate", "never", "--anonymous", "--lame-duck", "0")
    server = servers.Penstock(folder, "s3://", *options, environment=minio.environment)
    client, ended = minio.client(), threading.Event()

    def read(key, method="GET"):
        request = urllib.request.Request(f"{server.endpoint}/penstock/{key}", method=method)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read() if method == "GET" else int(answer.headers["Content-Length"])

    def read_until_ended(number):
        while not ended.is_set():
            for key in keys[number::6]:
                read(key, "HEAD")

    try:
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            for body in (b"old" * 4000, b"newer" * 4000):
                puts = [threads.submit(client.put_object, Bucket="penstock", Key=key, Body=body) for key in keys]
                assert all(put.result() for put in puts)
                assert [read(key) for key in keys for _ in range(2)] == [b"old" * 4000] * 400
            readers = [threads.submit(read_until_ended, number) for number in range(6)]
            purged = status_of(f"http://127.0.0.1:{port}/purge?prefix=penstock/during-a-purge/", token, method="POST")
            ended.set()
            assert purged[0] == 200 and [reader.result() for reader in readers] == [None] * 6
        assert [key for key in keys if read(key, "HEAD") != 20_000 or read(key) != b"newer" * 4000] == []
    finally:
        ended.set()
        server.stop()


def test_denials_are_in_the_access_log(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    server = servers.Penstock(folder, "", "--access-log", str(tmp_path / "log"))
    try:
        for key, secret in (("nobody", "some-secret"), (servers.KEY, "a-wrong-secret")):
            with pytest.raises(botocore.exceptions.ClientError):
                server.client(key=key, secret=secret).get_object(Bucket="penstock", Key="a")
        with pytest.raises(botocore.exceptions.ClientError):
            server.get("penstock", "missing")
        assert status_of(f"{server.endpoint}/penstock/a")[0] == 403
        lines = lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]  # noqa: E731
        until(lambda: len(lines()) == 5, "all requests are in the log")
    finally:
        server.stop()
    found = [(line["key"], line["status"], line.get("error")) for line in lines()[1:]]
    assert found == [
        ("nobody", 403, "InvalidAccessKeyId"), (servers.KEY, 403, "SignatureDoesNotMatch"), (servers.KEY, 404, "NoSuchKey"), ("", 403, "AccessDenied")
    ]  # fmt: skip


def test_the_board_and_the_alerts_name_counts_that_exist(tmp_path, minio):
    folder = tmp_path / "served"
    folder.mkdir()
    port = servers.free_port()
    options = ["--cache", f"{folder / 'cache'}:50MB", "--status", f"127.0.0.1:{port}", "--write-back", f"{folder / 'pending'}:1MB"]
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "chain.pem")
    servers.write_secret(tmp_path / "key.pem", issued.private_key_pem.bytes().decode())
    options += ["--tls-certificate", str(tmp_path / "chain.pem"), "--tls-key", str(tmp_path / "key.pem"), "--quota", "penstock=1GB"]
    server = servers.Penstock(folder, "s3://", *options, environment=minio.environment)
    try:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        assert status_of(f"https://127.0.0.1:{server.port}/penstock", context=trusted)[0] == 403
        counts = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300).read().decode()
    finally:
        server.stop()
    known = {re.split(r"[{ ]", line)[0] for line in counts.splitlines() if not line.startswith("#")}
    board = json.loads((DEPLOY / "grafana.json").read_text())
    named = {name for panel in board["panels"] for target in panel["targets"] for name in re.findall(r"penstock_\w+", target["expr"])}
    assert len(board["panels"]) == 12 and len(named) > 18
    rules = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    assert all(rule["alert"] and rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "ticket") for rule in rules)
    named |= {name for rule in rules for name in re.findall(r"penstock_\w+", rule["expr"])}
    assert named <= known, named - known
