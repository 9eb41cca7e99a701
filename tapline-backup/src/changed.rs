//! The list of what has changed on a disk: JSON, as `[{"start":0,"length":65536}]`.
//!
//! Knows nothing of who has recorded it. Unknown fields are refused: one could say that a range has not changed.

use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;

use crate::failure::{Exit, Failure};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Changed {
    start: u64,
    length: u64,
}

/// Reads a list from a file, or from standard input for `-`.
pub fn read(path: &Path, len: u64) -> Result<Vec<Range<u64>>, Failure> {
    let text = match path == Path::new("-") {
        true => {
            let mut text = String::new();
            io::stdin().read_to_string(&mut text).map(|_| text)
        }
        false => std::fs::read_to_string(path),
    };
    let text = text.map_err(|error| Failure::cannot(format_args!("read the changes in {}", path.display()), error))?;
    parse(&text, len).map_err(|why| {
        let what = format!("{} does not list changes of this disk: {why}", path.display());
        Failure::new(Exit::Usage, what).advise(r#"write them as [{"start":0,"length":65536}], in bytes"#)
    })
}

/// Parses a list of a disk of `len` bytes.
fn parse(text: &str, len: u64) -> Result<Vec<Range<u64>>, String> {
    let listed: Vec<Changed> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let range = |changed: Changed| {
        let end = changed.start.checked_add(changed.length).filter(|end| *end <= len);
        end.map(|end| changed.start..end)
            .ok_or_else(|| format!("{} bytes at {} lie beyond its end at {len}", changed.length, changed.start))
    };
    listed.into_iter().map(range).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_list_is_of_ranges_inside_of_the_disk() {
        assert_eq!(parse("[]", 0), Ok(vec![]));
        assert_eq!(parse(r#"[{"start":512,"length":512},{"start":0,"length":1}]"#, 1024), Ok(vec![512..1024, 0..1]));
        assert!(parse(r#"[{"start":512,"length":513}]"#, 1024).is_err());
        assert!(parse(r#"[{"start":18446744073709551615,"length":2}]"#, 1024).is_err());
        assert!(parse(r#"[{"start":-1,"length":2}]"#, 1024).is_err());
        assert!(parse(r#"[{"start":0,"length":2,"zero":true}]"#, 1024).is_err());
        assert!(parse(r#"[{"start":0}]"#, 1024).is_err());
        assert!(parse("", 1024).is_err());
    }
}
