//! This process's limits on memory, threads and image pixels. The defaults respect CPU affinity and the limits set by cgroup v1
//! and v2.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use penstock_codec::Limits;
use penstock_format::files::INLINE_DATA_BYTES;

static MEMORY_BYTES: AtomicU64 = AtomicU64::new(0);
static THREADS: AtomicU64 = AtomicU64::new(0);
static IMAGE_PIXELS: AtomicU64 = AtomicU64::new(0);
static INLINE_BYTES: AtomicU64 = AtomicU64::new(INLINE_DATA_BYTES);

/// The default memory budget, unless a cgroup limit reduces it.
const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;
/// The smallest memory budget. Lower values are raised to this minimum, so that writers can work.
const LEAST_BYTES: u64 = 16 << 20;

/// Reads and sets the limits.
pub struct Config;

impl Config {
    /// Return how many bytes caches and writers may use. Decoded blocks may use half of this budget. Each of three other
    /// uses is limited to a quarter: samples waiting to be written, idle memory for large arrays, and metadata for open files.
    /// Default: 512 MiB, or an eighth of the cgroup's limit if that is smaller.
    pub fn memory_bytes() -> u64 {
        match MEMORY_BYTES.load(Relaxed) {
            0 => {
                let limit = cgroup_limit()
                    .map_or(DEFAULT_MEMORY_BYTES, |limit| (limit / 8).min(DEFAULT_MEMORY_BYTES))
                    .max(LEAST_BYTES);
                MEMORY_BYTES.store(limit, Relaxed);
                limit
            }
            set => set,
        }
    }

    /// Return how many threads a call may use. Default: the number of processors available to this process, divided by
    /// LOCAL_WORLD_SIZE.
    pub fn threads() -> usize {
        match THREADS.load(Relaxed) {
            0 => {
                let ranks =
                    std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.parse().ok()).unwrap_or(1).max(1);
                let threads = std::thread::available_parallelism().map_or(1, usize::from).div_ceil(ranks);
                THREADS.store(threads as u64, Relaxed);
                threads
            }
            set => set as usize,
        }
    }

    pub fn limits() -> Limits {
        match IMAGE_PIXELS.load(Relaxed) {
            0 => Limits::default(),
            pixels => Limits { pixels },
        }
    }

    /// Return how many bytes of data files a transaction may store in its record.
    pub fn inline_bytes() -> u64 {
        INLINE_BYTES.load(Relaxed)
    }

    pub fn set_inline_bytes(bytes: u64) {
        INLINE_BYTES.store(bytes.min(INLINE_DATA_BYTES), Relaxed);
    }

    pub fn set_memory_bytes(bytes: u64) {
        MEMORY_BYTES.store(bytes.max(LEAST_BYTES), Relaxed);
    }

    pub fn set_threads(threads: u64) {
        THREADS.store(threads.max(1), Relaxed);
    }

    pub fn set_image_pixels(pixels: u64) {
        IMAGE_PIXELS.store(pixels.max(1), Relaxed);
    }
}

/// Return the memory limit of this process's cgroup. A v2 limit takes precedence over a v1 limit. Returns None if neither is set.
fn cgroup_limit() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let v2 = own
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .map(|path| format!("/sys/fs/cgroup{}/memory.max", path.trim_end_matches('/')));
    let v1 = own
        .lines()
        .find_map(|line| line.split_once(":memory:"))
        .map(|(_, path)| format!("/sys/fs/cgroup/memory{}/memory.limit_in_bytes", path.trim_end_matches('/')));
    let fallbacks = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"].map(str::to_owned);
    let read = |path: String| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    // cgroup v1 represents "no limit" as a number near 2^63.
    v2.into_iter().chain(v1).chain(fallbacks).find_map(read).filter(|limit| *limit < 1 << 60)
}

/// Return this machine's current time in microseconds since 1970.
pub fn now_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as i64)
}
