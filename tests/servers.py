"""Servers that tests start themselves: MinIO, and the testkit's faulty proxy before it. Loopback only; ended by process id."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import pathlib
import shutil
import socket
import subprocess
import time
import types
import urllib.request

import boto3
import botocore.exceptions

ROOT = pathlib.Path(__file__).parent.parent
KEY, SECRET = "penstock-test", "penstock-test-secret"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cargo_binary(name: str) -> pathlib.Path:
    """Build a binary of the testkit."""
    command = ["cargo", "build", "--release", "--quiet", "--locked", "-p", "penstock-testkit", "--bin", name]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")})
    return ROOT / "target" / "release" / name


class Minio:
    """A MinIO server on a folder of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        binary = ROOT / ".tools" / "bin" / "minio"
        if not binary.exists():
            raise RuntimeError(f"{binary} is missing: run tools/minio.sh")
        self.folder, self.port = folder, free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        environment = {**os.environ, "MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET, "HOME": str(folder)}
        environment |= {"MINIO_BROWSER": "off", "MINIO_UPDATE": "off", "MINIO_CI_CD": "1"}
        command = [str(binary), "server", "--quiet", "--address", f"127.0.0.1:{self.port}", str(folder / "data")]
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)
        self._wait()

    def _wait(self) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"MinIO ended: {(self.folder / 'log').read_text()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.endpoint}/minio/health/live", timeout=1):
                return
            time.sleep(0.05)
        raise RuntimeError("MinIO does not answer")

    def client(self, endpoint: str | None = None, key: str = KEY, secret: str = SECRET):
        return boto3.client(
            "s3", endpoint_url=endpoint or self.endpoint, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1"
        )

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class BucketPath(str):
    """A place in a bucket with the few methods of a Path that tests use on datasets."""

    server: Minio

    @classmethod
    def of(cls, server: Minio, uri: str) -> BucketPath:
        path = cls(uri)
        path.server = server
        return path

    @property
    def _bucket_and_key(self) -> tuple[str, str]:
        bucket, _, key = self.removeprefix("s3://").partition("/")
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
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{key}/")
        paths = [self.of(self.server, f"s3://{bucket}/{entry['Key']}") for page in pages for entry in page.get("Contents", ())]
        return [path for path in paths if fnmatch.fnmatch(path.name, pattern)]

    def glob(self, pattern: str) -> list[BucketPath]:
        return [path for path in self.rglob("*") if fnmatch.fnmatch(path.removeprefix(f"{self}/"), pattern)]

    def exists(self) -> bool:
        return self.is_file() or bool(self.rglob("*"))

    def is_file(self) -> bool:
        bucket, key = self._bucket_and_key
        try:
            self.server.client().head_object(Bucket=bucket, Key=key)
        except botocore.exceptions.ClientError:
            return False
        return True

    def read_bytes(self) -> bytes:
        bucket, key = self._bucket_and_key
        return self.server.client().get_object(Bucket=bucket, Key=key)["Body"].read()

    def write_bytes(self, body: bytes) -> None:
        bucket, key = self._bucket_and_key
        self.server.client().put_object(Bucket=bucket, Key=key, Body=bytes(body))

    def unlink(self) -> None:
        bucket, key = self._bucket_and_key
        self.server.client().delete_object(Bucket=bucket, Key=key)

    def stat(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(st_size=len(self.read_bytes()))


def left_empty(place: pathlib.Path | BucketPath) -> bool:
    """Whether a failed import left nothing: no folder on disk; in a bucket, where nothing can be moved aside, a dataset without samples."""
    import penstock as ps

    return not place.exists() or (isinstance(place, BucketPath) and len(ps.open(place)) == 0)


class Proxy:
    """The faulty proxy before a server."""

    def __init__(self, upstream_port: int, faults: str = "") -> None:
        command = [str(cargo_binary("faulty-proxy")), "127.0.0.1:0", f"127.0.0.1:{upstream_port}", faults]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = f"http://{self.process.stdout.readline().strip()}"

    def faults(self, query: str = "") -> None:
        """Set the faults; counts begin anew."""
        urllib.request.urlopen(f"{self.endpoint}/-/faults?{query}", timeout=10).close()

    def counts(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.endpoint}/-/counts", timeout=10) as answer:
            return json.load(answer)

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)
