//! The page for people and the counts for Prometheus, at an address of their own. They show names of folders but no objects.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use prometheus_client::encoding::text::encode;

use crate::metrics::Metrics;
use crate::watch::sampler::Sampler;

const PAGE: &str = include_str!("status.html");

/// Answer a request to the address of the status page.
pub async fn answer(metrics: Arc<Metrics>, sampler: Arc<Sampler>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let (status, kind, text) = match request.uri().path() {
        _ if !is_read => (StatusCode::METHOD_NOT_ALLOWED, "text/plain", "only GET is answered\n".to_owned()),
        "/" => (StatusCode::OK, "text/html; charset=utf-8", PAGE.to_owned()),
        "/status.json" => {
            (StatusCode::OK, "application/json", serde_json::to_string(&sampler.sample()).unwrap_or_else(|error| error.to_string()))
        }
        "/metrics" => {
            let mut text = String::new();
            match encode(&mut text, &metrics.registry) {
                Ok(()) => (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", text),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", error.to_string()),
            }
        }
        "/health" if metrics.draining.get() == 0 => (StatusCode::OK, "text/plain", "ok\n".to_owned()),
        "/health" => (StatusCode::SERVICE_UNAVAILABLE, "text/plain", "draining\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, "text/plain", "see /, /metrics, /status.json and /health\n".to_owned()),
    };
    let mut response = Response::new(Full::from(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}
