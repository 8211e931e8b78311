//! Responses of this server itself, and what it adds to those of the library of the protocol.

use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderValue, ORIGIN, RETRY_AFTER};
use hyper::{Request, Response, StatusCode};

use super::patient::Received;

/// The response to a read for which the cold store or a drive takes too long.
pub fn late() -> s3s::HttpResponse {
    with_error(StatusCode::SERVICE_UNAVAILABLE, "SlowDown", "The object could not be read in time. Try again later.")
}

pub fn with_error(status: StatusCode, code: &str, message: &str) -> s3s::HttpResponse {
    let message = message.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    );
    let mut response = Response::new(s3s::Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    response
}

/// Messages of errors that the library of the protocol, or a cold store in its response to HEAD, sends without one.
const MESSAGES: [(&str, &str); 11] = [
    (
        "SignatureDoesNotMatch",
        "The signature does not match the request. Check the secret key, and whether a proxy changes the path or headers.",
    ),
    ("InvalidURI", "The path of the request cannot be parsed. Encode it as a URL."),
    ("MalformedXML", "The XML of the body cannot be parsed."),
    ("InvalidBucketName", "Bucket names consist of 3 to 63 lower-case letters, digits, dots and hyphens."),
    ("KeyTooLongError", "Keys can have at most 1,024 bytes."),
    ("IncompleteBody", "The length of the body differs from its header. Send it again."),
    ("MethodNotAllowed", "This method is not allowed here. POST requires the bucket or the query of an operation."),
    ("NoSuchBucket", "This bucket does not exist."),
    ("NoSuchKey", "This object does not exist."),
    ("PreconditionFailed", "A precondition in the request headers was not met."),
    ("InvalidRange", "The range begins after the end of the object."),
];

/// Return the code of an error.
pub fn code_of(response: &s3s::HttpResponse) -> Option<String> {
    let text = response.body().bytes().filter(|_| !response.status().is_success())?;
    let text = String::from_utf8_lossy(&text);
    Some(text.split_once("<Code>")?.1.split_once("</Code>")?.0.to_owned())
}

/// Add a message to an error that has none.
pub fn explained(mut response: s3s::HttpResponse, has_body: bool, received: &Received) -> s3s::HttpResponse {
    let Some(code) = code_of(&response) else { return response };
    let has_tag =
        |tag: &[u8]| response.body().bytes().is_some_and(|text| text.windows(tag.len()).any(|part| part == tag));
    if has_tag(b"<Message>") {
        return response;
    }
    // The library names the request only if an operation was called. Before that, only the body of the request can have failed.
    let is_of_body = has_body && code == "InternalError" && !has_tag(b"<RequestId>");
    let found = match (is_of_body, received.is_too_long()) {
        (true, true) => {
            Some((StatusCode::BAD_REQUEST, "MaxMessageLengthExceeded", "A list in a body can have at most 8 MiB."))
        }
        (true, false) => {
            let text =
                "The body could not be received, or its length or hash does not match its headers. Send it again.";
            Some((StatusCode::BAD_REQUEST, "IncompleteBody", text))
        }
        _ => {
            let known = MESSAGES
                .iter()
                .find(|(known, _)| *known == code)
                .map_or("The request is not a valid S3 request.", |(_, message)| *message);
            response.status().is_client_error().then_some((response.status(), &*code, known))
        }
    };
    if let Some((status, code, message)) = found {
        *response.body_mut() = with_error(status, code, message).into_body();
        *response.status_mut() = status;
        response.headers_mut().remove(CONTENT_LENGTH);
    }
    response
}

/// Return the attributes of an object with an ETag that is not quoted, as S3 does in this response alone.
pub fn attributes(mut response: s3s::HttpResponse) -> s3s::HttpResponse {
    let text = response.body().bytes().and_then(|text| String::from_utf8(text.to_vec()).ok());
    let Some(text) = text.filter(|text| response.status().is_success() && text.contains("<ETag>\"")) else {
        return response;
    };
    *response.body_mut() = s3s::Body::from(text.replace("<ETag>\"", "<ETag>").replace("\"</ETag>", "</ETag>"));
    response.headers_mut().remove(CONTENT_LENGTH);
    response
}

/// Write characters that XML cannot have as S3 does: names of objects may have them. The content of an object, which has an ETag, stays as it is.
pub fn readable(mut response: s3s::HttpResponse) -> s3s::HttpResponse {
    let is_xml = response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == "application/xml");
    if !is_xml || response.headers().contains_key(ETAG) {
        return response;
    }
    // Parsers take a plain carriage return for a line end.
    let is_odd = |byte: &u8| *byte < b' ' && !matches!(byte, b'\t' | b'\n');
    let Some(text) = response.body().bytes().filter(|text| text.iter().any(is_odd)) else { return response };
    let mut written = Vec::with_capacity(text.len() + 64);
    for byte in text {
        match is_odd(&byte) {
            true => written.extend_from_slice(format!("&#x{byte:x};").as_bytes()),
            false => written.push(byte),
        }
    }
    *response.body_mut() = s3s::Body::from(bytes::Bytes::from(written));
    response.headers_mut().remove(CONTENT_LENGTH);
    response
}

pub fn overloaded() -> s3s::HttpResponse {
    let mut response = with_error(
        StatusCode::SERVICE_UNAVAILABLE,
        "SlowDown",
        "The server has reached its limit of concurrent requests.",
    );
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Browsers ask whether pages of others may use the server.
pub fn no_cors(request: &Request<Incoming>) -> s3s::HttpResponse {
    if request.headers().contains_key(ORIGIN) {
        with_error(StatusCode::FORBIDDEN, "AccessForbidden", "This server has no CORS rules.")
    } else {
        with_error(StatusCode::BAD_REQUEST, "BadRequest", "The Origin header is missing.")
    }
}
