"""What tests of the server share."""

import pytest
import servers


@pytest.fixture
def proxy(minio):
    """Yield a faulty proxy in front of MinIO with an address of its own. A server keeps nothing of a store at whose address an earlier one did not learn
    the outcome of a write, as after many errors.
    """
    started = servers.Proxy(minio.port)
    yield started
    started.stop()
