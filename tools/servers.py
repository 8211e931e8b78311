"""Servers that tests and benchmarks start on loopback: MinIO, the testkit's faulty proxy, Versity's gateway and Azurite."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
from waiting import until

ROOT = pathlib.Path(__file__).parent.parent
KEY, SECRET = "penstock-test", "penstock-test-secret"
BUCKET = "penstock"


def write_secret(path: pathlib.Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(text)


def free_port() -> int:
    """Return a port that no test on this machine had for an hour. `penstock serve` remembers a cold store by its address. A new store at the address of
    one that failed would not be believed for a while."""
    folder, hour = pathlib.Path(tempfile.gettempdir()), int(time.time() / 3600)
    now, before = (folder / f"penstock-test-ports-{os.getuid()}-{hour - age}" for age in (0, 1))
    for other in folder.glob(f"penstock-test-ports-{os.getuid()}-*"):
        if other not in (now, before):
            shutil.rmtree(other, ignore_errors=True)
    now.mkdir(exist_ok=True)
    while True:
        port = random.randrange(10_000, 32_000)  # Below those that the system gives out.
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if not (before / str(port)).exists():
                (now / str(port)).touch(exist_ok=False)
                return port


def cargo_binary(name: str) -> pathlib.Path:
    """Return the path of a testkit binary. Build it first, unless PENSTOCK_BUILT shows that tools/test.sh has built all binaries."""
    if "PENSTOCK_BUILT" not in os.environ:
        command = ["cargo", "build", "--release", "--quiet", "--locked", "--workspace", "--bin", name]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")})
    return ROOT / "target" / "release" / name


class Server:
    """A server with its own folder and port. `stop` ends only the process that this object started."""

    # Environment variables that let clients open datasets on this server without storage options.
    environment: dict[str, str]
    # The URI of the bucket.
    root: str

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.port = folder, free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.log = (folder / "log").open("wb")
        command, environment = self.command()
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=self.log, stderr=self.log)
        self.wait()
        self.make_bucket()

    def command(self) -> tuple[list[str], dict[str, str]]:
        raise NotImplementedError

    def make_bucket(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        def accepts() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"{type(self).__name__} exited: {(self.folder / 'log').read_text()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
            return False

        until(accepts, f"{type(self).__name__} accepts connections")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def place(self, name: str) -> BucketPath:
        return BucketPath.of(self, f"{self.root}/{name}")


def tool(name: str) -> str:
    path = ROOT / ".tools" / name
    if not path.exists():
        raise RuntimeError(f"{path} is missing: run tools/servers.sh")
    return str(path)


class S3Server(Server):
    """A server with an S3 API. Tests access its objects with boto3."""

    root = f"s3://{BUCKET}"

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1"
        }  # fmt: skip

    def client(self, endpoint: str | None = None, key: str = KEY, secret: str = SECRET):
        return boto3.client(
            "s3", endpoint_url=endpoint or self.endpoint, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1",
            config=botocore.config.Config(signature_version="s3v4"),  # Otherwise, signed URLs have version 2.
        )  # fmt: skip

    def make_bucket(self) -> None:
        self.client().create_bucket(Bucket=BUCKET)

    def names(self, bucket: str, prefix: str) -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def has(self, bucket: str, key: str) -> bool:
        try:
            self.client().head_object(Bucket=bucket, Key=key)
        except botocore.exceptions.ClientError:
            return False
        return True

    def get(self, bucket: str, key: str) -> bytes:
        return self.client().get_object(Bucket=bucket, Key=key)["Body"].read()

    def put(self, bucket: str, key: str, body: bytes) -> None:
        self.client().put_object(Bucket=bucket, Key=key, Body=body)

    def remove(self, bucket: str, key: str) -> None:
        self.client().delete_object(Bucket=bucket, Key=key)


class Minio(S3Server):
    """MinIO."""

    def command(self) -> tuple[list[str], dict[str, str]]:
        environment = {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET, "HOME": str(self.folder)}
        environment |= {"MINIO_BROWSER": "off", "MINIO_UPDATE": "off", "MINIO_CI_CD": "1"}
        return [tool("bin/minio"), "server", "--quiet", "--address", f"127.0.0.1:{self.port}", str(self.folder / "data")], environment

    def wait(self) -> None:
        super().wait()

        def is_live() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.endpoint}/minio/health/live", timeout=1):
                return True
            return False

        until(is_live, "MinIO is live")

    def stop(self) -> None:
        # SIGTERM would wait 20 seconds for connections that clients keep open.
        self.process.kill()
        super().stop()


class VersityGateway(S3Server):
    """Versity's S3 gateway, which stores objects in a folder."""

    def command(self) -> tuple[list[str], dict[str, str]]:
        (self.folder / "data").mkdir()
        command = [tool("bin/versitygw"), "--quiet", "--port", f"127.0.0.1:{self.port}", "posix", str(self.folder / "data")]
        return command, {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}


