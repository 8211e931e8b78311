"""Long tests of `penstock serve`: mixed load with faults and flat memory, flipped bits in thousands of places, and other programs as clients."""

import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time

import pytest
import servers

MIB = 1 << 20
RIVALS = pathlib.Path(__file__).parent.parent.parent / ".tools" / "rivals"


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
    choose, flips = random.Random(9), 0
    try:
        client = server.client()
        while flips < 10_000:
            files = [path for path in (folder / "cache").rglob("*") if path.is_file() and path.stat().st_size]
            for path in files:
                with path.open("r+b") as file:
                    for _ in range(10):
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
            if choose.random() < 0.1:
                server.process.kill()
                server.process.wait()
                server.restart()
    finally:
        server.stop()
    print(f"{flips} flipped bits")


def run(*command, **variables):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env={**os.environ, **variables}, timeout=300)
    assert done.returncode == 0, (command[:6], done.stdout[-1000:], done.stderr[-1000:])
    return done.stdout


@pytest.mark.soak
def test_other_programs_work_unchanged(folder, minio, tmp_path):
    """awscli, rclone, s3fs, s3torchconnector and obstore, each if it is installed. At least three must be."""
    server = servers.Penstock(folder, "s3://", "--cache", f"{folder / 'cache'}:200MB", environment=minio.environment)
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    for name, size in (("a.bin", 1000), ("inner/b.bin", 12 * MIB), ("inner/ü c.bin", 70_000)):
        (source / name).write_bytes(random.Random(name).randbytes(size))
    tried = []
    try:
        keys = server.environment
        if aws := shutil.which("aws"):
            base = [aws, "--endpoint-url", server.endpoint, "s3"]
            run(*base, "sync", source, "s3://penstock/aws/", **keys)
            run(*base, "sync", "s3://penstock/aws/", tmp_path / "aws", **keys)
            assert same(source, tmp_path / "aws")
            assert "b.bin" in run(*base, "ls", "--recursive", "s3://penstock/aws/", **keys)
            run(*base, "rm", "--recursive", "s3://penstock/aws/", **keys)
            tried.append("awscli")
        if rclone := shutil.which("rclone") or shutil.which("rclone", path=pathlib.Path.home() / "go" / "bin"):
            remote = f":s3,provider=Other,endpoint='{server.endpoint}',access_key_id={servers.KEY},secret_access_key={servers.SECRET}:penstock/rclone"
            run(rclone, "copy", source, remote)
            run(rclone, "check", source, remote)
            run(rclone, "copy", remote, tmp_path / "rclone")
            assert same(source, tmp_path / "rclone")
            run(rclone, "purge", remote)
            tried.append("rclone")
        programs = {
            "zarr": (
                "s3fs",
                "import sys, s3fs; fs = s3fs.S3FileSystem(endpoint_url=sys.argv[1]); fs.put(sys.argv[2], 'penstock/s3fs/', recursive=True); "
                "assert len(fs.find('penstock/s3fs')) == 3; f = [p for p in fs.find('penstock/s3fs') if p.endswith('b.bin')][0]; "
                "assert fs.cat(f) == open(sys.argv[2] + '/inner/b.bin', 'rb').read(); fs.rm('penstock/s3fs', recursive=True)",
            ),
            "s3torchconnector": (
                "s3torchconnector",
                "import sys; from s3torchconnector import S3MapDataset, S3ClientConfig; "
                "d = S3MapDataset.from_prefix('s3://penstock/kept/', region='us-east-1', endpoint=sys.argv[1], "
                "s3client_config=S3ClientConfig(force_path_style=True)); "
                "assert sorted(len(d[i].read()) for i in range(len(d))) == [1000, 70000, 12 << 20]",
            ),
            "obstore": (
                "obstore",
                "import sys, obstore; from obstore.store import S3Store; s = S3Store('penstock', endpoint=sys.argv[1], "
                "client_options={'allow_http': True}, virtual_hosted_style_request=False); obstore.put(s, 'obstore/x', b'12345'); "
                "assert bytes(obstore.get(s, 'obstore/x').bytes()) == b'12345'; assert bytes(obstore.get_range(s, 'obstore/x', start=1, end=3)) == b'23'",
            ),
        }
        client = server.client()
        for path in source.rglob("*"):
            if path.is_file():
                client.put_object(Bucket="penstock", Key=f"kept/{path.relative_to(source)}", Body=path.read_bytes())
        for place, (name, program) in programs.items():
            python = RIVALS / place / "bin" / "python"
            if python.exists():
                run(python, "-c", program, server.endpoint, source, **keys)
                tried.append(name)
        print("worked unchanged:", ", ".join(tried))
        assert len(tried) >= 3, tried
    finally:
        server.stop()


def same(one, other):
    files = {path.relative_to(one): path.read_bytes() for path in one.rglob("*") if path.is_file()}
    return files == {path.relative_to(other): path.read_bytes() for path in other.rglob("*") if path.is_file()}
