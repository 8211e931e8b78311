//! The way from `s3s` to the functions of operations.

use std::sync::Arc;

use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result};

use crate::operations::each_operation;
use crate::ops;
use crate::ops::tier::Tier;
use crate::read::conditions::{check_known, check_owner};

/// The number of a request, in its response and in the access log.
#[derive(Debug, Clone)]
pub struct RequestId(pub Arc<str>);

/// A tier, as `s3s` wants it.
pub struct Dispatch(pub Arc<Tier>);

/// Call the function of an operation, or the cold store.
macro_rules! call {
    ($tier:expr, $operation:ident, $request:ident) => {
        $tier.cold.$operation($request)
    };
    ($tier:expr, $operation:ident, $request:ident, $function:path) => {
        $function($tier, $request)
    };
}

macro_rules! dispatch {
    ($($group:ident { $($operation:ident($input:ident) -> $output:ident [$access:ident $(, $function:path)?];)* })*) => {
        #[async_trait::async_trait]
        impl S3 for Dispatch {
            $($(async fn $operation(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                let id = request.extensions.get::<RequestId>().cloned();
                check_known(stringify!($operation), &request.method, &request.headers, self.0.is_folder)?;
                if self.0.is_folder {
                    check_owner(&request.headers)?;
                }
                call!(&self.0, $operation, request $(, $function)?).await.map_err(|mut error| {
                    // The cold store's own id would not be found in the log of this server.
                    id.into_iter().for_each(|id| error.set_request_id(&*id.0));
                    error
                })
            })*)*
        }
    };
}

each_operation!(dispatch);
