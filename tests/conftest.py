"""Shared fixtures: a place for each test's dataset, servers, the faulty proxy, hostile images, and real test data if available."""

import argparse
import gc
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

# Every kind of fault, affecting about one request in seven.
FAULTS = os.environ.get("PS_FAULTS", "seed=1&lose=20&reset=20&throttle=20&toomany=10&fail=20&truncate=20&late=20&late_ms=30&stale=20")


STORES = ["azure", "buffered", "cached", "direct", "proxy", "s3", "served", "versity"]


def pytest_addoption(parser):
    help = f"where datasets are stored: `local`, or one or more of {', '.join(STORES)}, separated by commas"
    parser.addoption("--store", type=_stores, default="local", help=help)


def _stores(names):
    chosen = [] if names == "local" else names.split(",")
    if set(chosen) - set(STORES):
        raise argparse.ArgumentTypeError(f"{names} is neither `local` nor one or more of {', '.join(STORES)}")
    return chosen


def pytest_generate_tests(metafunc):
    stores = metafunc.config.getoption("--store")
    if stores and "root" in metafunc.fixturenames:
        metafunc.parametrize("store", stores, indirect=True, scope="session")


def pytest_collection_modifyitems(config, items):
    """If --store is not `local`, run only tests that use `root` and are not marked `local`, each of them on some of the stores.

    Tests in `every_store` run on `s3` and on two more stores, others on a single one. PENSTOCK_ROTATION, which tools/test.sh prints, chooses
    them. If it is `all`, each test runs on all stores. If it is given and a number, a third of the tests that are marked `long` run.
    """
    given = os.environ.get("PENSTOCK_ROTATION", "all")
    rotation = os.environ.get("PENSTOCK_ROTATION", "0")

    def runs_here(item):
        if given != "all" and item.get_closest_marker("long") and (zlib.crc32(item.nodeid.encode()) + int(given)) % 3:
            return False
        if not config.getoption("--store"):
            return True
        if "root" not in getattr(item, "fixturenames", ()) or item.get_closest_marker("local"):
            return False
        store = item.callspec.params["store"]
        name = item.originalname + item.callspec.id.removeprefix(store)  # The same for all stores.
        if rotation == "all" or ("every_store" in item.path.parts and store == "s3"):
            return True
        first = zlib.crc32(name.encode()) + int(rotation)
        places = (0, 3) if "every_store" in item.path.parts else (0,)
        return store in [STORES[(first + place) % len(STORES)] for place in places]

    chosen, others = [], []
    for item in items:
        (chosen if runs_here(item) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def pytest_collection_finish():
    """Hide all that the imports made from the garbage collector, because tests collect garbage often and each pass would go through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(scope="session")
def store(request):
    """Return the kind of store that datasets lie on: `local` or one of STORES."""
    return getattr(request, "param", "local")


@pytest.fixture(scope="session")
def minio(tmp_path_factory):
    """Yield a real MinIO server with a bucket. The standard environment variables point to this server."""
    yield from servers.running(servers.Minio(tmp_path_factory.mktemp("minio")))


@pytest.fixture(scope="session")
def other_store(store, tmp_path_factory):
    """Yield the server of the current store: Penstock's own, Versity's gateway or Azurite."""
    kind = {"served": servers.Penstock, "versity": servers.VersityGateway, "azure": servers.Azurite}[store]
    yield from servers.running(kind(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="session")
def proxy(minio):
    """Yield the faulty proxy in front of MinIO, with no faults set. A test that sets faults must clear them afterwards."""
    started = servers.Proxy(minio.port)
    yield started
    started.stop()


@pytest.fixture
def bucket(minio):
    """Return an unused MinIO prefix for a new dataset."""
    return minio.place(f"{uuid.uuid4().hex}/dataset")


@pytest.fixture
def root(tmp_path, request, store, monkeypatch):
    """Return an unused place for a new dataset: a local path, or a place on one of the stores named by --store."""
    if store in ("served", "versity", "azure"):
        return request.getfixturevalue("other_store").place(f"{uuid.uuid4().hex}/dataset")
    if store in ("s3", "proxy"):
        place = request.getfixturevalue("bucket")
        if store == "proxy":
            started = request.getfixturevalue("proxy")
            # A process may see a stale listing of what another one wrote.
            started.faults(FAULTS.replace("&stale=20", "") if request.node.get_closest_marker("processes") else FAULTS)
            monkeypatch.setenv("AWS_ENDPOINT_URL", started.endpoint)
        return place
    if store != "local":
        import penstock.dataset

        plain = penstock.dataset.open
        if store == "cached":
            # Small enough that pages are evicted all the time.
            cache = f"{tmp_path / 'cache'}:3MB"
            monkeypatch.setattr("penstock.open", lambda *given, cache=cache, **more: plain(*given, cache=cache, **more))
        else:
            monkeypatch.setattr("penstock.open", lambda *given, io=store, **more: plain(*given, io=io, **more))
    return tmp_path / "dataset"


@pytest.fixture
def separate_files():
    """Store all data in data files, however small a commit is."""
    import penstock as ps

    ps.configure(inline_bytes=0)
    yield
    ps.configure(inline_bytes=2048)


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
