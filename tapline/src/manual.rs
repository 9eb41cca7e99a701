//! Generates the manual pages of the commands, and a page with all commands, from their definitions.
//!
//! The pages of `tapline` itself, `tapline-disk`, `tapline-backup` and `taplined` are written by hand.

mod commands;

use std::collections::BTreeMap;
use std::path::PathBuf;

use api::Problem;
use arguments::example::{self, Examples, Line};
use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::{Arguments, EXAMPLES};

/// Commands without a page generated from the definitions here: pages of the first two come from the definitions of
/// `tapline-disk`, those of `disk` and `backup` would get the names of programs, and the last two are not for users.
const DESCRIBED_ELSEWHERE: [&str; 6] = ["image", "serve", "disk", "backup", "libvirt-hook", "manual"];

/// Pages of programs, which are written by hand.
const BY_HAND: [&str; 2] = ["tapline-disk.1", "tapline-backup.1"];

/// The page of all commands, relative to the directory of the manual pages.
const ALL: &str = "../commands.md";

/// The roff preamble, needed once per page.
const PREAMBLE: &str = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n";

/// Arguments of `manual`.
#[derive(clap::Args)]
pub struct Manual {
    /// The directory, next to which is the page of all commands; pages of commands that no longer exist are removed
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
        let all = (ALL.to_owned(), all().into_bytes());
        for (name, text) in pages.into_iter().chain([all]) {
            let path = self.directory.join(name);
            std::fs::write(&path, text)
                .map_err(|error| Problem::failed(format_args!("write {}", path.display()), error))?;
        }
        Ok(())
    }

    /// Existing generated pages: all with our prefix except those of programs.
    fn present(&self) -> Result<Vec<String>, Problem> {
        let tried = |error| Problem::failed(format_args!("list {}", self.directory.display()), error);
        let entries = std::fs::read_dir(&self.directory).map_err(tried)?;
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(tried)?.file_name().to_string_lossy().into_owned();
            if name.starts_with("tapline-") && name.ends_with(".1") && !BY_HAND.contains(&name.as_str()) {
                names.push(name);
            }
        }
        Ok(names)
    }
}

/// All pages by file name.
fn pages() -> Result<BTreeMap<String, Vec<u8>>, Problem> {
    let mut pages = BTreeMap::new();
    add_all(own(&tapline()), EXAMPLES, &mut pages)?;
    add_all(tapline_disk().get_subcommands(), example::OF_IMAGES, &mut pages)?;
    add_all(backup_verbs(&tapline_backup()), arguments::backup::EXAMPLES, &mut pages)?;
    Ok(pages)
}

/// The page of all commands.
fn all() -> String {
    let (tapline, disk, backup) = (tapline(), tapline_disk(), tapline_backup());
    let passed_on = |command: &&clap::Command| {
        [&disk, &backup].iter().any(|program| program.find_subcommand(command.get_name()).is_some())
    };
    let own = own(&tapline).filter(|command| !passed_on(command));
    let nouns = backup_verbs(&backup).filter(|verb| verb.has_subcommands());
    commands::page(own.chain(disk.get_subcommands()).chain(backup.get_subcommands()).chain(nouns))
}

fn tapline() -> clap::Command {
    let mut tapline = Arguments::command().disable_help_subcommand(true);
    tapline.build();
    tapline
}

fn tapline_disk() -> clap::Command {
    let mut disk = arguments::Arguments::command().name("tapline").disable_help_subcommand(true);
    disk.build();
    disk
}

fn tapline_backup() -> clap::Command {
    let mut backup = arguments::backup::BackupArguments::command().name("tapline").disable_help_subcommand(true);
    backup.build();
    backup
}

/// The verbs of `backup`, of which `target` has verbs of its own.
fn backup_verbs(backup: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    backup.get_subcommands().flat_map(clap::Command::get_subcommands)
}

/// The commands whose pages are generated from the definitions here.
fn own(tapline: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    tapline.get_subcommands().filter(|noun| !DESCRIBED_ELSEWHERE.contains(&noun.get_name()))
}

fn add_all<'a>(
    nouns: impl Iterator<Item = &'a clap::Command>,
    examples: &str,
    pages: &mut BTreeMap<String, Vec<u8>>,
) -> Result<(), Problem> {
    let examples = example::examples(examples);
    for noun in nouns {
        add(noun, &examples, pages)?;
        for verb in noun.get_subcommands() {
            add(verb, &examples, pages)?;
        }
    }
    Ok(())
}

fn add(command: &clap::Command, examples: &Examples<'_>, pages: &mut BTreeMap<String, Vec<u8>>) -> Result<(), Problem> {
    let man = Man::new(command.clone()).source("Tapline").manual("User Commands");
    let mut text = Vec::new();
    render(&man, command, examples, &mut text).map_err(|error| Problem::failed("write a manual page", error))?;
    let text = String::from_utf8_lossy(&text).replace(PREAMBLE, "");
    pages.insert(man.get_filename(), format!("{PREAMBLE}{text}").into_bytes());
    Ok(())
}

/// Writes a page, with its examples first.
fn render(man: &Man, command: &clap::Command, examples: &Examples<'_>, text: &mut Vec<u8>) -> std::io::Result<()> {
    man.render_title(text)?;
    man.render_name_section(text)?;
    let words = command.get_bin_name().unwrap_or_default().trim_start_matches("tapline ");
    if let Some(lines) = examples.get(words) {
        let mut examples = Roff::new();
        examples.control("SH", ["EXAMPLES"]);
        for (at, line) in lines.iter().enumerate() {
            match line {
                Line::Text(sentence) => {
                    if at > 0 {
                        examples.control("PP", []);
                    }
                    examples.text([roman(*sentence)]);
                }
                Line::Typed(typed) => {
                    examples.control("EX", []).control("RS", ["4"]);
                    examples.text([bold(*typed)]);
                    examples.control("RE", []).control("EE", []);
                }
            }
        }
        examples.to_writer(text)?;
    }
    synopsis(command).to_writer(text)?;
    man.render_description_section(text)?;
    man.render_options_section(text)?;
    if command.get_subcommands().any(|verb| !verb.is_hide_set()) {
        man.render_subcommands_section(text)?;
    }
    if command.get_after_long_help().is_some() || command.get_after_help().is_some() {
        man.render_extra_section(text)?;
    }
    Ok(())
}

/// The synopsis in one line, as in the help: `tapline vdi snapshot [OPTIONS] <VDI>`.
fn synopsis(command: &clap::Command) -> Roff {
    let usage = command.clone().render_usage().to_string();
    let mut synopsis = Roff::new();
    synopsis.control("SH", ["SYNOPSIS"]);
    for line in usage.trim_start_matches("Usage: ").lines() {
        let words = command.get_bin_name().unwrap_or_default();
        let rest = line.trim().trim_start_matches(words);
        synopsis.text([bold(words), roman(rest)]);
    }
    synopsis
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_committed_page_of_all_commands_is_current() {
        let committed = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/man").join(ALL));
        assert!(committed.unwrap_or_default() == all(), "docs/commands.md is stale: run cargo xtask man");
    }

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
