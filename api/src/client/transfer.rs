//! `/uploads` and `/downloads`: contents of disks that pass through the client.

use hyper::Method;
use hyper::body::Bytes;
use uuid::Uuid;

use super::Client;
use super::target::Target;
use crate::{Download, Problem, Upload, UploadCreate};

const UPLOADS: &str = "uploads";
const DOWNLOADS: &str = "downloads";

impl Client {
    /// Creates an upload.
    pub async fn upload_create(&self, asked: &UploadCreate) -> Result<Upload, Problem> {
        self.change(Method::POST, &Target::new(UPLOADS), asked).await
    }

    /// Appends a piece of at most 16 MiB to an upload, which has `offset` bytes. The file ends with the `last` one.
    pub async fn upload_append(&self, uuid: Uuid, offset: u64, last: bool, piece: Bytes) -> Result<Upload, Problem> {
        let target = Target::verb(UPLOADS, uuid, "append").query("offset", Some(offset));
        self.send_bytes(&target.query("last", last.then_some(true)), piece).await
    }

    /// Removes an upload.
    pub async fn upload_remove(&self, uuid: Uuid) -> Result<(), Problem> {
        self.change(Method::DELETE, &Target::object(UPLOADS, uuid), &()).await
    }

    /// Gets a download.
    pub async fn download(&self, uuid: Uuid) -> Result<Download, Problem> {
        self.get(&Target::object(DOWNLOADS, uuid)).await
    }

    /// Reads a piece of a download, which begins at `offset`.
    pub async fn download_read(&self, uuid: Uuid, offset: u64) -> Result<Vec<u8>, Problem> {
        self.bytes(&Target::verb(DOWNLOADS, uuid, "data").query("offset", Some(offset))).await
    }

    /// Removes a download.
    pub async fn download_remove(&self, uuid: Uuid) -> Result<(), Problem> {
        self.change(Method::DELETE, &Target::object(DOWNLOADS, uuid), &()).await
    }
}
