//! The arguments of `image fetch`.

use std::path::PathBuf;

use clap::Args;
use control::checksum::Checksum;

use super::Handing;

/// Arguments of `image fetch`.
#[derive(Debug, Args)]
pub struct Fetch {
    /// The URL of the file: https://HOST/PATH
    pub url: String,
    /// The file to create, which must not exist. Until it is complete, its name has a dot in front, and `.tapline-part`
    /// behind
    pub file: PathBuf,
    /// Fail unless it has this digest: sha256:HEX or sha512:HEX, or the one in a list: its URL, or auto for SHA256SUMS,
    /// SHA512SUMS, NAME.sha256 or NAME.sha512 next to the file
    #[arg(long, value_name = "DIGEST|URL|auto")]
    pub checksum: Option<Checksum>,
    /// Fail, before anything is written, unless it has this size in bytes
    #[arg(long, value_name = "BYTES", hide = true)]
    pub expect_size: Option<u64>,
    /// Where its file comes from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
