//! Temporary files left by a killed daemon.
//!
//! Only unfinished reflink copies ([`Directory::share_image`]) and files for measurements ([`Directory::scratch`]): no
//! other program uses these names, and it is known what they were for. Marker files of a command that changes an image
//! have the same suffix (`image rebase`); they never belong to raw images.

use api::{Code, ImageFormat, Problem};
use rustix::fs::AtFlags;
use uuid::Uuid;

use super::scratch::is_scratch;
use super::{Directory, UNFINISHED};

impl Directory {
    /// Removes them, and returns their names. To be called while nothing else uses the repository.
    pub fn remove_unfinished(&self) -> Result<Vec<String>, Problem> {
        let failed = |errno| Problem::failed(format_args!("list unfinished files in {}", self.path().display()), errno);
        let mut removed = Vec::new();
        for entry in rustix::fs::Dir::read_from(self.handle()).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Some(name) = entry.file_name().to_str().ok().filter(|name| is_copy(name) || is_scratch(name)) else {
                continue;
            };
            let own = [0, rustix::process::geteuid().as_raw()];
            let stat = rustix::fs::statat(self.handle(), name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
            if own.contains(&stat.st_uid) {
                match self.remove_unused(name) {
                    Ok(()) => removed.push(name.to_owned()),
                    Err(problem) if problem.code == Code::InUse => {}
                    Err(problem) => return Err(problem),
                }
            }
        }
        Ok(removed)
    }
}

/// Whether a name is that of an unfinished copy: of an image of ours, which are named by UUIDs.
fn is_copy(name: &str) -> bool {
    let image = name.strip_suffix(UNFINISHED).and_then(|name| name.strip_suffix(&format!(".{}", ImageFormat::Raw)));
    image.is_some_and(|image| Uuid::parse_str(image).is_ok_and(|uuid| uuid.to_string() == image))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn unfinished_copies_are_removed_and_other_files_stay() {
        let room = tempfile::tempdir().unwrap();
        let directory = Directory::open(&room.path().to_str().unwrap().parse().unwrap()).unwrap();
        let uuid = Uuid::new_v4();
        let copy = format!("{uuid}.raw.unfinished");
        let scratch = format!("calibration-{uuid}.unfinished");
        let others = [
            format!("{uuid}.raw"),
            format!("{uuid}.vhd.unfinished"),
            format!("{}.raw.unfinished", uuid.simple()),
            "disk.raw.unfinished".into(),
            ".tapline-sr.json.unfinished".into(),
            format!("calibration-{}.unfinished", uuid.simple()),
            format!("calibration-{uuid}"),
        ];
        for name in others.iter().chain([&copy, &scratch]) {
            std::fs::write(room.path().join(name), "x").unwrap();
        }
        let mut removed = directory.remove_unfinished().unwrap();
        removed.sort_by_key(|name| name.starts_with("calibration"));
        assert_eq!(removed, [copy, scratch]);
        assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), others.len());
        assert!(directory.remove_unfinished().unwrap().is_empty());
    }
}
