//! Operations that a query names, such as `?tagging`. `s3s` ignores names that it does not know, and would take `DELETE /key?annotation`, which deletes an
//! annotation, for one that deletes the object.

use hyper::{Method, Uri};

use crate::authentication::parameters;

/// The names without a value that writes may have: those of operations that are carried out or refused by name.
const KNOWN: [&str; 39] = [
    "accelerate",
    "acl",
    "analytics",
    "attributes",
    "batch",
    "cors",
    "delete",
    "encryption",
    "events",
    "intelligent-tiering",
    "inventory",
    "legal-hold",
    "lifecycle",
    "location",
    "logging",
    "metadataTable",
    "metrics",
    "notification",
    "object-lock",
    "ownershipControls",
    "partNumber",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "restore",
    "retention",
    "select",
    "session",
    "tagging",
    "torrent",
    "uploadId",
    "uploads",
    "versionId",
    "versioning",
    "versions",
    "website",
    "x-id",
];

/// Names of operations on buckets that have the method of a plain write of an object.
const OF_BUCKETS: [&str; 1] = ["encryption"];

/// Return the operation that the query of a write names, if this server does not know it. A name with a value is a parameter, and ignored if it is not
/// known, as in S3.
pub fn unknown(method: &Method, uri: &Uri, has_key: bool) -> Option<String> {
    if !matches!(*method, Method::PUT | Method::POST | Method::DELETE) || uri.query().is_none() {
        return None;
    }
    let is_known = |name: &str| KNOWN.contains(&name) && !(has_key && OF_BUCKETS.contains(&name));
    parameters(uri).find(|(name, value)| value.is_empty() && !name.is_empty() && !is_known(name)).map(|(name, _)| name.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_with_unknown_names_are_refused_and_parameters_are_not() {
        let unknown = |method: &Method, uri: &str| unknown(method, &uri.parse().unwrap(), uri.starts_with("/b/"));
        assert_eq!(unknown(&Method::DELETE, "/b/k?annotation&annotationName=x").as_deref(), Some("annotation"));
        assert_eq!(unknown(&Method::PUT, "/b/k?renameObject").as_deref(), Some("renameObject"));
        assert_eq!(unknown(&Method::PUT, "/b/k?%65ncryption=").as_deref(), Some("encryption"));
        assert_eq!(unknown(&Method::DELETE, "/b?metadataConfiguration").as_deref(), Some("metadataConfiguration"));
        for uri in [
            "/b/k",
            "/b/k?x-id=PutObject",
            "/b/k?uploads",
            "/b/k?partNumber=1&uploadId=x",
            "/b/k?tagging=",
            "/b/k?v=3",
            "/b?encryption",
            "/b?delete",
        ] {
            for method in [Method::PUT, Method::POST, Method::DELETE] {
                assert_eq!(unknown(&method, uri), None, "{uri}");
            }
        }
        assert_eq!(unknown(&Method::GET, "/b/k?annotation"), None);
    }
}
