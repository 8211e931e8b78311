"""Shared fixtures: a place for each test's dataset, servers, the faulty proxy, hostile images, and real test data if available."""

import contextlib
import os
import pathlib
import signal
import subprocess
import uuid
import zlib

import pytest
import servers

# A shell without job control starts background jobs with SIGINT ignored, but tests send this signal to themselves and to children.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).parent.parent
BUCKET = servers.BUCKET

# Every kind of fault, affecting about one request in seven.
FAULTS = "seed=1&lose=20&reset=20&throttle=20&toomany=10&fail=20&truncate=20&late=20&late_ms=30&stale=20"


STORES = {"local", "buffered", "direct", "s3", "proxy", "versity", "azure"}


def pytest_addoption(parser):
    parser.addoption(
        "--store",
        choices=sorted(STORES),
        default="local",
        help="where datasets are stored",
    )


def pytest_collection_modifyitems(config, items):
    """If --store is not `local`, run only tests that use `root` and are not marked `local`: all tests in `every_store` and some others.

    Each test outside `every_store` runs on a single non-local store, chosen by PENSTOCK_ROTATION (which tools/test.sh prints).
    """
    store = config.getoption("--store")
    if store == "local":
        return
    rotation = os.environ.get("PENSTOCK_ROTATION", "0")
    others = sorted(STORES - {"local"})

    def runs_here(item):
        if "root" not in getattr(item, "fixturenames", ()) or item.get_closest_marker("local"):
            return False
        everywhere = rotation == "all" or "every_store" in item.path.parts
        return everywhere or others[(zlib.crc32(item.name.encode()) + int(rotation)) % len(others)] == store

    chosen = [item for item in items if runs_here(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def minio(tmp_path_factory):
    """Yield a real MinIO server with a bucket. The standard environment variables point to this server."""
    yield from running(servers.Minio(tmp_path_factory.mktemp("minio")))


def running(server):
    """Set the environment variables that point to a server, yield the server, and stop it when the session ends."""
    with environment(**server.environment):
        yield server
    server.stop()


@pytest.fixture(scope="session")
def other_store(request, tmp_path_factory):
    """Yield the server that --store names: Versity's gateway or Azurite."""
    kind = {"versity": servers.VersityGateway, "azure": servers.Azurite}[request.config.getoption("--store")]
    yield from running(kind(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="session")
def proxy(minio):
    """Yield the faulty proxy in front of MinIO, with no faults set. A test that sets faults must clear them afterwards."""
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
    """Run `work` and return the change in each counter, omitting unchanged counters."""
    before = ds.stats()
    work()
    return {name: value - before[name] for name, value in ds.stats().items() if value != before[name]}


def newest(ds, samples):
    """Refresh until the dataset has at least `samples` samples, because a stale listing may yield an old snapshot."""
    for _ in range(20):
        if len(ds.refresh()) >= samples:
            break
    return ds


@pytest.fixture
def bucket(minio):
    """Return an unused MinIO prefix for a new dataset."""
    return minio.place(f"{uuid.uuid4().hex}/dataset")


@pytest.fixture
def root(tmp_path, request, monkeypatch):
    """Return an unused place for a new dataset: a local path, or a place on the store named by --store."""
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


@pytest.fixture
def empty_cache():
    """Evict the blocks of earlier tests from this process's block cache. A full cache keeps a new block only if that block is reused."""
    import penstock as ps

    before = ps.configure()["memory_bytes"]
    ps.configure(memory_bytes=16 << 20)
    ps.configure(memory_bytes=before)


@pytest.fixture(scope="session")
def data():
    """Return the folder of real test data. Tests that need this data are marked `data` and deselected if PENSTOCK_TEST_DATA is unset."""
    return pathlib.Path(os.environ["PENSTOCK_TEST_DATA"])


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """Return a folder of hostile images made by the testkit."""
    folder = tmp_path_factory.mktemp("hostile")
    subprocess.run([servers.cargo_binary("make-hostile"), str(folder)], check=True)
    return folder
