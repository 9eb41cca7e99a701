//! Uploads: files that a client sends piece by piece, to be imported.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::Name;

/// A file that is being sent to the daemon. It has no name in the repository, and is gone when it has been imported,
/// when nothing has arrived for an hour, and when the daemon ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Upload {
    /// Its identity.
    pub uuid: Uuid,
    /// The repository whose space it takes.
    pub sr: Uuid,
    /// Name of the client's file, for messages.
    pub name: Name,
    /// Length of the whole file, in bytes; absent until it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Bytes that have arrived, all from the file's beginning on.
    pub received: u64,
    /// When the upload was created.
    pub created: Timestamp,
}

/// Creates an upload.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UploadCreate {
    /// The repository whose space the file takes until it has been imported.
    pub sr: Uuid,
    /// Name of the client's file, for messages.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// Length of the whole file, in bytes; if omitted, the file ends with the piece that is said to be the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}
