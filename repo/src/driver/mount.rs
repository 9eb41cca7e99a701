//! The mount(8) options for network storage, and what is rejected before anything is run.
//!
//! The options are the safe ones, whatever the host's defaults are: I/O waits for an unreachable server (`hard`)
//! instead of failing with data half written, nothing on the server is a device or a program of this host, and this
//! host's cache never substitutes for the server's data. It runs nothing.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use api::{Code, Problem, SrSource};

/// For both: nothing on the server may become a device or a program of this host.
const COMMON: &str = "hard,nosuid,nodev,noexec";

/// NFS: access times are not needed (mount.cifs(8) does not accept that option); over TCP; a request is repeated after
/// 60 s (`timeo` is in tenths), and after two repetitions the kernel logs that the server is not responding, and
/// continues.
const NFS: &str = "noatime,proto=tcp,timeo=600,retrans=2";

/// SMB: without caching, so that O_DIRECT works as documented; the files belong to this daemon only.
const SMB: &str = "cache=none,uid=0,gid=0,file_mode=0600,dir_mode=0700";

/// The supported NFS versions (nfs(5)).
const NFS_VERSIONS: [&str; 5] = ["3", "4", "4.0", "4.1", "4.2"];

/// The source as passed to mount(8) and as shown by the kernel (proc_pid_mountinfo(5)). `None` if the daemon does not
/// mount it.
pub fn device(source: &SrSource) -> Option<String> {
    match source {
        SrSource::Dir { .. } | SrSource::Iso { .. } => None,
        SrSource::Nfs { server, export, .. } if server.contains(':') => Some(format!("[{server}]:{export}")),
        SrSource::Nfs { server, export, .. } => Some(format!("{server}:{export}")),
        SrSource::Smb { server, share, .. } => Some(format!("//{server}/{share}")),
    }
}

/// The arguments of mount(8); `None` for storage that we do not mount.
pub fn words(source: &SrSource, at: &Path) -> Option<Vec<OsString>> {
    let (kind, options) = match source {
        SrSource::Dir { .. } | SrSource::Iso { .. } => return None,
        SrSource::Nfs { version, .. } => {
            let version = version.as_ref().map(|version| format!(",vers={version}")).unwrap_or_default();
            ("nfs", format!("{COMMON},{NFS}{version}"))
        }
        SrSource::Smb { credentials, .. } => ("cifs", format!("{COMMON},{SMB},credentials={credentials}")),
    };
    let mut words: Vec<OsString> = ["-t", kind, "-o", &options, "--"].map(OsString::from).into();
    words.extend([device(source)?.into(), at.into()]);
    Some(words)
}

/// Refuses a source that mount(8) would misinterpret, or one that other users can change. Checks files of the host.
pub fn check(source: &SrSource) -> Result<(), Problem> {
    match source {
        SrSource::Dir { .. } | SrSource::Iso { .. } => Ok(()),
        SrSource::Nfs { server, version, .. } => {
            check_server(server)?;
            match version {
                Some(version) if !NFS_VERSIONS.contains(&&**version) => {
                    let what = format!("'{}' is not an NFS version", version.escape_debug());
                    Err(invalid("source.version", what).advise("use 3, 4, 4.0, 4.1 or 4.2"))
                }
                _ => Ok(()),
            }
        }
        SrSource::Smb { server, share, credentials } => {
            check_server(server)?;
            check_share(share)?;
            check_credentials(credentials.as_path())
        }
    }
}

fn invalid(field: &str, what: impl Into<String>) -> Problem {
    Problem::new(Code::Invalid, what).field(field)
}

/// A host's name or an address: nothing that could be taken for an option or a path.
fn check_server(server: &str) -> Result<(), Problem> {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b".:_-%".contains(&byte);
    let first = server.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b':');
    match first && server.len() <= 255 && server.bytes().all(known) {
        true => Ok(()),
        false => {
            Err(invalid("source.server", format!("'{}' is not a valid server name or address", server.escape_debug())))
        }
    }
}

