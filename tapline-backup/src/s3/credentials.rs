//! The file with the key for a server of S3, as Amazon's tools keep it.
//!
//! Knows nothing of servers. Invariants: the file is judged by the descriptor that is read, so it cannot be replaced in
//! between; nothing of its content is in a message.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use rustix::process::geteuid;

use crate::failure::{Exit, Failure};

/// A larger file is another one.
const SIZE_MAX: u64 = 64 << 10;

/// The profile that is read; lines before any profile belong to it.
const PROFILE: &str = "default";

/// A key for a server.
pub struct Credentials {
    /// The name of the key, which is sent.
    pub id: String,
    /// The key itself, with which requests are signed.
    pub secret: String,
    /// What goes with a key that ends.
    pub token: Option<String>,
}

/// Reads a file that only root or this user can read or write.
pub fn read(path: &Path) -> Result<Credentials, Failure> {
    let shown = path.display();
    let cannot =
        |error: io::Error| Failure::new(Exit::Usage, format!("cannot read the credentials in {shown}: {error}"));
    // A FIFO has no one to wait for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file: OwnedFd = openat(CWD, path, flags, Mode::empty()).map_err(|errno| cannot(errno.into()))?;
    let found = fstat(&file).map_err(|errno| cannot(errno.into()))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(Failure::new(Exit::Usage, format!("the credentials in {shown} are not in a regular file")));
    }
    let mode = found.st_mode & 0o777;
    if mode & 0o077 != 0 || ![0, geteuid().as_raw()].contains(&found.st_uid) {
        let what = format!(
            "the credentials in {shown} are not secret: the file is of user {} with mode {mode:03o}",
            found.st_uid
        );
        let advice = "let only its owner have access, who is root or the user of this command; replace the key if others \
                      may have read it";
        return Err(Failure::new(Exit::Usage, what).advise(format!("{advice}: chmod 600 {shown}")));
    }
    let mut text = String::new();
    File::from(file).take(SIZE_MAX).read_to_string(&mut text).map_err(cannot)?;
    parse(&text).ok_or_else(|| {
        let what = format!("{shown} has no credentials: aws_access_key_id and aws_secret_access_key of '{PROFILE}'");
        Failure::new(Exit::Usage, what)
            .advise("write three lines: [default], aws_access_key_id = ID, aws_secret_access_key = KEY")
    })
}

/// The key of the profile.
fn parse(text: &str) -> Option<Credentials> {
    let (mut id, mut secret, mut token) = (None, None, None);
    let mut is_ours = true;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(profile) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            is_ours = profile.trim() == PROFILE;
            continue;
        }
        let Some((name, value)) = line.split_once('=').filter(|_| is_ours) else { continue };
        let field = match name.trim().to_ascii_lowercase().as_str() {
            "aws_access_key_id" => &mut id,
            "aws_secret_access_key" => &mut secret,
            "aws_session_token" => &mut token,
            _ => continue,
        };
        *field = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
    }
    Some(Credentials { id: id?, secret: secret?, token })
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const TEXT: &str = "[default]\naws_access_key_id = AKIA\naws_secret_access_key=s3=cret/+\n";

    fn parsed(text: &str) -> Option<(String, String, Option<String>)> {
        parse(text).map(|found| (found.id, found.secret, found.token))
    }

    #[test]
    fn the_key_of_the_default_profile_is_found() {
        let right = Some(("AKIA".to_owned(), "s3=cret/+".to_owned(), None));
        assert_eq!(parsed(TEXT), right);
        assert_eq!(
            parsed(&format!("[other]\naws_access_key_id=B\n\n# a\n{TEXT}[third]\naws_session_token=t\n")),
            right
        );
        let plain = "AWS_ACCESS_KEY_ID=a\nAWS_SECRET_ACCESS_KEY=b\nAWS_SESSION_TOKEN=c";
        assert_eq!(parsed(plain), Some(("a".into(), "b".into(), Some("c".into()))));
        for wrong in ["", "aws_access_key_id=a", "aws_access_key_id=a\naws_secret_access_key=", "[x]\n[default\n\0=\0"]
        {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
        assert_eq!(parsed(&TEXT.replace("default", "other")), None);
    }

    #[test]
    fn a_file_that_others_may_read_is_refused_without_its_content() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("credentials");
        let refused = |with: &str| {
            let failure = read(&path).err().unwrap();
            let message = failure.message();
            assert!(message.contains(with) && failure.exit == Exit::Usage, "{message}");
            assert!(!message.contains("AKIA") && !message.contains("s3=cret"), "{message}");
        };
        refused("No such file");
        fs::write(&path, TEXT).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o601] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            refused("chmod 600");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&path).ok().unwrap().id, "AKIA");
        fs::write(&path, "AKIA").unwrap();
        refused("has no credentials");
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").args(["-m", "600"]).arg(&path).status().unwrap().success());
        refused("regular file");
    }
}