class Penstock(S3Server):
    """Penstock's own server, before a folder or before another server."""

    def __init__(self, folder: pathlib.Path, cold: str = "", *options: str, environment: dict[str, str] | None = None) -> None:
        self.cold, self.options, self.cold_environment = cold, options, environment or {}
        # A command that starts the server.
        self.runner: list[str] = []
        super().__init__(folder)

    def command(self) -> tuple[list[str], dict[str, str]]:
        keys = self.folder / "keys.json"
        if not keys.exists():
            write_secret(keys, json.dumps({"keys": [{"access_key": KEY, "secret_key": SECRET}]}))
        (self.folder / "data").mkdir(exist_ok=True)
        cold = self.cold or str(self.folder / "data")
        command = [*self.runner, sys.executable, "-m", "penstock", "serve", "--cold", cold, "--listen", f"127.0.0.1:{self.port}"]
        return [*command, *(["--keys", str(keys)] if "--anonymous" not in self.options else []), *self.options], self.cold_environment

    def make_bucket(self) -> None:
        if "--anonymous" not in self.options and not self.cold:
            super().make_bucket()

    def restart(self, waits: bool = True) -> None:
        """Start the server again at the same port, after it was stopped or killed."""
        command, environment = self.command()
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=self.log, stderr=self.log)
        if waits:
            self.wait()


class Azurite(Server):
    """Azurite, Microsoft's Azure Blob Storage emulator. Tests access its objects with Microsoft's client."""

    root = f"az://{BUCKET}"
    # Public credentials: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
    ACCOUNT = "devstoreaccount1"
    ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.environment = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": self.endpoint}

    def command(self) -> tuple[list[str], dict[str, str]]:
        command = [tool("azurite/node_modules/.bin/azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        return [*command, "--location", str(self.folder), "--silent", "--skipApiVersionCheck", "--disableTelemetry"], {}

    def client(self):
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient(f"{self.endpoint}/{self.ACCOUNT}", credential=self.ACCOUNT_KEY)

    def make_bucket(self) -> None:
        self.client().create_container(BUCKET)

    def names(self, bucket: str, prefix: str) -> list[str]:
        return list(self.client().get_container_client(bucket).list_blob_names(name_starts_with=prefix))

    def has(self, bucket: str, key: str) -> bool:
        return self.client().get_blob_client(bucket, key).exists()

    def get(self, bucket: str, key: str) -> bytes:
        return self.client().get_blob_client(bucket, key).download_blob().readall()

    def put(self, bucket: str, key: str, body: bytes) -> None:
        self.client().get_blob_client(bucket, key).upload_blob(body, overwrite=True)

    def remove(self, bucket: str, key: str) -> None:
        if self.has(bucket, key):
            self.client().get_blob_client(bucket, key).delete_blob()


class BucketPath(str):
    """A URI in a bucket, with the `pathlib.Path` methods that tests use on datasets."""

    server: Any

    @classmethod
    def of(cls, server: Any, uri: str) -> BucketPath:
        path = cls(uri)
        path.server = server
        return path

    @property
    def _bucket_and_key(self) -> tuple[str, str]:
        bucket, _, key = self.partition("://")[2].partition("/")
        return bucket, key

    def __truediv__(self, name: str) -> BucketPath:
        return self.of(self.server, f"{self}/{name}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        return self.of(self.server, self.rpartition("/")[0])

    def with_name(self, name: str) -> BucketPath:
        return self.parent / name

    def rglob(self, pattern: str) -> list[BucketPath]:
        bucket, key = self._bucket_and_key
        scheme = self.partition("://")[0]
        paths = [self.of(self.server, f"{scheme}://{bucket}/{name}") for name in self.server.names(bucket, f"{key}/")]
        return [path for path in paths if fnmatch.fnmatch(path.name, pattern)]

    def glob(self, pattern: str) -> list[BucketPath]:
        return [path for path in self.rglob("*") if fnmatch.fnmatch(path.removeprefix(f"{self}/"), pattern)]

    def exists(self) -> bool:
        return self.is_file() or bool(self.rglob("*"))

    def is_file(self) -> bool:
        return self.server.has(*self._bucket_and_key)

    def read_bytes(self) -> bytes:
        return self.server.get(*self._bucket_and_key)

    def write_bytes(self, body: bytes) -> None:
        self.server.put(*self._bucket_and_key, bytes(body))

    def unlink(self) -> None:
        self.server.remove(*self._bucket_and_key)

    def stat(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(st_size=len(self.read_bytes()))


def left_empty(place: pathlib.Path | BucketPath) -> bool:
    """Return whether a failed import left no samples. In a bucket, where objects cannot be renamed, an empty dataset may remain."""
    import penstock as ps

    return not place.exists() or (isinstance(place, BucketPath) and len(ps.open(place)) == 0)


class Proxy:
    """The faulty proxy in front of a server."""

    def __init__(self, upstream_port: int, faults: str = "") -> None:
        command = [str(cargo_binary("faulty-proxy")), f"127.0.0.1:{free_port()}", f"127.0.0.1:{upstream_port}", faults]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = f"http://{self.process.stdout.readline().strip()}"

    def faults(self, query: str = "") -> None:
        """Set the faults and reset the counts."""
        urllib.request.urlopen(f"{self.endpoint}/-/faults?{query}", timeout=300).close()

    def counts(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.endpoint}/-/counts", timeout=300) as answer:
            return json.load(answer)

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(300)


@contextlib.contextmanager
def environment(**variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def running(server):
    """Set the environment variables that point to a server, yield the server, and stop it when the session ends."""
    with environment(**server.environment):
        yield server
    server.stop()