fn check_share(share: &str) -> Result<(), Problem> {
    let wrong =
        share.is_empty() || share.len() > 1024 || share.contains(|char: char| char.is_control() || char == '\\');
    match wrong || share.split('/').any(|part| matches!(part, "" | "." | "..")) {
        true => Err(invalid(
            "source.share",
            format!("'{}' is not a valid share, or share and directory", share.escape_debug()),
        )),
        false => Ok(()),
    }
}

/// The file contains a password: it must be root's (or ours), and neither readable nor replaceable by others.
fn check_credentials(path: &Path) -> Result<(), Problem> {
    let field = "source.credentials";
    let shown = path.display();
    if path.to_str().is_none_or(|text| text.contains(',')) {
        return Err(invalid(
            field,
            format!("{shown} contains a comma, which mount(8) would take for the end of the option"),
        ));
    }
    let found = std::fs::symlink_metadata(path);
    let found = found.map_err(|error| invalid(field, format!("cannot examine {shown}: {error}")))?;
    let own = [0, rustix::process::geteuid().as_raw()].contains(&found.uid());
    match found.is_file() && own && found.mode() & 0o077 == 0 {
        true => Ok(()),
        false => Err(invalid(field, format!("{shown} is not a regular file that only root can read and write"))
            .advise(format!("chown root {shown} && chmod 0600 {shown}"))),
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn nfs(server: &str, version: Option<&str>) -> SrSource {
        let (server, version) = (server.into(), version.map(String::from));
        SrSource::Nfs { server, export: "/vms".parse().unwrap(), version }
    }

    fn smb(share: &str, credentials: &str) -> SrSource {
        SrSource::Smb { server: "nas".into(), share: share.into(), credentials: credentials.parse().unwrap() }
    }

    fn line(source: &SrSource) -> String {
        let words = words(source, Path::new("/run/sr/1")).unwrap();
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn network_mounts_are_hard_nodev_and_noexec() {
        assert_eq!(
            line(&nfs("nas", Some("4.2"))),
            "-t nfs -o hard,nosuid,nodev,noexec,noatime,proto=tcp,timeo=600,retrans=2,vers=4.2 -- nas:/vms /run/sr/1"
        );
        assert!(!line(&nfs("nas", None)).contains("vers"));
        assert!(line(&nfs("fe80::1%eth0", None)).contains(" [fe80::1%eth0]:/vms "));
        assert_eq!(
            line(&smb("vms/a", "/etc/nas")),
            "-t cifs -o hard,nosuid,nodev,noexec,cache=none,uid=0,gid=0,file_mode=0600,dir_mode=0700,\
             credentials=/etc/nas -- //nas/vms/a /run/sr/1"
        );
    }

    #[test]
    fn values_ambiguous_to_mount_are_refused_by_field() {
        check(&nfs("10.0.0.1", Some("3"))).unwrap();
        for server in ["", "-o", "a b", "a/b", "a,b", "a\nb", "ü", &"x".repeat(256)] {
            assert_eq!(check(&nfs(server, None)).unwrap_err().field.as_deref(), Some("source.server"), "{server:?}");
        }
        for version in ["", "2", "4.2,soft"] {
            assert_eq!(check(&nfs("nas", Some(version))).unwrap_err().field.as_deref(), Some("source.version"));
        }
        for share in ["", "/vms", "a/../b", "a//b", "a\\b", "a\nb"] {
            assert_eq!(check(&smb(share, "/x")).unwrap_err().field.as_deref(), Some("source.share"), "{share:?}");
        }
    }

    #[test]
    fn credentials_readable_or_replaceable_by_others_are_refused() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("credentials");
        let shown = path.to_str().unwrap();
        let refused =
            |path: &str| check(&smb("vms", path)).is_err_and(|why| why.field.as_deref() == Some("source.credentials"));
        assert!(refused(shown), "it does not exist");
        std::fs::write(&path, "username=u\n").unwrap();
        for mode in [0o644, 0o640, 0o602] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert!(refused(shown), "{mode:o}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        check(&smb("vms", shown)).unwrap();
        std::os::unix::fs::symlink(&path, room.path().join("link")).unwrap();
        assert!(refused(room.path().join("link").to_str().unwrap()));
        assert!(refused(&format!("{shown},soft")));
    }
}
