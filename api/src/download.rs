//! Downloads: disks that were exported for a client, which fetches the file piece by piece.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::ImageFormat;

/// An exported disk that a client fetches. It has no name in the repository, and is gone when it is removed, when
/// nothing has been fetched for an hour, and when the daemon ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Download {
    /// Its identity.
    pub uuid: Uuid,
    /// The VDI that was exported.
    pub vdi: Uuid,
    /// The repository whose space it takes: that of the VDI.
    pub sr: Uuid,
    /// Format of the file.
    pub format: ImageFormat,
    /// Length of the file, in bytes.
    pub size: u64,
    /// When the export was complete.
    pub created: Timestamp,
}

/// Bytes of the largest piece that is fetched with one request.
pub const DOWNLOAD_PIECE: u64 = 4 << 20;
