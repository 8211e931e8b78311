"""Long tests of `penstock serve`: mixed load with faults and flat memory, flipped bits in thousands of places, and other programs as clients."""

import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import pytest
import servers

MIB = 1 << 20
ROOT = pathlib.Path(__file__).parent.parent.parent
TOOLS, RIVALS = ROOT / ".tools", ROOT / ".tools" / "rivals"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


def resident_bytes(pid):
    fields = pathlib.Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.soak
def test_memory_is_flat_under_mixed_load_with_faults(folder, minio, proxy):
    """Twenty minutes of reads, writes, faults of the cold store, and clients that vanish. The last third uses no more memory than the second."""
    minutes = float(os.environ.get("PENSTOCK_SOAK_MINUTES", "20"))
    proxy.faults("seed=3&reset=5&throttle=5&fail=5&truncate=5&late=5&late_ms=20")
    environment = {**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
    server = servers.Penstock(
        folder, "s3://", "--cache", f"{folder / 'cache'}:100MB", "--memory-bytes", str(256 * MIB), environment=environment
    )
    ends = time.monotonic() + minutes * 60
    failures, samples = [], []

    def load(name, *options):
        command = [sys.executable, "-m", "penstock", "-o", f"endpoint_url={server.endpoint}", "load", f"s3://penstock/{name}", "--json"]
        while time.monotonic() < ends:
            done = subprocess.run([*command, *options, "--seconds", "20", "--verify"], capture_output=True, text=True)
            if done.returncode or any("other bytes" in line for line in done.stderr.splitlines()):
                failures.append(done.stderr[-500:])

    def vanish():
        client = server.client()
        client.put_object(Bucket="penstock", Key="vanish", Body=bytes(8 * MIB))
        while time.monotonic() < ends:
            try:
                stream = client.get_object(Bucket="penstock", Key="vanish")["Body"]
                stream.read(100_000)
                stream.close()
            except Exception:
                time.sleep(0.1)  # A fault of the cold store.

    threads = [
        threading.Thread(target=load, args=("small", "--size", "50KB", "--objects", "200", "--puts", "0.2", "--workers", "4")),
        threading.Thread(target=load, args=("large", "--size", "3MiB", "--objects", "60", "--puts", "0.05", "--workers", "2")),
        threading.Thread(target=vanish),
    ]
    for thread in threads:
        thread.start()
    while time.monotonic() < ends:
        time.sleep(5)  # Memory is measured for as long as the load runs.
        samples.append(resident_bytes(server.process.pid))
    for thread in threads:
        thread.join()
    try:
        third = len(samples) // 3
        second, last = max(samples[third : 2 * third]), max(samples[2 * third :])
        print(
            f"{minutes:g} minutes: at most {second / 1e6:.0f} MB in the second third, {last / 1e6:.0f} MB in the last; failures: {failures}"
        )
        assert last <= 1.02 * second
        assert not failures
        assert server.process.poll() is None
    finally:
        proxy.faults()
        server.stop()


@pytest.mark.soak
def test_ten_thousand_flipped_bits_give_no_wrong_byte(folder, minio):
    bodies = {f"flip/{number}": random.Random(number).randbytes(200_000 * (number + 1)) for number in range(8)}
    for key, body in bodies.items():
        minio.client().put_object(Bucket="penstock", Key=key, Body=body)
    server = servers.Penstock(
        folder, "s3://", "--cache", f"{folder / 'cache'}:50MB", "--revalidate", "never", environment=minio.environment
    )
    choose, flips, started = random.Random(9), 0, 1
    try:
        client = server.client()
        while flips < 10_000:
            files = [path for path in (folder / "cache").rglob("*") if path.is_file() and path.stat().st_size]
            for path in files:
                with path.open("r+b") as file:
                    # Small files are changed once for each start, so that the marker's few bytes are not changed beyond recognition.
                    for _ in range(10 if path.stat().st_size > 4096 else started):
                        at = choose.randrange(path.stat().st_size)
                        file.seek(at)
                        byte = file.read(1)[0]
                        file.seek(at)
                        file.write(bytes([byte ^ (1 << choose.randrange(8))]))
                        flips += 1
            for key, body in bodies.items():
                first = choose.randrange(len(body))
                got = client.get_object(Bucket="penstock", Key=key, Range=f"bytes={first}-")
                assert got["Body"].read() == body[first:], (key, first)
            started = 0
            if choose.random() < 0.2:
                server.process.kill()
                server.process.wait()
                server.restart()
                started = 1
    finally:
        server.stop()
    print(f"{flips} flipped bits")


def run(*command, timeout=300, **variables):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env={**os.environ, **variables}, timeout=timeout)
    if done.returncode != 0:
        pytest.fail(f"{command[:6]} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


@pytest.mark.soak
def test_other_programs_work_unchanged(folder, minio, tmp_path):
    """awscli, rclone, s3fs and minio-py, which `tools/servers.sh clients` installs, and s3torchconnector and obstore where the benchmarks' rivals are."""
    server = servers.Penstock(folder, "s3://", "--cache", f"{folder / 'cache'}:200MB", environment=minio.environment)
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    for name, size in (("a.bin", 1000), ("inner/b.bin", 12 * MIB), ("inner/ü c.bin", 70_000)):
        (source / name).write_bytes(random.Random(name).randbytes(size))
    tried = []
    try:
        keys = server.environment
        aws = [TOOLS / "clients" / "bin" / "aws", "--endpoint-url", server.endpoint, "s3"]
        run(*aws, "sync", source, "s3://penstock/aws/", **keys)
        run(*aws, "sync", "s3://penstock/aws/", tmp_path / "aws", **keys)
        assert same(source, tmp_path / "aws")
        assert "b.bin" in run(*aws, "ls", "--recursive", "s3://penstock/aws/", **keys)
        run(*aws, "rm", "--recursive", "s3://penstock/aws/", **keys)
        rclone = TOOLS / "bin" / "rclone"
        remote = f":s3,provider=Other,endpoint='{server.endpoint}',access_key_id={servers.KEY},secret_access_key={servers.SECRET}:penstock/rclone"
        run(rclone, "copy", source, remote)
        run(rclone, "check", source, remote)
        run(rclone, "copy", remote, tmp_path / "rclone")
        assert same(source, tmp_path / "rclone")
        run(rclone, "purge", remote)
        for prefix in ("aws/", "rclone/"):
            assert "Contents" not in server.client().list_objects_v2(Bucket="penstock", Prefix=prefix)
        tried += ["awscli", "rclone"]
        programs = [
            (
                TOOLS / "clients",
                "s3fs",
                "import sys, s3fs; fs = s3fs.S3FileSystem(endpoint_url=sys.argv[1]); fs.put(sys.argv[2], 'penstock/s3fs/', recursive=True); "
                "assert len(fs.find('penstock/s3fs')) == 3; f = [p for p in fs.find('penstock/s3fs') if p.endswith('b.bin')][0]; "
                "assert fs.cat(f) == open(sys.argv[2] + '/inner/b.bin', 'rb').read(); fs.rm('penstock/s3fs', recursive=True)",
            ),
            (
                TOOLS / "clients",
                "minio-py",
                "import io, os, sys, minio; c = minio.Minio(sys.argv[1].split('//')[1], os.environ['AWS_ACCESS_KEY_ID'], "
                "os.environ['AWS_SECRET_ACCESS_KEY'], secure=False, region='us-east-1'); body = os.urandom(11 << 20); "
                "c.put_object('penstock', 'minio/a b', io.BytesIO(body), len(body), part_size=5 << 20); "
                "assert c.get_object('penstock', 'minio/a b', offset=7, length=9).read() == body[7:16]; "
                "c.fget_object('penstock', 'minio/a b', sys.argv[2] + '/../got'); assert open(sys.argv[2] + '/../got', 'rb').read() == body; "
                "from minio.commonconfig import CopySource; c.copy_object('penstock', 'minio/copy', CopySource('penstock', 'minio/a b')); "
                "assert c.stat_object('penstock', 'minio/copy').size == len(body); "
                "assert [o.object_name for o in c.list_objects('penstock', 'minio/', recursive=True)] == ['minio/a b', 'minio/copy']; "
                "from minio.deleteobjects import DeleteObject; assert not list(c.remove_objects('penstock', [DeleteObject('minio/a b'), DeleteObject('minio/copy')])); "
                "assert not list(c.list_objects('penstock', 'minio/', recursive=True)); "
                "import urllib.request; c.put_object('penstock', 'minio/x', io.BytesIO(b'12345'), 5); "
                "assert urllib.request.urlopen(c.presigned_get_object('penstock', 'minio/x')).read() == b'12345'",
            ),
            (
                RIVALS / "s3torchconnector",
                "s3torchconnector",
                "import sys; from s3torchconnector import S3MapDataset, S3ClientConfig; "
                "d = S3MapDataset.from_prefix('s3://penstock/kept/', region='us-east-1', endpoint=sys.argv[1], "
                "s3client_config=S3ClientConfig(force_path_style=True)); "
                "assert sorted(len(d[i].read()) for i in range(len(d))) == [1000, 70000, 12 << 20]",
            ),
            (
                RIVALS / "obstore",
                "obstore",
                "import sys, obstore; from obstore.store import S3Store; s = S3Store('penstock', endpoint=sys.argv[1], "
                "client_options={'allow_http': True}, virtual_hosted_style_request=False); obstore.put(s, 'obstore/x', b'12345'); "
                "assert bytes(obstore.get(s, 'obstore/x').bytes()) == b'12345'; assert bytes(obstore.get_range(s, 'obstore/x', start=1, end=3)) == b'23'",
            ),
        ]
        client = server.client()
        for path in source.rglob("*"):
            if path.is_file():
                client.put_object(Bucket="penstock", Key=f"kept/{path.relative_to(source)}", Body=path.read_bytes())
        for place, name, program in programs:
            python = place / "bin" / "python"
            if place.is_relative_to(TOOLS / "clients") or python.exists():
                run(python, "-c", program, server.endpoint, source, **keys)
                tried.append(name)
        print("worked unchanged:", ", ".join(tried))
    finally:
        server.stop()


@pytest.mark.soak
@pytest.mark.parametrize("cold_faults", ["", "seed=5&reset=3&fail=3&throttle=3&truncate=3"])
def test_ten_thousand_schedules_of_faults_keep_every_promise(folder, minio, proxy, cold_faults):
    """Writers of a dataset through faults of the network before the server, and of its cold store. The check of each schedule is testkit's."""
    proxy.faults(cold_faults)
    environment = {**minio.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
    server = servers.Penstock(folder, "s3://", "--cache", f"{folder / 'cache'}:1GB", environment=environment)
    command = ["cargo", "test", "--release", "-p", "penstock-testkit", "--locked", "--test", "proofs"]
    try:
        address = server.endpoint.removeprefix("http://")
        run(*command, "remote::every_schedule", "--", "--nocapture", timeout=3600, PENSTOCK_TEST_SERVER=address)
    finally:
        proxy.faults()
        server.stop()


def same(one, other):
    files = {path.relative_to(one): path.read_bytes() for path in one.rglob("*") if path.is_file()}
    return files == {path.relative_to(other): path.read_bytes() for path in other.rglob("*") if path.is_file()}
