//! Which bucket the host of a request names, if any.

use std::net::IpAddr;
use std::sync::Arc;

use penstock_error::{Error, Result};
use s3s::S3Result;
use s3s::host::{S3Host, VirtualHost};
use s3s::validation::NameValidation;

/// The names of buckets that S3 allows.
pub struct BucketNames;

impl NameValidation for BucketNames {
    fn validate_bucket_name(&self, name: &str) -> bool {
        is_bucket_name(name)
    }
}

pub fn is_bucket_name(name: &str) -> bool {
    s3s::path::check_bucket_name(name) && !name.contains(".-") && !name.contains("-.")
}

/// Domains whose subdomains are buckets. Requests to other names have the bucket in their path.
#[derive(Debug)]
pub struct Domains(Vec<String>);

impl Domains {
    pub fn new(domains: &[String]) -> Result<Domains> {
        let is_wrong = |domain: &&String| domain.is_empty() || domain.starts_with('.') || domain.contains(['/', ':']);
        match domains.iter().find(is_wrong) {
            Some(wrong) => {
                Err(Error::new("invalid-argument", format!("`{wrong}` is not a domain"))
                    .hint("write it as s3.example.com"))
            }
            None => Ok(Domains(domains.iter().map(|domain| domain.to_ascii_lowercase()).collect())),
        }
    }

    pub fn is_some(&self) -> bool {
        !self.0.is_empty()
    }

    /// Return the bucket that a `Host` header names.
    pub fn bucket_of(&self, host: &str) -> Option<String> {
        if self.0.is_empty() {
            return None; // Each request asks.
        }
        let name = without_port(host);
        self.0.iter().find_map(|domain| name.strip_suffix(domain.as_str())?.strip_suffix('.').map(str::to_owned))
    }

    /// Return whether a name is of this machine or of these domains. A page in a browser can let any other name lead here.
    pub fn is_own(&self, host: &str) -> bool {
        let name = without_port(host);
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        name == "localhost"
            || address.is_ok_and(|address| address.is_loopback())
            || self.0.iter().any(|domain| name == *domain || name.ends_with(&format!(".{domain}")))
    }
}

fn without_port(host: &str) -> String {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(name, _)| name).to_ascii_lowercase()
}

/// Domains, as `s3s` wants them.
pub struct Hosts(pub Arc<Domains>);

impl S3Host for Hosts {
    fn parse_host_header<'a>(&'a self, host: &'a str) -> S3Result<VirtualHost<'a>> {
        let found = VirtualHost::new(without_port(host));
        Ok(match self.0.bucket_of(host) {
            Some(bucket) => found.with_bucket(bucket),
            None => found,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_name_buckets_and_this_machine() -> Result<()> {
        let domains = Domains::new(&["S3.example.com".into()])?;
        assert_eq!(domains.bucket_of("pets.s3.example.com:9100").as_deref(), Some("pets"));
        assert_eq!(domains.bucket_of("s3.example.com"), None);
        assert_eq!(domains.bucket_of("evils3.example.com"), None);
        for own in ["localhost:1", "127.0.0.1", "[::1]:80", "s3.example.com", "pets.S3.example.com"] {
            assert!(domains.is_own(own), "{own}");
        }
        for other in ["evil.example", "10.0.0.1", "localhost.evil.example", ""] {
            assert!(!domains.is_own(other), "{other}");
        }
        assert!(Domains::new(&["http://x".into()]).is_err());
        Ok(())
    }
}
