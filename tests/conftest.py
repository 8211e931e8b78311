"""What tests share: a folder each, the test data if it is at hand, hostile images from the testkit."""

import contextlib
import os
import pathlib
import subprocess
import uuid

import pytest
import servers

ROOT = pathlib.Path(__file__).parent.parent
BUCKET = servers.BUCKET

# Every fault now and then: about one request in seven meets one.
FAULTS = "seed=1&lose=20&reset=20&throttle=20&toomany=10&fail=20&truncate=20&late=20&late_ms=30&stale=20"


def pytest_addoption(parser):
    parser.addoption(
        "--store", choices=["local", "buffered", "direct", "s3", "proxy", "versity", "azure"], default="local", help="what datasets lie on"
    )


def pytest_collection_modifyitems(config, items):
    """Where datasets lie elsewhere, only tests that take `root` as it comes are run."""
    if config.getoption("--store") == "local":
        return
    chosen = [item for item in items if "root" in getattr(item, "fixturenames", ()) and item.get_closest_marker("local") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def minio(tmp_path_factory):
    """A real MinIO, with a bucket, and the standard variables set to it."""
    yield from running(servers.Minio(tmp_path_factory.mktemp("minio")))


def running(server):
    """A server, with the environment set to it, until the session ends."""
    with environment(**server.environment):
        yield server
    server.stop()


@pytest.fixture(scope="session")
def other_store(request, tmp_path_factory):
    """The server that --store names, beside MinIO."""
    kind = {"versity": servers.VersityGateway, "azure": servers.Azurite}[request.config.getoption("--store")]
    yield from running(kind(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="session")
def proxy(minio):
    """The faulty proxy before MinIO, without faults; a test sets what it wants, and sees to it that it takes them back."""
    started = servers.Proxy(minio.port)
    yield started
    started.stop()


@contextlib.contextmanager
def environment(**variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def spent(ds, work):
    """What `work` cost: counters that changed."""
    before = ds.stats()
    work()
    return {name: value - before[name] for name, value in ds.stats().items() if value != before[name]}


def newest(ds, samples):
    """Move to the newest snapshot, which has at least so many samples: a store that answers with an old listing gives an old one."""
    for _ in range(20):
        if len(ds.refresh()) >= samples:
            break
    return ds


@pytest.fixture
def bucket(minio):
    """A prefix of its own on MinIO, for a dataset that does not exist yet."""
    return minio.place(f"{uuid.uuid4().hex}/dataset")


@pytest.fixture
def root(tmp_path, request, monkeypatch):
    """A place for a dataset that does not exist yet: a local path, or with --store another one."""
    store = request.config.getoption("--store")
    if store in ("versity", "azure"):
        return request.getfixturevalue("other_store").place(f"{uuid.uuid4().hex}/dataset")
    if store in ("s3", "proxy"):
        place = request.getfixturevalue("bucket")
        if store == "proxy":
            started = request.getfixturevalue("proxy")
            started.faults(FAULTS)
            monkeypatch.setenv("AWS_ENDPOINT_URL", started.endpoint)
        return place
    if store != "local":
        import penstock.dataset

        plain = penstock.dataset.open
        monkeypatch.setattr("penstock.open", lambda *given, io=store, **more: plain(*given, io=io, **more))
    return tmp_path / "dataset"


@pytest.fixture(scope="session")
def data():
    """The folder of real test data; tests that need it are marked `data` and deselected when it is unset."""
    return pathlib.Path(os.environ["PENSTOCK_TEST_DATA"])


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A folder of hostile images that the testkit makes."""
    folder = tmp_path_factory.mktemp("hostile")
    command = ["cargo", "run", "--release", "--quiet", "--locked", "-p", "penstock-testkit", "--bin", "make-hostile", "--", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")})
    return folder
