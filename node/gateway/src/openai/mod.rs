//! OpenAI's chat completions: what comes in, what goes out, and how errors look.

pub(crate) mod content;
pub(crate) mod error;
pub(crate) mod request;
pub(crate) mod response;

pub(crate) use error::ApiError;
