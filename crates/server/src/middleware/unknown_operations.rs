//! Operations that a query names, such as `?tagging`. `s3s` ignores names that it does not know. It would take `DELETE /key?annotation`, which deletes an
//! annotation, for one that deletes the object, and `GET /key?annotation` for one that reads it.

use hyper::{Method, Uri};

use crate::authentication::parameters;
use crate::authentication::query_headers::is_header;

/// The names without a value that requests may have: those of operations that are carried out or refused by name.
const KNOWN: [&str; 39] = [
    "accelerate", "acl", "analytics", "attributes", "batch", "cors", "delete", "encryption", "events",
    "intelligent-tiering", "inventory", "legal-hold", "lifecycle", "location", "logging", "metadataTable", "metrics",
    "notification", "object-lock", "ownershipControls", "partNumber", "policy", "policyStatus", "publicAccessBlock",
    "replication", "requestPayment", "restore", "retention", "select", "session", "tagging", "torrent", "uploadId",
    "uploads", "versionId", "versioning", "versions", "website", "x-id",
];

/// The parameters of reads, which clients also send without a value.
const OF_READS: [&str; 23] = [
    "bucket-region", "continuation-token", "delimiter", "encoding-type", "fetch-owner", "key-marker", "list-type",
    "marker", "max-buckets", "max-keys", "max-parts", "max-uploads", "part-number-marker", "prefix",
    "response-cache-control", "response-content-disposition", "response-content-encoding", "response-content-language",
    "response-content-type", "response-expires", "start-after", "upload-id-marker", "version-id-marker",
];

/// Names of operations on buckets that have the method of a plain write of an object.
const OF_BUCKETS: [&str; 1] = ["encryption"];

/// Return the operation that a query names, if this server does not know it. A name with a value is a parameter, and ignored if it is not
/// known, as in S3.
pub fn unknown(method: &Method, uri: &Uri, has_key: bool) -> Option<String> {
    uri.query()?;
    let is_read = matches!(*method, Method::GET | Method::HEAD);
    // Headers in the address may be empty, too. Signatures cover all others.
    let is_parameter = |name: &str| is_header(name) || is_read && OF_READS.contains(&name);
    let is_known = |name: &str| is_parameter(name) || KNOWN.contains(&name) && !(has_key && OF_BUCKETS.contains(&name));
    parameters(uri)
        .find(|(name, value)| value.is_empty() && !name.is_empty() && !is_known(name))
        .map(|(name, _)| name.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_refused_and_parameters_are_not() {
        let unknown = |method: &Method, uri: &str| unknown(method, &uri.parse().unwrap(), uri.starts_with("/b/"));
        assert_eq!(unknown(&Method::DELETE, "/b/k?annotation&annotationName=x").as_deref(), Some("annotation"));
        assert_eq!(unknown(&Method::PUT, "/b/k?renameObject").as_deref(), Some("renameObject"));
        assert_eq!(unknown(&Method::PUT, "/b/k?%65ncryption=").as_deref(), Some("encryption"));
        assert_eq!(unknown(&Method::DELETE, "/b?metadataConfiguration").as_deref(), Some("metadataConfiguration"));
        assert_eq!(unknown(&Method::GET, "/b/k?annotation").as_deref(), Some("annotation"));
        assert_eq!(unknown(&Method::GET, "/b?abac").as_deref(), Some("abac"));
        assert_eq!(unknown(&Method::HEAD, "/b/k?annotation=").as_deref(), Some("annotation"));
        assert_eq!(unknown(&Method::PUT, "/b/k?prefix").as_deref(), Some("prefix"));
        for uri in [
            "/b?list-type=2&prefix=&delimiter=", "/b?versions&key-marker=", "/b?location",
            "/b/k?response-content-type=", "/b?_=1",
        ] {
            assert_eq!(unknown(&Method::GET, uri), None, "{uri}");
        }
        for uri in [
            "/b/k", "/b/k?x-id=PutObject", "/b/k?uploads", "/b/k?partNumber=1&uploadId=x", "/b/k?tagging=", "/b/k?v=3",
            "/b?encryption", "/b?delete",
        ] {
            for method in [Method::PUT, Method::POST, Method::DELETE, Method::GET] {
                assert_eq!(unknown(&method, uri), None, "{uri}");
            }
        }
    }
}
