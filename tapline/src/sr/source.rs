//! Options that select a repository's storage: exactly one location, with the options that belong to it.

use api::{Code, Problem, SrSource};

use crate::session::Session;
use crate::word::{self, HostPath, Share};

/// A location with its options. The conflicts are explicit because clap does not enforce `requires` if the required
/// option conflicts with one that is given.
#[derive(Clone, Debug, clap::Args)]
pub struct Source {
    #[command(flatten)]
    location: Location,
    /// NFS version: 3, 4, 4.1 or 4.2 [default: negotiated]
    #[arg(long, value_name = "VERSION", requires = "nfs", conflicts_with_all = ["dir", "smb", "iso"])]
    nfs_version: Option<String>,
    /// A file with username=, password= and domain= lines (mount.cifs(8)), readable only by root
    #[arg(long, value_name = "FILE", requires = "smb", value_parser = word::path,
        conflicts_with_all = ["dir", "nfs", "iso"])]
    credentials: Option<HostPath>,
}

#[derive(Clone, Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Location {
    /// A directory on the daemon's host
    #[arg(long, value_name = "PATH", value_parser = word::directory)]
    dir: Option<HostPath>,
    /// A directory exported by an NFS server
    #[arg(long, value_name = "SERVER:/EXPORT", value_parser = word::nfs)]
    nfs: Option<SrSource>,
    /// A share of an SMB server
    #[arg(long, value_name = "//SERVER/SHARE", value_parser = word::smb, requires = "credentials")]
    smb: Option<Share>,
    /// A read-only directory of ISO images on the daemon's host
    #[arg(long, value_name = "PATH", value_parser = word::path)]
    iso: Option<HostPath>,
}

impl Source {
    /// Converts the options to the API's type.
    pub fn resolve(self, session: &Session) -> Result<SrSource, Problem> {
        let Source { location, nfs_version, credentials } = self;
        match (location.dir, location.nfs, location.smb.zip(credentials), location.iso) {
            (Some(path), ..) => Ok(SrSource::Dir { path: session.path(path)? }),
            (_, Some(SrSource::Nfs { server, export, .. }), ..) => {
                Ok(SrSource::Nfs { server, export, version: nfs_version })
            }
            (_, _, Some((Share { server, share }, credentials)), _) => {
                Ok(SrSource::Smb { server, share, credentials: session.path(credentials)? })
            }
            (.., Some(path)) => Ok(SrSource::Iso { path: session.path(path)? }),
            // clap rejects this case; if it does not, nothing is guessed.
            _ => {
                Err(Problem::new(Code::Invalid, "no storage given").advise("give one of --dir, --nfs, --smb or --iso"))
            }
        }
    }
}
