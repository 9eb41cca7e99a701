//! The manual pages of the daemon's nouns and their verbs, generated from the command definitions.
//!
//! The page of `tapline` itself and those of `tapline-disk` are written by hand.

use std::collections::BTreeMap;
use std::path::PathBuf;

use api::Problem;
use clap::CommandFactory;
use clap_mangen::Man;

use crate::Arguments;

/// Nouns that are described by other programs or pages.
const DESCRIBED_ELSEWHERE: [&str; 5] = ["image", "serve", "disk", "xen", "manual"];

/// Where to write the pages.
#[derive(clap::Args)]
pub struct Manual {
    /// The directory; pages of commands that no longer exist are removed from it
    directory: PathBuf,
}

impl Manual {
    /// Writes the pages.
    pub fn run(&self) -> Result<(), Problem> {
        let pages = pages()?;
        for name in self.present()? {
            if !pages.contains_key(&name) {
                let path = self.directory.join(&name);
                std::fs::remove_file(&path)
                    .map_err(|error| Problem::failed(format_args!("remove {}", path.display()), error))?;
            }
        }
        for (name, text) in pages {
            let path = self.directory.join(name);
            std::fs::write(&path, text)
                .map_err(|error| Problem::failed(format_args!("write {}", path.display()), error))?;
        }
        Ok(())
    }

    /// Existing pages with our prefix, except those of `tapline-disk`.
    fn present(&self) -> Result<Vec<String>, Problem> {
        let tried = |error| Problem::failed(format_args!("list {}", self.directory.display()), error);
        let entries = std::fs::read_dir(&self.directory).map_err(tried)?;
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(tried)?.file_name().to_string_lossy().into_owned();
            if name.starts_with("tapline-") && name.ends_with(".1") && name != "tapline-disk.1" {
                names.push(name);
            }
        }
        Ok(names)
    }
}

/// All pages by file name.
fn pages() -> Result<BTreeMap<String, Vec<u8>>, Problem> {
    let mut tapline = Arguments::command().disable_help_subcommand(true);
    tapline.build();
    let mut pages = BTreeMap::new();
    for noun in tapline.get_subcommands().filter(|noun| !DESCRIBED_ELSEWHERE.contains(&noun.get_name())) {
        add(noun, &mut pages)?;
        for verb in noun.get_subcommands() {
            add(verb, &mut pages)?;
        }
    }
    Ok(pages)
}

fn add(command: &clap::Command, pages: &mut BTreeMap<String, Vec<u8>>) -> Result<(), Problem> {
    let man = Man::new(command.clone()).source("Tapline").manual("User Commands");
    let mut text = Vec::new();
    man.render(&mut text).map_err(|error| Problem::failed("write a manual page", error))?;
    pages.insert(man.get_filename(), text);
    Ok(())
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_committed_manual_pages_are_current() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/man");
        let pages = pages().unwrap();
        for (name, text) in &pages {
            let committed = std::fs::read(directory.join(name)).unwrap_or_default();
            assert!(committed == *text, "{name} is stale: run cargo xtask man");
        }
        let mut present = Manual { directory }.present().unwrap();
        present.sort();
        assert_eq!(present, pages.into_keys().collect::<Vec<_>>(), "run cargo xtask man");
    }
}
