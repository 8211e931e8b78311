//! A real MinIO server for tests, with its own temporary folder and port. Dropping the value stops the server.
//! `tools/servers.sh` installs MinIO. `PENSTOCK_TEST_SERVER=ADDRESS` names another running S3 server to use, with these keys and this bucket.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use penstock_error::Result;
use penstock_storage::{Io, Options};

pub const KEY: &str = "penstock-test";
pub const SECRET: &str = "penstock-test-secret";
pub const BUCKET: &str = "penstock";
/// The variable that names another running server.
pub const SERVER: &str = "PENSTOCK_TEST_SERVER";

pub struct Minio {
    pub address: SocketAddr,
    process: Option<(Child, tempfile::TempDir)>,
}

impl Minio {
    pub fn start() -> io::Result<Minio> {
        if let Ok(address) = std::env::var(SERVER) {
            return Ok(Minio { address: address.parse().map_err(io::Error::other)?, process: None });
        }
        let binary = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin/minio");
        if !binary.exists() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("{} is missing: run tools/servers.sh", binary.display()),
            ));
        }
        let folder = tempfile::tempdir()?;
        let data = folder.path().join("data");
        std::fs::create_dir_all(data.join(BUCKET))?; // MinIO treats a folder as a bucket.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let log = std::fs::File::create(folder.path().join("log"))?;
        let process = Command::new(binary)
            .args(["server", "--quiet", "--address", &address.to_string()])
            .arg(&data)
            .envs([
                ("MINIO_ROOT_USER", KEY),
                ("MINIO_ROOT_PASSWORD", SECRET),
                ("MINIO_BROWSER", "off"),
                ("MINIO_UPDATE", "off"),
                ("MINIO_CI_CD", "1"),
            ])
            .env("HOME", folder.path())
            .stdout(log.try_clone()?)
            .stderr(Stdio::from(log))
            .spawn()?;
        let minio = Minio { address, process: Some((process, folder)) };
        for _ in 0..600 {
            if minio.is_live() {
                return Ok(minio);
            }
            std::thread::sleep(Duration::from_millis(50)); // MinIO does not announce that it is ready.
        }
        Err(io::Error::other("MinIO did not become ready"))
    }

    fn is_live(&self) -> bool {
        use std::io::{Read as _, Write as _};
        let ask = || -> io::Result<String> {
            let mut stream = TcpStream::connect(self.address)?;
            stream.write_all(b"GET /minio/health/ready HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        ask().is_ok_and(|answer| answer.contains("200 OK"))
    }

    /// Return options for a store at `address`, which is the server or a proxy in front of it.
    pub fn options(address: SocketAddr, more: &[(&str, &str)]) -> Result<Options> {
        let endpoint = format!("http://{address}");
        let own = [
            ("endpoint_url", endpoint.as_str()),
            ("region", "us-east-1"),
            ("access_key_id", KEY),
            ("secret_access_key", SECRET),
        ];
        Options::new(own.iter().chain(more).map(|(name, value)| (name.to_string(), value.to_string())), Io::Auto)
    }
}

impl Drop for Minio {
    fn drop(&mut self) {
        if let Some((process, _folder)) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
