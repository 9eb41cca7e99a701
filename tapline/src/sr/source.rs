//! What a repository lies on, as options: exactly one place, and what belongs to it.

use api::{Code, Problem, SrSource};

use crate::session::Session;
use crate::word::{self, HostPath, Share};

/// A place and what belongs to it. That an option requires a place is not enough to refuse it with another one: clap does
/// not require what is in conflict with what is there.
#[derive(Clone, Debug, clap::Args)]
pub struct Source {
    #[command(flatten)]
    place: Place,
    /// The version of NFS: 3, 4, 4.1 or 4.2 [default: what both can do]
    #[arg(long, value_name = "VERSION", requires = "nfs", conflicts_with_all = ["dir", "smb", "iso"])]
    nfs_version: Option<String>,
    /// A file with username=, password= and domain= lines (mount.cifs(8)), for root only
    #[arg(long, value_name = "FILE", requires = "smb", value_parser = word::path,
        conflicts_with_all = ["dir", "nfs", "iso"])]
    credentials: Option<HostPath>,
}

#[derive(Clone, Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Place {
    /// A directory of the daemon's host
    #[arg(long, value_name = "PATH", value_parser = word::path)]
    dir: Option<HostPath>,
    /// A directory that an NFS server exports
    #[arg(long, value_name = "SERVER:/EXPORT", value_parser = word::nfs)]
    nfs: Option<SrSource>,
    /// A share of an SMB server
    #[arg(long, value_name = "//SERVER/SHARE", value_parser = word::smb, requires = "credentials")]
    smb: Option<Share>,
    /// A directory of the daemon's host with ISO images, for reading only
    #[arg(long, value_name = "PATH", value_parser = word::path)]
    iso: Option<HostPath>,
}

impl Source {
    /// As the API has it.
    pub fn place(self, session: &Session) -> Result<SrSource, Problem> {
        let Source { place, nfs_version, credentials } = self;
        match (place.dir, place.nfs, place.smb.zip(credentials), place.iso) {
            (Some(path), ..) => Ok(SrSource::Dir { path: session.path(path)? }),
            (_, Some(SrSource::Nfs { server, export, .. }), ..) => {
                Ok(SrSource::Nfs { server, export, version: nfs_version })
            }
            (_, _, Some((Share { server, share }, credentials)), _) => {
                Ok(SrSource::Smb { server, share, credentials: session.path(credentials)? })
            }
            (.., Some(path)) => Ok(SrSource::Iso { path: session.path(path)? }),
            // clap has refused this; nothing is guessed if it has not.
            _ => Err(Problem::new(Code::Invalid, "no place is named").advise("name one: --dir, --nfs, --smb or --iso")),
        }
    }
}
