//! The value of `--dirty-bitmap`.

use std::path::PathBuf;
use std::str::FromStr;

/// The longest name, as in QEMU.
const NAME_MAX: usize = 1023;

/// A dirty bitmap to be offered to NBD clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyBitmap {
    /// Clients request it as `qemu:dirty-bitmap:` and this name.
    pub name: String,
    /// The maps of changed blocks that it is made of, of successive intervals, the oldest first; at least one.
    pub maps: Vec<PathBuf>,
}

/// The word does not name a bitmap and its maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "use NAME=MAP, or NAME=MAP,MAP with the maps of successive snapshots, the oldest first; a name has 1 to {NAME_MAX} \
     bytes and no control characters"
)]
pub struct NotADirtyBitmap;

impl FromStr for DirtyBitmap {
    type Err = NotADirtyBitmap;

    fn from_str(word: &str) -> Result<DirtyBitmap, NotADirtyBitmap> {
        let (name, maps) = word.split_once('=').ok_or(NotADirtyBitmap)?;
        let is_name = (1..=NAME_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
        let maps: Vec<PathBuf> = maps.split(',').map(PathBuf::from).collect();
        if !is_name || maps.iter().any(|map| map.as_os_str().is_empty()) {
            return Err(NotADirtyBitmap);
        }
        Ok(DirtyBitmap { name: name.to_owned(), maps })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_dirty_bitmap_has_a_name_and_maps() {
        let parsed: DirtyBitmap = "nightly=/srv/a.map,b.map".parse().unwrap();
        assert_eq!(parsed, DirtyBitmap { name: "nightly".into(), maps: vec!["/srv/a.map".into(), "b.map".into()] });
        assert_eq!("a:b=c=d".parse::<DirtyBitmap>().unwrap().maps, [PathBuf::from("c=d")]);
        assert!(format!("{}=m", "n".repeat(NAME_MAX)).parse::<DirtyBitmap>().is_ok());
        let long = format!("{}=m", "n".repeat(NAME_MAX + 1));
        for word in ["", "a", "=m", "a=", "a=m,", "a=,m", "a=m,,n", "a\n=m", &long] {
            assert_eq!(word.parse::<DirtyBitmap>(), Err(NotADirtyBitmap), "{word}");
        }
    }
}
